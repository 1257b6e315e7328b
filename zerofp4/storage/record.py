"""Records of quantized tensors: what every format has. Tensors are autograd and torch sugar over one.

A record has a quantized matrix as up to two copies, its sides.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from zerofp4.format import SCALE_LAYOUTS, WEIGHT_DTYPES
from zerofp4.layout import as_matrix
from zerofp4.storage.memory import check_memory, holds, note_rebinding

SIDES = ("rowwise", "columnwise")


def scale_name(side: str, layout: str) -> str:
    """What operators, files and messages call the scales of a side in a layout."""
    return f"{side}_scale" if layout == "compact" else f"{side}_scale_{layout}"


def side_names(layouts: Sequence[str]) -> tuple[str, ...]:
    """The names of both sides' buffers with scales in these layouts, without amaxes."""
    return tuple(
        name for side in SIDES for name in (f"{side}_data", *(scale_name(side, layout) for layout in layouts))
    )


BUFFERS = (*side_names(SCALE_LAYOUTS), "amax", "columnwise_amax")
"""The names of all buffers that NVFP4 can have, in the order in which operators take them."""

_SCALES = {scale_name(side, layout): (side, layout) for side in SIDES for layout in SCALE_LAYOUTS}


def side_and_layout(name: str) -> tuple[str, str | None]:
    """The side and layout of a buffer in side_names(); the layout of elements is None."""
    return _SCALES.get(name) or (name.removesuffix("_data"), None)


class Gate:
    """Holds up reads of arriving elements: from close(wait) to open() each read calls wait() first."""

    __slots__ = ("_wait",)

    def __init__(self) -> None:
        self._wait: Callable[[], None] | None = None

    def close(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def open(self) -> None:
        self._wait = None

    def wait(self) -> None:
        wait = self._wait  # once: another thread may open it
        if wait is not None:
            wait()


class Side:
    """One copy of a quantized matrix.

    data: its elements; None if no whole copy of them exists. scales: by layout, "compact" among them unless
    only a kernel reads them. amax: float32, NVFP4's second level, or None. gate: what a read of `data` waits
    for, on a GPU in the current stream only, and who keeps it or its address before each use; None if nothing
    ever travels. scale_gate: the same for `scales`. (Amaxes never travel: every rank computes them.)
    place, scale_places: data and scales without waiting; use them only for addresses and shapes.
    """

    __slots__ = ("amax", "gate", "place", "scale_gate", "scale_places")

    def __init__(
        self,
        data: torch.Tensor | None,
        scales: dict[str, torch.Tensor],
        amax: torch.Tensor | None = None,
        gate: Gate | None = None,
        scale_gate: Gate | None = None,
    ):
        self.place, self.scale_places, self.amax = data, scales, amax
        self.gate, self.scale_gate = gate, scale_gate

    @property
    def data(self) -> torch.Tensor | None:
        if self.gate is not None:
            self.gate.wait()
        return self.place

    @data.setter
    def data(self, value: torch.Tensor | None) -> None:
        self.place = value

    @property
    def scales(self) -> dict[str, torch.Tensor]:
        if self.scale_gate is not None:
            self.scale_gate.wait()
        return self.scale_places


def _buffer(name: str) -> property:
    return property(lambda sides: sides.buffer(name), doc="None if it does not exist.")


@dataclasses.dataclass(eq=False, kw_only=True)
class Sides:
    """A rowwise and a columnwise copy; None for one that does not exist."""

    rowwise: Side | None = None
    columnwise: Side | None = None

    rowwise_data = _buffer("rowwise_data")
    rowwise_scale = _buffer("rowwise_scale")
    rowwise_scale_expanded = _buffer("rowwise_scale_expanded")
    rowwise_scale_swizzled = _buffer("rowwise_scale_swizzled")
    columnwise_data = _buffer("columnwise_data")
    columnwise_scale = _buffer("columnwise_scale")
    columnwise_scale_expanded = _buffer("columnwise_scale_expanded")
    columnwise_scale_swizzled = _buffer("columnwise_scale_swizzled")

    def sides(self) -> Iterator[tuple[str, Side]]:
        """Existing sides by name."""
        for name in SIDES:
            side = getattr(self, name)
            if side is not None:
                yield name, side

    @property
    def amax(self) -> torch.Tensor | None:
        """The rowwise copy's, or that of the only one."""
        side = self.rowwise or self.columnwise
        return None if side is None else side.amax

    @property
    def columnwise_amax(self) -> torch.Tensor | None:
        return None if self.columnwise is None else self.columnwise.amax

    def buffer(self, name: str) -> torch.Tensor | None:
        """A buffer by its name in BUFFERS; None if it does not exist."""
        if name in ("amax", "columnwise_amax"):
            return getattr(self, name)
        side, layout = side_and_layout(name)
        copy: Side | None = getattr(self, side)
        if copy is None:
            return None
        return copy.data if layout is None else copy.scales.get(layout)

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Existing buffers by name, each once: columnwise_amax is left out where it is amax itself."""
        for _, side in self.sides():
            if side.gate is not None:
                side.gate.wait()
        yield from self.places()

    def places(self) -> Iterator[tuple[str, torch.Tensor]]:
        """buffers() without waiting at a gate: use them only for addresses and shapes."""
        for name, side in self.sides():
            if side.place is not None:
                yield f"{name}_data", side.place
            for layout in SCALE_LAYOUTS:
                if layout in side.scale_places:
                    yield scale_name(name, layout), side.scale_places[layout]
        if self.amax is not None:
            yield "amax", self.amax
        if self.columnwise_amax is not self.amax and self.columnwise_amax is not None:
            yield "columnwise_amax", self.columnwise_amax


def unstack(sides: Sides, count: int, first: int = 0) -> list[Sides]:
    """The sides of `count` matrices of a stack, from `first` on, as views. What shares an amax still does."""

    def chosen(buffer: torch.Tensor) -> torch.Tensor:
        return buffer.narrow(0, first, count)

    matrices = [Sides() for _ in range(count)]
    amaxes = {id(side.amax): chosen(side.amax).split(1) for _, side in sides.sides() if side.amax is not None}
    for name, side in sides.sides():
        data = [None] * count if side.place is None else chosen(side.place).unbind()
        scales = {layout: chosen(scale).unbind() for layout, scale in side.scale_places.items()}
        for e, matrix in enumerate(matrices):
            amax = None if side.amax is None else amaxes[id(side.amax)][e]
            own = {layout: each[e] for layout, each in scales.items()}
            setattr(matrix, name, Side(data[e], own, amax, side.gate, side.scale_gate))
    return matrices


def sides_of(buffers: dict[str, torch.Tensor]) -> dict[str, Side]:
    """The inverse of buffers(): sides by name, to build a record of."""
    sides = {}
    for side in SIDES:
        scales = {
            layout: buffers[scale_name(side, layout)]
            for layout in SCALE_LAYOUTS
            if scale_name(side, layout) in buffers
        }
        if f"{side}_data" in buffers or scales:
            sides[side] = Side(buffers.get(f"{side}_data"), scales, buffers.get("amax"))
    if "columnwise" in sides and "columnwise_amax" in buffers:
        sides["columnwise"].amax = buffers["columnwise_amax"]
    return sides


# Records


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
