"""Weight: what a rank has of a prepared parameter, from its master to the tensor that a layer multiplies."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from zerofp4 import ops
from zerofp4.distributed import rank_and_size
from zerofp4.format import BLOCK, SCALE_DTYPE, FourOverSix
from zerofp4.integrations.fsdp2.gathered import Gathered
from zerofp4.layout import ceil_div
from zerofp4.storage import NVFP4Storage, Side, empty_buffer
from zerofp4.tensors import reads_columns

NOT_ATTACHED = "has no codes yet: call zerofp4.integrations.fsdp2.attach(model, optimizer) before the forward"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where FSDP2 has put the master of a weight.

    param_of: gives FSDP2's own record of the parameter, which it does not keep alive: a cycle of that record,
    its shard and the weight would pass through views, where Python's collector does not see it.
    group: of the ranks that it is sharded over. shape: of the weight that is gathered, of a slice under
    tensor parallelism. first_row, rows: of this rank's shard; padded_rows: of every rank's input to the
    all-gather. device: where it is gathered. dtype: that layers compute in. reshards: whether FSDP2, as it is
    set up now, frees what is gathered after the forward pass, and gathers it again for the backward pass.
    """

    param_of: weakref.ref
    group: dist.ProcessGroup
    shape: torch.Size
    first_row: int
    rows: int
    padded_rows: int
    device: torch.device
    dtype: torch.dtype
    reshards: Callable[[], bool]

    @property
    def param(self) -> Any:
        return self.param_of()

    @property
    def start(self) -> int | None:
        """The index of this rank's first element; None where it has none."""
        return self.first_row * self.shape[1:].numel() if self.rows else None


class Weight:
    """One parameter that prepare has taken over, shared by all tensors that are its master or a piece of it.

    name: the parameter's in the model. dtype: that it had. takes_codes: whether its module multiplies codes.
    columnwise: whether that is to have the transposed copy of them too; None where there are FP4 tensor
    cores. block, four_over_six: how it is cast.
    """

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        takes_codes: bool,
        columnwise: bool | None,
        block: tuple[int, int] = (BLOCK, BLOCK),
        four_over_six: FourOverSix | None = None,
    ):
        self.name, self.dtype, self.takes_codes, self.columnwise = name, dtype, takes_codes, columnwise
        self.block, self.four_over_six = block, four_over_six
        self.placement: Placement | None = None
        self._place: tuple[int, int] | None = None
        self._gathered: Gathered | None = None
        self._casts = self._gathered_casts = 0
        self.writes = 0
        """How often its master was written to, through whichever tensor."""
        self.was_loaded = False
        """Whether load_state_dict has written to the master since the last cast, as it has on every rank."""
        self.amax_group: list[str] | None = None
        """Names of the weights that share one amax, its own among them: one list for all of these weights. A
        list of the weights themselves would be in a reference cycle, which keeps the process group alive.
        """

    def __deepcopy__(self, memo: dict) -> Weight:
        """A copy of a model is not attached to an optimizer."""
        kind = self.takes_codes, self.columnwise, self.block, self.four_over_six
        copied = memo[id(self)] = Weight(self.name, self.dtype, *kind)
        copied.amax_group = copy.deepcopy(self.amax_group, memo)
        return copied

    # Casts

    def place(self, placement: Placement) -> None:
        """Make room for the scales of the whole weight and the codes of this rank's rows."""
        self.placement, self._param_of, self._place = placement, placement.param_of, None
        if self._gathered is not None:  # attached before: FSDP2 has tensors over the scales of that record
            return
        shape, local = placement.shape, self.master()
        self.record = NVFP4Storage(
            shape, placement.dtype, self.block, name=self.name, four_over_six=self.four_over_six
        )
        amax = torch.zeros(self.record.amax_shape, dtype=torch.float32, device=local.device)
        pinned = local.is_pinned() and placement.device != local.device
        options = {"dtype": torch.uint8, "device": local.device, "pin_memory": pinned}
        padded = (placement.padded_rows, *shape[1:-1], shape[-1] // 2)
        self.codes = torch.zeros(padded, **options)
        self.scales: torch.Tensor | None = None
        """uint8 [padded_rows, ..., K/16], this rank's rows of scales that travel; None where none do."""
        if self.record.scales_travel:
            rank, size = rank_and_size(placement.group)
            whole = torch.zeros((size, *padded[:-1], ceil_div(shape[-1], BLOCK)), **options)
            compact = whole.view(-1, whole.shape[-1])[: self.record.matrix[0]].view(SCALE_DTYPE)
            self.record.rowwise, self.scales = Side(None, {"compact": compact}, amax), whole[rank]
        else:
            layouts = ("compact", "swizzled") if ops.has_fp4_tensor_cores(placement.device) else ("compact",)
            columnwise = self.columnwise
            if columnwise is None:
                columnwise = reads_columns(self.block, placement.device)
            if placement.param.is_dtensor:  # its module gets plain values
                columnwise = False
            for side in ("rowwise", "columnwise")[: 1 + columnwise]:
                scales = _empty_scales(self.record, side, layouts, local.device)
                setattr(self.record, side, Side(None, scales, amax))
        self._copied: torch.cuda.Event | None = None
        self._input = (self._sent(), None) if local.device == placement.device else None

    def _sent(self) -> tuple[torch.Tensor, ...]:
        return (self.codes,) if self.scales is None else (self.codes, self.scales)

    def leave(self) -> None:
        """Be as before attach."""
        self.placement = self._place = None

    def master(self) -> torch.Tensor:
        """This rank's rows, where FSDP2 has them now."""
        try:
            return self._param_of().sharded_param._local_tensor.local
        except AttributeError:
            raise RuntimeError(
                f"{self.name!r} was prepared, but its parameter was replaced since by one that is no master: "
                "a model gets its dtype before prepare"
            ) from None

    def own_codes(self) -> torch.Tensor:
        """uint8 [bytes] that this rank's rows are cast to."""
        return self.codes[: self.placement.rows].view(-1)

    def wait_for_copy(self) -> None:
        """A GPU may still be reading codes that lie in pinned memory, which a cast is about to change."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def note_cast(self, local: torch.Tensor) -> None:
        """The codes are those of the master, which lies here, as it is now, with the scales of the record."""
        self._casts, self.was_loaded = self._casts + 1, False
        self._place, self._version = (local.data_ptr(), self.writes), _version(local)

    def note_moved(self, local: torch.Tensor) -> None:
        """FSDP2 has copied the master that was cast to this place."""
        self._place, self._version = (local.data_ptr(), self.writes), None

    def is_current(self, local: torch.Tensor) -> bool:
        """Whether the codes are those of a master that lies here. Writes to the plain tensor inside, which
        state dicts share, are counted by torch.
        """
        if self._place == (local.data_ptr(), self.writes):
            version = _version(local)
            if self._version is None:  # the first look at the view that FSDP2 made of the new place
                self._version = version
            if self._version == version:
                return True
        return self._place is not None and not local.numel()

    def is_gathered_before_cast(self) -> bool:
        """Whether the module computes with what was gathered before the last cast."""
        return (
            self._gathered_casts != self._casts and self._param_of().sharded_state is ShardedState.UNSHARDED
        )

    # Gathers

    def all_gather_input(self, local: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], None]:
        """The packed rows, half a byte an element, and the scales of blocks of 1x16. Scales of 16x16 blocks
        do not travel: every rank has them. local: of the master that FSDP2 asks, which is a copy of its own
        where masters are offloaded.

        Raises RuntimeError where they are not those of the master.
        """
        if not self.is_current(local):
            self._check_current()
        if self._input is not None:
            return self._input
        sent = tuple(own.to(self.placement.device, non_blocking=True) for own in self._sent())
        if self.codes.is_pinned():
            self._copied = torch.cuda.Event()
            self._copied.record()
        return sent, None

    def _check_current(self) -> None:
        if self._place is None:
            raise RuntimeError(f"{self.name!r} {NOT_ATTACHED}")
        if not self.is_current(self.master()):
            raise RuntimeError(
                f"the master of {self.name!r} was written to since it was cast: call refresh() of what "
                "attach returned, on every rank (after load_state_dict the forward of the model does it)"
            )

    def gathered(self, outputs: tuple[torch.Tensor, ...], out: torch.Tensor | None):
        """What FSDP2's fsdp_post_all_gather returns: the tensor and what is to be freed with it; or, with
        out, nothing.
        """
        changed, self._gathered_casts = self._gathered_casts != self._casts, self._casts
        if out is None:
            rows = [output[: self.placement.shape[0]] for output in outputs]
            self._gathered = Gathered(self.record, rows, self._is_given_as_values())
            self._gathered.fill(changed)
            return self._gathered.tensor, self._gathered.inner
        self._gathered.fill(changed)
        if changed and not out.is_inference():
            increment_version(out)  # a backward pass through the values of before must fail
        return None

    def _is_given_as_values(self) -> bool:
        """Whether its module gets plain values: where it multiplies no codes, and has them for a forward or a
        backward pass alone. What stays gathered stays in 4 bits. Asked at the first gather, as FSDP2 fills
        one tensor from then on.

        A DTensor of tensor parallelism is over plain values.
        """
        return self.placement.param.is_dtensor or (not self.takes_codes and self.placement.reshards())


def _empty_scales(record: NVFP4Storage, side: str, layouts: tuple[str, ...], device: torch.device) -> dict:
    dtype = record.buffer_dtype(f"{side}_scale")
    return {layout: empty_buffer(record.scale_shape(side, layout), dtype, device) for layout in layouts}


def _version(local: torch.Tensor) -> int:
    return -1 if local.is_inference() else local._version
