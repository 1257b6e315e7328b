"""Weight: what a rank has of a prepared parameter, from its master to the tensor that a layer multiplies."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from zerofp4.format import BLOCK
from zerofp4.ops import TransposeStage, has_fp4_tensor_cores, transpose_pairs
from zerofp4.storage import NVFP4Storage, Side, empty_buffer
from zerofp4.tensors import NVFP4Tensor

NOT_ATTACHED = "has no codes yet: call zerofp4.integrations.fsdp2.attach(model, optimizer) before the forward"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where FSDP2 has put the master of a weight.

    param_of: gives FSDP2's own record of the parameter, which it does not keep alive: a cycle of that record,
    its shard and the weight would pass through views, where Python's collector does not see it.
    group: of the ranks that it is sharded over. shape: of the weight that is gathered, of a slice under
    tensor parallelism. first_row, rows: of this rank's shard; padded_rows: of every rank's input to the
    all-gather. device: where it is gathered. dtype: that layers compute in.
    """

    param_of: weakref.ref
    group: dist.ProcessGroup
    shape: torch.Size
    first_row: int
    rows: int
    padded_rows: int
    device: torch.device
    dtype: torch.dtype

    @property
    def param(self) -> Any:
        return self.param_of()

    @property
    def start(self) -> int | None:
        """The index of this rank's first element; None where it has none."""
        return self.first_row * self.shape[1:].numel() if self.rows else None


class Weight:
    """One parameter that prepare has taken over, shared by all tensors that are its master or a piece of it.

    name: the parameter's in the model. dtype: that it had. columnwise: whether what is gathered has the
    transposed copy too. module: whose parameter it is.
    """

    def __init__(self, name: str, dtype: torch.dtype, columnwise: bool):
        self.name, self.dtype, self.columnwise = name, dtype, columnwise
        self.placement: Placement | None = None
        self.writes = 0
        """How often its master was written to, through whichever tensor."""
        self.amax_group: list[Weight] | None = None
        """The weights that it shares its amax with, itself among them."""

    def __deepcopy__(self, memo: dict) -> Weight:
        """A copy of a model is not attached to an optimizer."""
        copied = memo[id(self)] = Weight(self.name, self.dtype, self.columnwise)
        if self.amax_group is not None:
            copied.amax_group = [memo.get(id(other)) or other.__deepcopy__(memo) for other in self.amax_group]
        return copied

    # Casts

    def place(self, placement: Placement) -> None:
        """Make room for the scales of the whole weight and the codes of this rank's rows."""
        self.placement, self._place, self._casts = placement, None, 0
        self._gathered: _Gathered | None = None
        self._gathered_casts = 0
        shape, local = placement.shape, self.master()
        layouts = ("compact", "swizzled") if has_fp4_tensor_cores(placement.device) else ("compact",)
        self.record = NVFP4Storage(shape, placement.dtype, (BLOCK, BLOCK), name=self.name)
        amax = torch.zeros(self.record.amax_shape, dtype=torch.float32, device=local.device)
        columnwise = self.columnwise and not placement.param.is_dtensor  # then plain values are gathered
        for side in ("rowwise", "columnwise")[: 1 + columnwise]:
            scales = _empty_scales(self.record, side, layouts, local.device)
            setattr(self.record, side, Side(None, scales, amax))
        padded = (placement.padded_rows, *shape[1:-1], shape[-1] // 2)
        pinned = local.is_pinned() and placement.device != local.device
        self.codes = torch.zeros(padded, dtype=torch.uint8, device=local.device, pin_memory=pinned)
        self._copied: torch.cuda.Event | None = None

    def leave(self) -> None:
        """Be as before attach."""
        self.placement = None

    def master(self) -> torch.Tensor:
        """This rank's rows, where FSDP2 has them now."""
        local = getattr(self.placement.param._sharded_local_tensor, "local", None)
        if local is None:
            raise RuntimeError(
                f"{self.name!r} was prepared, but its parameter was replaced since by one that is no master: "
                "a model gets its dtype before prepare"
            )
        return local

    def own_codes(self) -> torch.Tensor:
        """uint8 [bytes] that this rank's rows are cast to."""
        return self.codes[: self.placement.rows].view(-1)

    def wait_for_copy(self) -> None:
        """A GPU may still be reading codes that lie in pinned memory, which a cast is about to change."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def note_cast(self) -> None:
        """The codes are those of the master as it is now, with the scales of the record."""
        self._casts += 1
        local = self.master()
        self._place, self._version = (local.data_ptr(), self.writes), _version(local)

    def note_moved(self, local: torch.Tensor) -> None:
        """FSDP2 has copied the master that was cast to this place."""
        self._place, self._version = (local.data_ptr(), self.writes), None

    def is_current(self, local: torch.Tensor) -> bool:
        """Whether the codes are those of a master that lies here. Writes to the plain tensor inside, which
        state dicts share, are counted by torch.
        """
        if self.placement is None or self._place is None:
            return False
        if local.numel() == 0:
            return True
        if self._place != (local.data_ptr(), self.writes):
            return False
        version = _version(local)
        if self._version is None:  # the first look at the view that FSDP2 made of the new place
            self._version = version
        return self._version == version

    def is_stale(self) -> bool:
        return not self.is_current(self.master())

    def is_gathered_before_cast(self) -> bool:
        """Whether the module computes with what was gathered before the last cast."""
        unsharded = self.placement.param.sharded_state.name == "UNSHARDED"
        return unsharded and self._gathered_casts != self._casts

    # Gathers

    def all_gather_input(self) -> tuple[tuple[torch.Tensor], None]:
        """The packed rows, half a byte an element, and nothing else. Scales do not travel: every rank has
        them.

        Raises RuntimeError where they are not those of the master.
        """
        if self.placement is None or self._place is None:
            raise RuntimeError(f"{self.name!r} {NOT_ATTACHED}")
        if self.is_stale():
            raise RuntimeError(
                f"the master of {self.name!r} was written to since it was cast: the forward pass of the "
                "model that attach was called with casts anew, on all ranks; unshard() and the forward of a "
                "part of it do not"
            )
        if self.codes.device == self.placement.device:
            return (self.codes,), None
        codes = self.codes.to(self.placement.device, non_blocking=True)
        if self.codes.is_pinned():
            self._copied = torch.cuda.Event()
            self._copied.record()
        return (codes,), None

    def gathered(self, outputs: tuple[torch.Tensor], out: torch.Tensor | None):
        """What FSDP2's fsdp_post_all_gather returns: the tensor and what is to be freed with it; or, with
        out, nothing.
        """
        changed, self._gathered_casts = self._gathered_casts != self._casts, self._casts
        if out is None:
            rows = outputs[0][: self.placement.shape[0]]
            self._gathered = _Gathered(self, rows)
            self._gathered.fill(changed)
            return self._gathered.tensor, self._gathered.inner
        self._gathered.fill(changed)
        if changed and not out.is_inference():
            increment_version(out)  # a backward pass through the values of before must fail
        return None


def _empty_scales(record: NVFP4Storage, side: str, layouts: tuple[str, ...], device: torch.device) -> dict:
    dtype = record.buffer_dtype(f"{side}_scale")
    return {layout: empty_buffer(record.scale_shape(side, layout), dtype, device) for layout in layouts}


def _version(local: torch.Tensor) -> int:
    return -1 if local.is_inference() else local._version


class _Gathered:
    """The whole weight while a module computes with it.

    rows: uint8, what was gathered, whose storage FSDP2 frees and fills. tensor: over them, the columns that
    are derived from them and the scales of the weight's record; or, under tensor parallelism, plain values.
    inner: what else FSDP2 is to free and to give memory to.
    """

    def __init__(self, weight: Weight, rows: torch.Tensor):
        placement, record = weight.placement, weight.record
        self._source, self._is_copy = record, record.device != rows.device
        self.record = NVFP4Storage.from_context(record.shape, record.context())
        self.record.name = weight.name
        self.inner: tuple[torch.Tensor, ...] = ()
        amax = record.amax.to(rows.device)
        for name, side in record.sides():
            scales = {layout: scale.to(rows.device) for layout, scale in side.scales.items()}
            setattr(self.record, name, Side(rows, scales, amax))
        if self.record.columnwise is not None:
            columns = torch.empty(self.record.data_shape("columnwise"), dtype=torch.uint8, device=rows.device)
            self.record.columnwise.data = columns
            self.inner = (columns,)
        self._transposes: TransposeStage | None = None
        self._values: torch.Tensor | None = None
        if placement.param.is_dtensor:
            self._values = torch.empty(record.shape, dtype=placement.dtype, device=rows.device)
            self.inner = (self._values,)
        self.tensor = NVFP4Tensor(self.record) if self._values is None else self._values

    def fill(self, changed: bool) -> None:
        """All that is not gathered, from what was. changed: whether there was a cast since the last time."""
        if changed and self._is_copy:
            pairs = zip(self._source.buffers(), _without_data(self.record), strict=True)
            for (_, mine), (_, copy) in pairs:
                copy.view(torch.uint8).copy_(mine.view(torch.uint8), non_blocking=True)
        if self._values is not None:
            values = NVFP4Tensor(self.record).dequantize()
            with torch.autograd._unsafe_preserve_version_counter(self._values):
                self._values.copy_(values)
        elif self.record.columnwise is not None:
            pairs = transpose_pairs([self.record])
            if self._transposes is None:
                self._transposes = TransposeStage(pairs)
            else:
                self._transposes.bind(pairs)  # their memory was freed in between
            self._transposes.run()


def _without_data(record: NVFP4Storage) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in record.buffers() if not name.endswith("_data")]
