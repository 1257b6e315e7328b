"""The record of a quantized tensor: which buffers it has and what they mean.

Plans, adapters and groups work on records; NVFP4Tensor is autograd and torch sugar over one.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch

from zerofp4.format import BLOCK, SCALE_DTYPE, SCALE_LAYOUTS, WEIGHT_DTYPES
from zerofp4.layout import as_matrix, check_matrix, packed_shape, scale_shape

BUFFERS = (
    "rowwise_data",
    "rowwise_scale",
    "rowwise_scale_expanded",
    "rowwise_scale_swizzled",
    "columnwise_data",
    "columnwise_scale",
    "columnwise_scale_expanded",
    "columnwise_scale_swizzled",
    "amax",
    "columnwise_amax",
)

_rebindings = 0


def rebindings() -> int:
    """How often a record was copied or rebound, or a tensor given another record: a plan that saw this number
    knows that none of its weights has moved since.
    """
    return _rebindings


def note_rebinding() -> None:
    global _rebindings
    _rebindings += 1


@dataclasses.dataclass(eq=False)
class NVFP4Storage:
    """Buffers of a quantized tensor with logical `shape` and `dtype`, [M, K] after flattening to two
    dimensions.

    rowwise_data uint8 [M, K/2]; columnwise_data uint8 [K, M/2], the packed transpose; *_scale E4M3, compact;
    *_scale_expanded and *_scale_swizzled E4M3, padded (layout.scale_shape); amax float32 [1]; columnwise_amax
    float32 [1], the same tensor as amax under 2D scaling. A buffer that does not exist is None.

    rowwise_data may be rebound to another view of the same shape (`rebind`); every other buffer is allocated
    once.
    """

    shape: torch.Size
    dtype: torch.dtype
    block: tuple[int, int]
    rowwise_data: torch.Tensor | None = None
    rowwise_scale: torch.Tensor | None = None
    rowwise_scale_expanded: torch.Tensor | None = None
    rowwise_scale_swizzled: torch.Tensor | None = None
    columnwise_data: torch.Tensor | None = None
    columnwise_scale: torch.Tensor | None = None
    columnwise_scale_expanded: torch.Tensor | None = None
    columnwise_scale_swizzled: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    columnwise_amax: torch.Tensor | None = None
    name: str | None = None
    """What error messages call the tensor."""
    attachments: dict = dataclasses.field(default_factory=dict, repr=False)
    """What higher layers keep for as long as the record lives (cached plans). Never copied."""

    @property
    def matrix(self) -> tuple[int, int]:
        """(M, K)"""
        return as_matrix(self.shape)

    @property
    def device(self) -> torch.device:
        return self.amax.device

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Existing buffers by name. columnwise_amax is left out where it is amax itself."""
        for name in BUFFERS:
            buffer = getattr(self, name)
            if buffer is not None and not (name == "columnwise_amax" and buffer is self.amax):
                yield name, buffer

    def map(
        self, function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None
    ) -> "NVFP4Storage":
        """A record whose buffers are function(buffer), with no attachment and no sharing but that of the
        amaxes.
        """
        note_rebinding()  # where a module moves to another device, its weights get such a record
        new = {name: function(buffer) for name, buffer in self.buffers()}
        if self.columnwise_amax is not None and self.columnwise_amax is self.amax:
            new["columnwise_amax"] = new["amax"]
        return NVFP4Storage(self.shape, dtype or self.dtype, self.block, name=self.name, **new)

    def rebind(self, rowwise_data: torch.Tensor) -> None:
        """Make another uint8 buffer the codes of this tensor. Its contents are taken as they are.

        Raises TypeError or ValueError unless it is a contiguous uint8 [M, K/2] on the record's device.
        """
        check_buffer("rowwise_data", rowwise_data, packed_shape(*self.matrix), torch.uint8, self.device)
        self.rowwise_data = rowwise_data
        note_rebinding()


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


def check_layouts(scale_layouts: Sequence[str]) -> tuple[str, ...]:
    """The layouts asked for, always with "compact", the source of truth. Raises ValueError for an unknown
    name.
    """
    if isinstance(scale_layouts, str):
        raise ValueError(
            f"scale_layouts must be a sequence of names out of {SCALE_LAYOUTS}, got {scale_layouts!r}"
        )
    for layout in scale_layouts:
        if layout not in SCALE_LAYOUTS:
            raise ValueError(f"scale_layouts must be out of {SCALE_LAYOUTS}, got {layout!r}")
    return tuple(layout for layout in SCALE_LAYOUTS if layout == "compact" or layout in scale_layouts)


def allocate(
    shape: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    block: tuple[int, int] = (BLOCK, BLOCK),
    rowwise: bool = True,
    columnwise: bool = True,
    scale_layouts: Sequence[str] = ("compact",),
) -> NVFP4Storage:
    """Uninitialized buffers for a tensor of `shape`.

    Raises TypeError for a dtype that cannot be quantized and ValueError for a shape, block or layout that
    NVFP4 has not, or when neither copy is asked for.
    """
    if dtype not in WEIGHT_DTYPES:
        raise TypeError(f"dtype must be one of {WEIGHT_DTYPES}, got {dtype}")
    if tuple(block) not in ((BLOCK, BLOCK), (1, BLOCK)):
        raise ValueError(f"block must be (16, 16) or (1, 16), got {tuple(block)}")
    if not (rowwise or columnwise):
        raise ValueError("rowwise and columnwise are both False: there is nothing to hold")
    layouts = check_layouts(scale_layouts)
    rows, cols = as_matrix(shape)
    check_matrix(rows, cols, columnwise=columnwise)
    record = NVFP4Storage(torch.Size(shape), dtype, tuple(block))
    record.amax = torch.empty(1, dtype=torch.float32, device=device)
    sides = [("rowwise", rows, cols)] * rowwise + [("columnwise", cols, rows)] * columnwise
    for side, m, k in sides:
        setattr(record, f"{side}_data", torch.empty(packed_shape(m, k), dtype=torch.uint8, device=device))
        for layout in layouts:
            suffix = "" if layout == "compact" else f"_{layout}"
            scale = torch.empty(scale_shape(m, k, block[0], layout), dtype=torch.uint8, device=device)
            setattr(record, f"{side}_scale{suffix}", scale.view(SCALE_DTYPE))
    if columnwise:
        record.columnwise_amax = record.amax
    return record
