"""MXFP8Tensor; quantize_mxfp8 makes one."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch

from zerofp4.format import (
    BLOCK,
    MXFP8_BLOCK,
    MXFP8_DATA_DTYPE,
    MXFP8_SCALE_DTYPE,
    MXFP8_SCALE_LAYOUTS,
    WEIGHT_DTYPES,
)
from zerofp4.layout import as_matrix, mxfp8_scale_shape
from zerofp4.storage import SIDES, Storage, check_layouts, copy_names, empty_buffers, scale_name
from zerofp4.tensors.arguments import check_out, check_values, detached
from zerofp4.tensors.quantized_tensor import QuantizedTensor, wrap


@dataclasses.dataclass(eq=False)
class MXFP8Storage(Storage):
    """rowwise_data and columnwise_data E4M3 [M, K], the latter not transposed; rowwise_scale E8M0
    [M, ceil(K/32)]; columnwise_scale E8M0 [ceil(M/32), K]; *_scale_swizzled E8M0, padded
    (layout.mxfp8_scale_shape).
    """

    block: ClassVar[tuple[int, int]] = (1, MXFP8_BLOCK)
    buffer_names: ClassVar = copy_names(MXFP8_SCALE_LAYOUTS)

    @classmethod
    def buffer_dtype(cls, name: str) -> torch.dtype:
        return MXFP8_SCALE_DTYPE if "scale" in name else MXFP8_DATA_DTYPE

    @classmethod
    def from_buffers(cls, shape, context, buffers) -> "MXFP8Storage":
        return cls(shape, *context, **buffers)

    def context(self) -> tuple:
        """(dtype,)"""
        return (self.dtype,)

    @property
    def scheme(self) -> tuple:
        return MXFP8Storage, self.shape

    def data_shape(self) -> tuple[int, int]:
        return self.matrix


def _allocate(x: torch.Tensor, sides: Sequence[str], layouts: Sequence[str]) -> MXFP8Storage:
    """Uninitialized buffers to quantize x into."""
    matrix = as_matrix(x.shape)
    shapes = {f"{side}_data": matrix for side in sides}
    for side in sides:
        for layout in layouts:
            shape = mxfp8_scale_shape(*matrix, side == "columnwise", layout)
            shapes[scale_name(side, layout)] = shape
    return MXFP8Storage(x.shape, x.dtype, **empty_buffers(MXFP8Storage, shapes, x.device))


def _quantize_into(record: MXFP8Storage, x: torch.Tensor, skip: torch.Tensor | None = None) -> None:
    """Quantize x, a contiguous tensor of the record's shape, into the record's buffers."""
    buffers = [getattr(record, name) for name in record.buffer_names]
    # As bytes: inductor has no float8_e8m0fnu.
    buffers = [None if buffer is None else buffer.view(torch.uint8) for buffer in buffers]
    torch.ops.zerofp4.quantize_mxfp8(x.reshape(record.matrix), skip, *buffers)


def _requantize(record: MXFP8Storage, values: torch.Tensor) -> None:
    """Values broadcast to the record's shape and are rounded to its dtype."""
    values = values.to(device=record.device, dtype=record.dtype)
    _quantize_into(record, values.expand(record.shape).contiguous())


def values_source(record: MXFP8Storage) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """(data, compact scale, columnwise) of the copy that gives the values."""
    if record.rowwise_data is not None:
        return record.rowwise_data, record.rowwise_scale, False
    return record.columnwise_data, record.columnwise_scale, True


def _dequantize(record: MXFP8Storage, dtype: torch.dtype) -> torch.Tensor:
    kernel_dtype = dtype if dtype in WEIGHT_DTYPES else torch.float32
    values = torch.ops.zerofp4.dequantize_mxfp8(*values_source(record), "compact", kernel_dtype)
    return values.view(record.shape).to(dtype)


def _swizzled_scale(record: MXFP8Storage, side: str) -> torch.Tensor:
    """The persistent buffer if there is one, else made from the compact scales."""
    buffer = getattr(record, scale_name(side, "swizzled"))
    if buffer is not None:
        return buffer
    compact = getattr(record, scale_name(side, "compact"))
    if compact is None:
        raise ValueError(f"this tensor has no {side} copy, so it has no {side} scales")
    raw = compact.view(torch.uint8)
    raw = raw.t().contiguous() if side == "columnwise" else raw
    # As scales of NVFP4 would be that has as many blocks in a row.
    rows, columns = raw.shape
    padded = torch.ops.zerofp4.pad_scale(raw, rows, columns * BLOCK, 1, "swizzled")
    return padded.view(MXFP8_SCALE_DTYPE)


def _copy_bytes(target: MXFP8Storage, source: MXFP8Storage, non_blocking: bool = False) -> None:
    """Raises ValueError, before anything is written, where the source lacks a copy that the target has."""
    wanted = [side for side in SIDES if getattr(target, f"{side}_data") is not None]
    for side in wanted:
        if getattr(source, f"{side}_data") is None:
            raise ValueError(
                f"the source has no {side} copy, and its other one does not determine it: "
                f"quantize the original values with {side}=True"
            )
    for side in wanted:
        for name in (f"{side}_data", f"{side}_scale"):
            getattr(target, name).copy_(getattr(source, name), non_blocking)
        swizzled = getattr(target, scale_name(side, "swizzled"))
        if swizzled is not None:
            swizzled.copy_(_swizzled_scale(source, side), non_blocking)


class MXFP8Tensor(QuantizedTensor):
    """A tensor in MXFP8: E4M3 elements and E8M0 scales of 32 of them, which lie along a row or, in the
    columnwise copy, along a column (see QuantizedTensor). Its buffers are those of MXFP8Storage.
    """

    record: MXFP8Storage
    _record_type = MXFP8Storage
    _values_of = staticmethod(_dequantize)
    _requantize = staticmethod(_requantize)
    _copy_bytes = staticmethod(_copy_bytes)

    def swizzled_scale(self, columnwise: bool = False) -> torch.Tensor:
        """E8M0 scales in the order in which block-scaled GEMMs read them, padded with 0: of size
        [round_up(M, 128), round_up(ceil(K/32), 4)], columnwise [round_up(K, 128), round_up(ceil(M/32), 4)].

        The persistent buffer if there is one, else computed. Raises ValueError where the side does not exist.
        """
        return _swizzled_scale(self.record, SIDES[int(columnwise)])


torch.serialization.add_safe_globals([MXFP8Tensor])


def quantize_mxfp8(
    x: torch.Tensor,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    scale_layouts: Sequence[str] = ("compact",),
    out: MXFP8Tensor | None = None,
    skip: torch.Tensor | None = None,
) -> MXFP8Tensor:
    """Quantize x [..., K] of float32, bfloat16 or float16, flattened to [M, K], in one pass.

    rowwise, columnwise: which copies to make; blocks of 32 elements lie along rows in the one and along
    columns in the other, cut off at the edges.
    scale_layouts: persistent scale buffers out of "compact" (always there) and "swizzled".
    out: a tensor of x's shape, dtype and device to write to. It must have the buffers asked for; every buffer
    it has is written and stays where it is.
    skip: float32 [1] on x's device, with out only: where it is not 0, out keeps what it has. The kernel reads
    it, so that a captured CUDA graph can refresh a weight, or not.

    A block with a NaN has scale 255, which makes all of it NaN; one with an Inf has scale 254. The result has
    no autograd history. TypeError for a wrong dtype, ValueError for a wrong shape or option.
    """
    check_values(x)
    layouts = check_layouts(scale_layouts, MXFP8_SCALE_LAYOUTS)
    if not (rowwise or columnwise):
        raise ValueError("rowwise and columnwise are both False: there is nothing to hold")
    if skip is not None and out is None:
        raise ValueError("skip keeps what out has, but there is no out")
    if out is None:
        record = _allocate(x, ["rowwise"] * rowwise + ["columnwise"] * columnwise, layouts)
    else:
        wanted = {"rowwise": rowwise, "columnwise": columnwise, "scale_layouts": layouts}
        check_out(out, MXFP8Tensor, x, block=MXFP8Storage.block, **wanted)
        torch.autograd.graph.increment_version(out)
        record = out.record
    _quantize_into(record, x.detach().contiguous(), detached("skip", skip))
    return wrap(MXFP8Tensor, record) if out is None else out
