"""Records of quantized tensors: what every format has. Tensors are autograd and torch sugar over one."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from zerofp4.format import SCALE_LAYOUTS, WEIGHT_DTYPES
from zerofp4.layout import as_matrix
from zerofp4.storage.memory import check_memory, holds, note_rebinding
from zerofp4.storage.sides import SIDES, Side, Sides, side_and_layout, sides_of


@dataclasses.dataclass(eq=False)
class Storage(Sides):
    """Buffers of a quantized tensor with logical `shape` and `dtype`, [M, K] after flattening to two
    dimensions. rowwise.data may be rebound (`rebind`); every other buffer is allocated once. A format is a
    subclass with

    - context_fields: the fields that context() is made of;
    - buffer_dtype(buffer name), data_shape(side), scale_shape(side, layout);
    - scheme: records with the same one can take each other's bytes.
    """

    context_fields: ClassVar[tuple[str, ...]]

    shape: torch.Size
    dtype: torch.dtype
    name: str | None = dataclasses.field(default=None, kw_only=True)
    """What error messages call the tensor."""
    attachments: dict = dataclasses.field(default_factory=dict, repr=False, kw_only=True)
    """What higher layers keep for as long as the record lives (cached plans). Never copied."""

    def context(self) -> tuple:
        """What a record is besides its shape, buffers, name and attachments."""
        return tuple(getattr(self, name) for name in self.context_fields)

    @classmethod
    def from_context(cls, shape: torch.Size, context: tuple) -> "Storage":
        """A record without buffers: the inverse of shape and context(), or the values of context_fields."""
        return cls(shape, *context)

    @classmethod
    def from_buffers(cls, shape: torch.Size, context: tuple, buffers: dict[str, torch.Tensor]) -> "Storage":
        """The inverse of shape, context() and buffers(). Raises TypeError or ValueError for wrong buffers."""
        record = cls.from_context(shape, context)
        vars(record).update(sides_of(buffers))
        record.check_context()
        for name, side in record.sides():
            if side.data is None or "compact" not in side.scales:
                raise ValueError(f"buffers must have {name}_data and {name}_scale, got {list(buffers)}")
        record.check()
        return record

    def __reduce_ex__(self, protocol):
        """Copies and pickles share no buffer with the record and have no attachment: plans hold addresses."""
        return type(self)._copied, (self.shape, self.context(), dict(self.buffers()), self.name)

    @classmethod
    def _copied(cls, shape: torch.Size, context: tuple, buffers: dict, name: str | None) -> "Storage":
        note_rebinding()  # a copy may take the place of the record, as when a module moves to another device
        record = cls.from_context(shape, context)
        vars(record).update(sides_of(buffers), name=name)
        record.check()
        return record

    def check_context(self) -> None:
        """Raises TypeError or ValueError for a shape, dtype or option that the format does not have."""
        if self.dtype not in WEIGHT_DTYPES:
            raise TypeError(f"dtype must be one of {WEIGHT_DTYPES}, got {self.dtype}")

    @property
    def matrix(self) -> tuple[int, int]:
        """(M, K)"""
        return as_matrix(self.shape)

    @property
    def amax_shape(self) -> tuple[int]:
        return (1,)

    @property
    def device(self) -> torch.device:
        return next(buffer for _, buffer in self.places()).device

    def allocate_side(
        self, name: str, layouts: Sequence[str], device, amax: torch.Tensor | None, has_data: bool = True
    ) -> None:
        """Give the record a side with uninitialized buffers."""
        data, dtype = None, self.buffer_dtype(f"{name}_scale")
        if has_data:
            data = empty_buffer(self.data_shape(name), self.buffer_dtype(f"{name}_data"), device)
        scales = {layout: empty_buffer(self.scale_shape(name, layout), dtype, device) for layout in layouts}
        setattr(self, name, Side(data, scales, amax))

    def check(self) -> None:
        """check_buffer() of every buffer: when a record gets buffers, and when a plan is built over it."""
        for name, buffer in self.buffers():
            self._check_buffer(name, buffer)

    def check_memory(self, name: str) -> None:
        """Raises RuntimeError for the first freed buffer. name: what errors call the tensor."""
        if torch.compiler.is_compiling():
            return
        for buffer_name, buffer in self.places():
            if not holds(buffer):  # without names, which take longer than all else in update_()
                check_memory(f"{called(name, self)}: {buffer_name}", buffer)

    def _check_buffer(self, name: str, buffer: torch.Tensor) -> None:
        side, layout = side_and_layout(name)
        if name.endswith("amax"):
            shape = self.amax_shape
        else:
            shape = self.data_shape(side) if layout is None else self.scale_shape(side, layout)
        check_buffer(name, buffer, shape, self.buffer_dtype(name), self.device)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Storage":
        """A record whose buffers are function(buffer), with no attachment. Errors as check()."""
        buffers = {name: function(buffer) for name, buffer in self.buffers()}
        return self._copied(self.shape, self.context(), buffers, self.name)

    def rebind(self, rowwise_data: torch.Tensor) -> None:
        """Make another buffer the codes of this tensor, as it is. Raises TypeError or ValueError as
        check_buffer, and without a rowwise copy.
        """
        if self.rowwise is None:
            raise ValueError("rowwise_data cannot be rebound: there is no rowwise copy")
        self._check_buffer("rowwise_data", rowwise_data)
        self.rowwise.data = rowwise_data
        note_rebinding()

    def zero(self) -> None:
        """Make it hold zeros: in every format these are codes, scales and amaxes of zero bytes."""
        for _, buffer in self.buffers():
            buffer.view(torch.uint8).zero_()


def record_of(tensor: Any) -> Any:
    """The record of a quantized tensor, or the record itself; None for anything else."""
    if isinstance(tensor, Storage):
        return tensor
    return getattr(tensor, "record", None) if isinstance(tensor, torch.Tensor) else None


adapters: list[Callable[[torch.Tensor], Storage | None]] = []
"""Functions that give the records of another library's tensors, or None. A tensor keeps its record; an
adapter puts its present buffers into it, calls note_rebinding() if they have changed, and does not check().
"""


def weight_record(weight: Any) -> Any:
    """record_of, also for tensors of other libraries. Whoever casts asks here."""
    record = record_of(weight)
    if record is None and isinstance(weight, torch.Tensor):
        record = next(filter(None, (adapter(weight) for adapter in adapters)), None)
    return record


def called(place: str, tensor: Any, name: str | None = None) -> str:
    """How messages call a tensor: its place in the arguments, and its name (the record's by default)."""
    if name is None:
        name = getattr(record_of(tensor), "name", None)
    return place if name is None else f"{place} '{name}'"


def empty_buffer(shape: Sequence[int], dtype: torch.dtype, device) -> torch.Tensor:
    """An uninitialized buffer of a record."""
    stored = torch.uint8 if dtype.itemsize == 1 else dtype  # inductor has no float8_e8m0fnu
    buffer = torch.empty(shape, dtype=stored, device=device)
    return buffer if dtype == stored else buffer.view(dtype)


def check_buffer(
    name: str, buffer: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Raises TypeError or ValueError unless `buffer` is a contiguous tensor of that shape, dtype and device,
    RuntimeError if its storage was freed.
    """
    if not isinstance(buffer, torch.Tensor) or buffer.dtype != dtype:
        raise TypeError(
            f"{name} must be a {dtype} tensor, got {getattr(buffer, 'dtype', type(buffer).__name__)}"
        )
    if tuple(buffer.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(buffer.shape)}")
    if buffer.device != device:
        raise ValueError(f"{name} must be on {device}, got {buffer.device}")
    if not buffer.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {buffer.stride()}")
    if not torch.compiler.is_compiling() and buffer.is_neg():  # of gradients of complex numbers, for instance
        raise ValueError(f"{name} has its negative bit set, which kernels do not see: pass its resolve_neg()")
    check_memory(name, buffer)


def check_layouts(scale_layouts: Sequence[str], known: tuple[str, ...] = SCALE_LAYOUTS) -> tuple[str, ...]:
    """The layouts asked for and "compact". Raises ValueError for an unknown name."""
    if isinstance(scale_layouts, str):
        raise ValueError(f"scale_layouts must be a sequence of names out of {known}, got {scale_layouts!r}")
    for layout in scale_layouts:
        if layout not in known:
            raise ValueError(f"scale_layouts must be out of {known}, got {layout!r}")
    return tuple(layout for layout in known if layout == "compact" or layout in scale_layouts)


def side_of(columnwise: bool) -> str:
    """The name of the copy that an argument `columnwise` chooses. Raises TypeError for what is no bool."""
    if not isinstance(columnwise, bool):
        raise TypeError(f"columnwise must be True or False, got {columnwise!r}")
    return SIDES[int(columnwise)]  # torch 2.11 traces no index that is a bool


def check_sides(rowwise: bool, columnwise: bool) -> list[str]:
    """The names of the copies asked for. Raises ValueError if there are none."""
    if not (rowwise or columnwise):
        raise ValueError("rowwise and columnwise are both False: there is nothing to hold")
    return [side for side, asked in zip(SIDES, (rowwise, columnwise), strict=True) if asked]
