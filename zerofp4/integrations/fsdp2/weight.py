"""Weight: a rank's part of a prepared parameter, from its master to the tensor that a layer multiplies."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from zerofp4 import ops
from zerofp4.distributed import all_gather_slices, rank_and_size
from zerofp4.format import BLOCK, SCALE_DTYPE, FourOverSix
from zerofp4.integrations.fsdp2.torch_private import Placement
from zerofp4.layout import ceil_div
from zerofp4.ops import has_fp4_tensor_cores
from zerofp4.storage import NVFP4Storage, Side, empty_buffer
from zerofp4.tensors import NVFP4Tensor, reads_columns


class Weight:
    """A prepared parameter, shared by all tensors that are its master or a piece of it.

    name: of the parameter in the model. dtype: before prepare. takes_codes: whether its module multiplies
        codes. columnwise: whether it gets their transposed copy; None: on FP4 tensor cores.
    """

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        takes_codes: bool,
        columnwise: bool | None,
        block: tuple[int, int],
        four_over_six: FourOverSix | None,
    ):
        self.name, self.dtype, self.takes_codes, self.columnwise = name, dtype, takes_codes, columnwise
        self.block, self.four_over_six = block, four_over_six
        self.placement: Placement | None = None
        self._place: tuple[int, int] | None = None
        self._gathered: Gathered | None = None
        self._casts = self._gathered_casts = 0
        self.writes = 0
        """Counts writes to its master, through any tensor."""
        self.was_loaded = False
        """Whether load_state_dict has written to the master since the last cast, on every rank."""
        self.amax_group: list[str] | None = None
        """Names of the weights that share one amax. References would be a cycle, and keep the group alive."""

    def __deepcopy__(self, memo: dict) -> Weight:
        """The copy is not attached to an optimizer."""
        kind = self.takes_codes, self.columnwise, self.block, self.four_over_six
        copied = memo[id(self)] = Weight(self.name, self.dtype, *kind)
        copied.amax_group = copy.deepcopy(self.amax_group, memo)
        return copied

    # Casts

    def place(self, placement: Placement) -> None:
        """Allocate the scales of the whole weight and the codes of this rank's rows."""
        self.placement = self._placed = placement
        self._place = None
        if self._gathered is not None:  # attached before: FSDP2 has tensors over that record's scales
            return
        shape, local = placement.shape, self.master()
        options = {"four_over_six": self.four_over_six, "stacked": self.block[0] == 1 and len(shape) == 3}
        self.record = NVFP4Storage(shape, placement.dtype, self.block, name=self.name, **options)
        amax = torch.zeros(self.record.amax_shape, dtype=torch.float32, device=local.device)
        pinned = local.is_pinned() and placement.device != local.device
        options = {"dtype": torch.uint8, "device": local.device, "pin_memory": pinned}
        padded = (placement.padded_rows, *shape[1:-1], shape[-1] // 2)
        self.codes = torch.zeros(padded, **options)
        self.scales: torch.Tensor | None = None
        """uint8 [padded_rows, ..., K/16], this rank's rows of scales that travel; None if none do."""
        if self.record.scales_travel:
            rank, size = rank_and_size(placement.group)
            whole = torch.zeros((size, *padded[:-1], ceil_div(shape[-1], BLOCK)), **options)
            compact = whole.view(-1, whole.shape[-1])[: math.prod(shape[:-1])]
            compact = compact.view(SCALE_DTYPE).view(self.record.scale_shape("rowwise", "compact"))
            self.record.rowwise, self.scales = Side(None, {"compact": compact}, amax), whole[rank]
        else:
            layouts = ("compact", "swizzled") if has_fp4_tensor_cores(placement.device) else ("compact",)
            columnwise = self.columnwise
            if columnwise is None:
                columnwise = reads_columns(self.block, placement.device)
            if placement.param.is_dtensor:  # its module gets plain values
                columnwise = False
            for side in ("rowwise", "columnwise")[: 1 + columnwise]:
                self.record.allocate_side(side, layouts, local.device, amax, has_data=False)
        self._copied: torch.cuda.Event | None = None
        self._sent = (self.codes,) if self.scales is None else (self.codes, self.scales)
        self._input = (self._sent, None) if local.device == placement.device else None

    def leave(self) -> None:
        """Undo place()."""
        self.placement = self._place = None

    def master(self) -> torch.Tensor:
        """This rank's rows, at their present place."""
        try:
            return self._placed.master()
        except AttributeError:
            raise RuntimeError(
                f"{self.name!r} was prepared, but its parameter was replaced since by one that is no master: "
                "a model gets its dtype before prepare"
            ) from None

    def own_codes(self) -> torch.Tensor:
        """uint8 [bytes] of this rank's rows."""
        return self.codes[: self.placement.rows].view(-1)

    def wait_for_copy(self) -> None:
        """Before a cast changes codes and scales in pinned memory that a GPU may still be reading."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def note_cast(self, local: torch.Tensor) -> None:
        """The codes and scales are those of the master as it is now, at this place."""
        self._casts, self.was_loaded = self._casts + 1, False
        self._place, self._version = (local.data_ptr(), self.writes), _version(local)

    def note_moved(self, local: torch.Tensor) -> None:
        """FSDP2 has copied the master here since it was cast."""
        self._place, self._version = (local.data_ptr(), self.writes), None

    def is_current(self, local: torch.Tensor) -> bool:
        """Whether the codes are those of a master at this place. torch counts writes to its plain tensor."""
        if self._place == (local.data_ptr(), self.writes):
            version = _version(local)
            if self._version is None:  # the first look at FSDP2's view of the new place
                self._version = version
            if self._version == version:
                return True
        return self._place is not None and not local.numel()

    def is_gathered_before_cast(self) -> bool:
        """Whether the module computes with a gather from before the last cast."""
        return self._gathered_casts != self._casts and self._placed.is_gathered()

    # Gathers

    def all_gather_input(self, local: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], None]:
        """The packed rows, and scales of 1x16 blocks. RuntimeError if they are not those of `local`."""
        if not self.is_current(local):
            self._check_current()
        if self._input is not None:
            return self._input
        sent = tuple(own.to(self.placement.device, non_blocking=True) for own in self._sent)
        self._note_copy()
        return sent, None

    def _note_copy(self) -> None:
        """After copies that a GPU may still be making of codes and scales in pinned memory."""
        if self.codes.is_pinned():
            self._copied = torch.cuda.Event()
            self._copied.record()

    def source(self) -> ShardedCodes:
        """For serving."""
        self._check_attached()
        return ShardedCodes(self)

    def _check_attached(self) -> None:
        if self._place is None:
            raise RuntimeError(
                f"{self.name!r} has no codes yet: call zerofp4.integrations.fsdp2.attach(model, optimizer) "
                "before the forward"
            )

    def _check_current(self) -> None:
        self._check_attached()
        if not self.is_current(self.master()):
            raise RuntimeError(
                f"the master of {self.name!r} was written to since it was cast: attach the optimizer that "
                "steps; after another write call refresh() of what attach returned, on every rank (after "
                "load_state_dict the forward of the model does it)"
            )

    def gathered(self, outputs: tuple[torch.Tensor, ...], out: torch.Tensor | None):
        """The result of fsdp_post_all_gather: the tensor, and what is freed with it; None with `out`."""
        changed, self._gathered_casts = self._gathered_casts != self._casts, self._casts
        if out is None:
            rows = [output[: self.placement.shape[0]] for output in outputs]
            self._gathered = Gathered(self.record, rows, self._is_given_as_values())
        self._gathered.fill(changed)
        self._note_copy()
        if out is None:
            return self._gathered.tensor, self._gathered.inner
        if changed and not out.is_inference():
            increment_version(out)  # a backward pass through the old values must fail
        return None

    def _is_given_as_values(self) -> bool:
        """Whether the module gets plain values: it multiplies no codes and reshards, or it needs a DTensor.
        Asked at the first gather, since FSDP2 fills one tensor from then on.
        """
        return self.placement.param.is_dtensor or (not self.takes_codes and self.placement.reshards())


def _version(local: torch.Tensor) -> int:
    return -1 if local.is_inference() else local._version


class Gathered:
    """The whole weight while a module computes with it, in memory that FSDP2 frees and gives back.

    source: the record with the weight's scales, and no codes.
    rows: uint8, the all-gather buffers: the codes, and compact scales if these travel. FSDP2 copies the codes
        alone where a rank has the whole weight.
    as_values: whether `tensor`, for the module, is plain: dequantize() of the whole weight. Otherwise it is
        an NVFP4Tensor over rows, scales and buffers derived from both.
    inner: the other tensors whose storage FSDP2 frees.
    """

    def __init__(self, source: NVFP4Storage, rows: Sequence[torch.Tensor], as_values: bool):
        self._record = record = NVFP4Storage.from_context(source.shape, source.context())
        record.name = source.name
        codes, *scale_rows = rows
        codes, device = codes.view(record.data_shape("rowwise")), codes.device
        self._rows, amax = rows, source.amax.to(device)
        copies, derived = [(amax, source.amax)], []
        for name, side in source.sides():
            scales = {} if scale_rows else {layout: own.to(device) for layout, own in side.scales.items()}
            copies += [(scale, side.scales[layout]) for layout, scale in scales.items()]
            setattr(record, name, Side(codes, scales, amax))
        self._copies = [(copied, own) for copied, own in copies if copied is not own]
        for scales in scale_rows:
            shape = record.scale_shape("rowwise", "compact")
            record.rowwise.scales["compact"] = scales.view(SCALE_DTYPE).view(shape)  # of the same memory
            if has_fp4_tensor_cores(device) and not as_values:
                swizzled = empty_buffer(record.scale_shape("rowwise", "swizzled"), SCALE_DTYPE, device)
                record.rowwise.scales["swizzled"] = swizzled
                derived.append(swizzled)
        self._values: torch.Tensor | None = None
        self._stage = ops.PostStage(device)
        if as_values:
            self._values = torch.empty(source.shape, dtype=source.dtype, device=device)
            self._read = record.values_source()
            derived = [self._values]
        elif record.columnwise is not None:
            columns = torch.empty(record.data_shape("columnwise"), dtype=torch.uint8, device=device)
            record.columnwise.data = columns
            derived.append(columns)
        self.inner = tuple(derived)
        self.tensor = NVFP4Tensor(record) if self._values is None else self._values

    def fill(self, changed: bool) -> None:
        """Derive what is not gathered. changed: whether there was a cast since the last time."""
        for copied, own in self._copies if changed else ():
            copied.view(torch.uint8).copy_(own.view(torch.uint8), non_blocking=True)
        if self._values is not None:
            is_stack = self._record.experts is not None
            out = self._values if is_stack else self._values.flatten(0, -2)
            ops.values_of(*self._read, out.dtype, out)
            for rows in self._rows:  # FSDP2 allocates them for each gather
                rows.untyped_storage().resize_(0)
        elif self.inner:
            self._stage.bind([self._record])  # its memory was freed since the last gather
            self._stage.run()


class ShardedCodes:
    """The codes of a prepared weight (a serving.Source)."""

    is_collective = True

    def __init__(self, weight: Weight):
        self.record, self.amax, self._weight = weight.record, weight.record.amax, weight

    def check(self) -> None:
        """Raises RuntimeError if the master was written to since the cast."""
        if self._weight.placement.param.is_dtensor:
            raise ValueError("under tensor parallelism each slice of it has an amax of its own")
        self._padded()

    def _padded(self) -> tuple[torch.Tensor, ...]:
        """This rank's input to the all-gather, with FSDP2's padding."""
        return self._weight.all_gather_input(self._weight.master())[0]

    def whole(self) -> NVFP4Storage:
        """Collective over the ranks that the weight is sharded over."""
        placement, wholes = self._weight.placement, []
        rank, size = rank_and_size(placement.group)
        for own in self._padded():
            rows = own.new_empty(size * own.shape[0], *own.shape[1:])
            rows.chunk(size)[rank].copy_(own)
            all_gather_slices(rows, placement.group, stage="gathering codes for serving")
            wholes.append(rows[: placement.shape[0]])
        codes, *scales = wholes
        scale = self.record.rowwise_scale
        if scales:
            scale = scales[0].view(SCALE_DTYPE).view(self.record.scale_shape("rowwise", "compact"))
        record = NVFP4Storage.from_context(self.record.shape, self.record.context())
        codes, device = codes.view(record.data_shape("rowwise")), codes.device
        record.rowwise = Side(codes, {"compact": scale.to(device)}, self.record.amax.to(device))
        return record

    def local(self) -> tuple[torch.Tensor, int]:
        placement = self._weight.placement
        codes = self._padded()[0][: placement.rows].flatten(0, -2)
        return codes, placement.first_row * math.prod(placement.shape[1:-1])
