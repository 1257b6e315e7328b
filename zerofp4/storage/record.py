"""Records of quantized tensors: which buffers they have and what those mean.

Plans, adapters and groups work on records; tensors are autograd and torch sugar over one.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch

from zerofp4.format import BLOCK, E4M3_MAX, SCALE_DTYPE, SCALE_LAYOUTS, WEIGHT_DTYPES, FourOverSix
from zerofp4.layout import as_matrix, check_matrix, columnwise_rows, packed_shape, scale_shape

SIDES = ("rowwise", "columnwise")


def scale_name(side: str, layout: str) -> str:
    """The field for the scales of a side in a layout."""
    return f"{side}_scale" if layout == "compact" else f"{side}_scale_{layout}"


def copy_names(layouts: Sequence[str], sides: Sequence[str] = SIDES) -> tuple[str, ...]:
    """The fields for copies with scales in these layouts."""
    fields = {side: [f"{side}_data", *(scale_name(side, layout) for layout in layouts)] for side in sides}
    return tuple(name for side in sides for name in fields[side])


BUFFERS = (*copy_names(SCALE_LAYOUTS), "amax", "columnwise_amax")
"""The fields of NVFP4Buffers, in the order in which operators take them."""

_rebindings = 0


def rebindings() -> int:
    """How often a record was copied or rebound, or a tensor given another record: a plan that saw this number
    knows that none of its weights has moved since.
    """
    return _rebindings


def note_rebinding() -> None:
    global _rebindings
    _rebindings += 1


@dataclasses.dataclass(eq=False, kw_only=True)
class Copies:
    """A rowwise and a columnwise copy with what every format has; a buffer that does not exist is None."""

    rowwise_data: torch.Tensor | None = None
    rowwise_scale: torch.Tensor | None = None
    rowwise_scale_swizzled: torch.Tensor | None = None
    columnwise_data: torch.Tensor | None = None
    columnwise_scale: torch.Tensor | None = None
    columnwise_scale_swizzled: torch.Tensor | None = None


@dataclasses.dataclass(eq=False, kw_only=True)
class NVFP4Buffers(Copies):
    """What NVFP4 has, as one tensor or in groups."""

    rowwise_scale_expanded: torch.Tensor | None = None
    columnwise_scale_expanded: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    columnwise_amax: torch.Tensor | None = None


@dataclasses.dataclass(eq=False)
class Storage(Copies):
    """Buffers of a quantized tensor with logical `shape` and `dtype`, [M, K] after flattening to two
    dimensions.

    rowwise_data may be rebound to another view of the same shape (`rebind`); every other buffer is allocated
    once. A format is a subclass.
    """

    buffer_names: ClassVar[tuple[str, ...]]
    """The fields that are buffers."""

    shape: torch.Size
    dtype: torch.dtype
    name: str | None = dataclasses.field(default=None, kw_only=True)
    """What error messages call the tensor."""
    attachments: dict = dataclasses.field(default_factory=dict, repr=False, kw_only=True)
    """What higher layers keep for as long as the record lives (cached plans). Never copied."""

    @classmethod
    def buffer_dtype(cls, name: str) -> torch.dtype:
        raise NotImplementedError

    @classmethod
    def from_buffers(cls, shape: torch.Size, context: tuple, buffers: dict[str, torch.Tensor]) -> "Storage":
        """The inverse of shape, context() and buffers()."""
        raise NotImplementedError

    def context(self) -> tuple:
        """What a record is besides its shape, buffers, name and attachments."""
        raise NotImplementedError

    @property
    def scheme(self) -> tuple:
        """Records with the same one can take each other's bytes."""
        raise NotImplementedError

    @property
    def matrix(self) -> tuple[int, int]:
        """(M, K)"""
        return as_matrix(self.shape)

    @property
    def device(self) -> torch.device:
        return next(buffer for _, buffer in self.buffers()).device

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Existing buffers by name."""
        for name in self.buffer_names:
            buffer = getattr(self, name)
            if buffer is not None:
                yield name, buffer

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Storage":
        """A record whose buffers are function(buffer), with no attachment."""
        note_rebinding()  # where a module moves to another device, its weights get such a record
        buffers = {name: function(buffer) for name, buffer in self.buffers()}
        new = self.from_buffers(self.shape, self.context(), buffers)
        new.name = self.name
        return new

    def rebind(self, rowwise_data: torch.Tensor) -> None:
        """Make another buffer the codes of this tensor. Its contents are taken as they are.

        Raises TypeError or ValueError unless it is contiguous, of the shape and dtype that the format gives
        rowwise_data, on the record's device.
        """
        dtype = self.buffer_dtype("rowwise_data")
        check_buffer("rowwise_data", rowwise_data, self.data_shape(), dtype, self.device)
        self.rowwise_data = rowwise_data
        note_rebinding()

    def data_shape(self) -> tuple[int, int]:
        """Of rowwise_data."""
        raise NotImplementedError

    def zero(self) -> None:
        """Make it hold zeros: in every format these are codes, scales and amaxes of zero bytes."""
        for _, buffer in self.buffers():
            buffer.view(torch.uint8).zero_()


@dataclasses.dataclass(eq=False)
class NVFP4Storage(Storage, NVFP4Buffers):
    """rowwise_data uint8 [M, K/2]; columnwise_data uint8 [K, M/2], the packed transpose; *_scale E4M3,
    compact; *_scale_expanded and *_scale_swizzled E4M3, padded (layout.scale_shape); amax and columnwise_amax
    float32 [1], one tensor unless both copies exist and one of them is of the transform.
    """

    buffer_names: ClassVar = BUFFERS

    block: tuple[int, int]
    hadamard: bool = dataclasses.field(default=False, kw_only=True)
    """The columnwise copy is of the Hadamard transform along M: uint8 [K, round_up(M, 16)/2]."""
    random_signs: bool = dataclasses.field(default=True, kw_only=True)
    """The transform's; True where there is none."""
    four_over_six: FourOverSix | None = dataclasses.field(default=None, kw_only=True)

    @property
    def e4m3_max(self) -> int:
        """What dequantization divides by is 6 times this."""
        return int(E4M3_MAX) if self.four_over_six is None else self.four_over_six.e4m3_max

    @classmethod
    def buffer_dtype(cls, name: str) -> torch.dtype:
        return SCALE_DTYPE if "scale" in name else torch.float32 if "amax" in name else torch.uint8

    @classmethod
    def from_buffers(cls, shape, context, buffers) -> "NVFP4Storage":
        dtype, block, tied, hadamard, random_signs, four_over_six = context
        record = cls(shape, dtype, block, hadamard=hadamard, random_signs=random_signs, **buffers)
        record.four_over_six = four_over_six and FourOverSix(*four_over_six)
        if tied:
            record.columnwise_amax = record.amax
        return record

    def context(self) -> tuple:
        """(dtype, block, whether columnwise_amax is amax itself, hadamard, random_signs, the fields of
        four_over_six or None)
        """
        tied = self.columnwise_amax is not None and self.columnwise_amax is self.amax
        four_over_six = self.four_over_six and (self.four_over_six.e4m3_max, self.four_over_six.error)
        return self.dtype, self.block, tied, self.hadamard, self.random_signs, four_over_six

    @property
    def scheme(self) -> tuple:
        return NVFP4Storage, self.shape, self.block, self.hadamard, self.random_signs, self.e4m3_max

    def data_shape(self) -> tuple[int, int]:
        return packed_shape(*self.matrix)

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Existing buffers by name. columnwise_amax is left out where it is amax itself."""
        for name, buffer in super().buffers():
            if not (name == "columnwise_amax" and buffer is self.amax):
                yield name, buffer


def empty_buffers(format: type[Storage], shapes: dict[str, Sequence[int]], device) -> dict[str, torch.Tensor]:
    """Uninitialized buffers of a format, by field."""
    buffers = {}
    for name, shape in shapes.items():
        dtype = format.buffer_dtype(name)
        stored = torch.uint8 if dtype.itemsize == 1 else dtype  # inductor has no float8_e8m0fnu
        buffer = torch.empty(shape, dtype=stored, device=device)
        buffers[name] = buffer if dtype == stored else buffer.view(dtype)
    return buffers


def check_buffer(
    name: str, buffer: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Raises unless `buffer` is a contiguous tensor of that shape, dtype and device."""
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


def check_layouts(scale_layouts: Sequence[str], known: tuple[str, ...] = SCALE_LAYOUTS) -> tuple[str, ...]:
    """The layouts asked for, always with "compact", the source of truth. Raises ValueError for an unknown
    name.
    """
    if isinstance(scale_layouts, str):
        raise ValueError(f"scale_layouts must be a sequence of names out of {known}, got {scale_layouts!r}")
    for layout in scale_layouts:
        if layout not in known:
            raise ValueError(f"scale_layouts must be out of {known}, got {layout!r}")
    return tuple(layout for layout in known if layout == "compact" or layout in scale_layouts)


def check_block(block: tuple[int, int]) -> None:
    if tuple(block) not in ((BLOCK, BLOCK), (1, BLOCK)):
        raise ValueError(f"block must be (16, 16) or (1, 16), got {tuple(block)}")


def check_transform(block_rows: int, columnwise: bool, hadamard: bool, random_signs: bool) -> None:
    """Raises ValueError for a transform that NVFP4 has not."""
    if not hadamard:
        if not random_signs:
            raise ValueError("random_signs=False says how hadamard transforms, but hadamard is False")
        return
    if block_rows != 1:
        raise ValueError(
            f"hadamard=True needs blocks of 1x16, got {block_rows}x16: both copies share the scale of a "
            "tile, and the transform is of the columnwise copy only"
        )
    if not columnwise:
        raise ValueError("hadamard=True transforms the columnwise copy, but none is asked for")


def allocate(
    shape: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    block: tuple[int, int] = (BLOCK, BLOCK),
    rowwise: bool = True,
    columnwise: bool = True,
    scale_layouts: Sequence[str] = ("compact",),
    hadamard: bool = False,
    random_signs: bool = True,
    four_over_six: FourOverSix | None = None,
) -> NVFP4Storage:
    """Uninitialized buffers for a tensor of `shape`.

    Raises TypeError for a dtype that cannot be quantized and ValueError for a shape, block, layout or
    transform that NVFP4 has not, or when neither copy is asked for.
    """
    if dtype not in WEIGHT_DTYPES:
        raise TypeError(f"dtype must be one of {WEIGHT_DTYPES}, got {dtype}")
    check_block(block)
    if not (rowwise or columnwise):
        raise ValueError("rowwise and columnwise are both False: there is nothing to hold")
    check_transform(block[0], columnwise, hadamard, random_signs)
    layouts = check_layouts(scale_layouts)
    rows, cols = as_matrix(shape)
    check_matrix(rows, cols, columnwise=columnwise and not hadamard)
    options = {"hadamard": hadamard, "random_signs": random_signs, "four_over_six": four_over_six}
    stored_rows = columnwise_rows(rows, hadamard)
    shapes = {name: (1,) for name in ["amax"] + ["columnwise_amax"] * (hadamard and rowwise)}
    for side, m, k in [("rowwise", rows, cols)] * rowwise + [("columnwise", cols, stored_rows)] * columnwise:
        shapes[f"{side}_data"] = packed_shape(m, k)
        shapes |= {scale_name(side, layout): scale_shape(m, k, block[0], layout) for layout in layouts}
    buffers = empty_buffers(NVFP4Storage, shapes, device)
    if columnwise:
        buffers.setdefault("columnwise_amax", buffers["amax"])
    return NVFP4Storage(torch.Size(shape), dtype, tuple(block), **options, **buffers)
