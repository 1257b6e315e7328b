"""MXFP8Tensor; quantize_mxfp8 makes one."""

from collections.abc import Sequence

import torch

from zerofp4 import ops
from zerofp4.format import MXFP8_SCALE_LAYOUTS, WEIGHT_DTYPES
from zerofp4.storage import (
    MXFP8Storage,
    Side,
    check_layouts,
    check_sides,
    side_names,
    side_of,
)
from zerofp4.tensors.arguments import check_out, check_values, detached, kernel_input
from zerofp4.tensors.quantized_tensor import QuantizedTensor, wrap


def _quantize_into(record: MXFP8Storage, x: torch.Tensor, skip: torch.Tensor | None = None) -> None:
    """Quantize x, a contiguous tensor of the record's shape, into the record's buffers."""
    buffers = [record.buffer(name) for name in side_names(MXFP8_SCALE_LAYOUTS)]
    # As bytes: inductor has no float8_e8m0fnu.
    buffers = [None if buffer is None else buffer.view(torch.uint8) for buffer in buffers]
    torch.ops.zerofp4.quantize_mxfp8(x.reshape(record.matrix), skip, *buffers)


def _requantize(record: MXFP8Storage, values: torch.Tensor) -> None:
    """Values broadcast to the record's shape and are rounded to its dtype."""
    values = values.to(device=record.device, dtype=record.dtype)
    _quantize_into(record, values.expand(record.shape).contiguous())


def values_source(record: MXFP8Storage) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """(data, compact scale, columnwise) of the copy that gives the values."""
    copy = record.rowwise or record.columnwise
    return copy.data, copy.scales["compact"], record.rowwise is None


def _dequantize(record: MXFP8Storage, dtype: torch.dtype) -> torch.Tensor:
    kernel_dtype = dtype if dtype in WEIGHT_DTYPES else torch.float32
    try:
        values = torch.ops.zerofp4.dequantize_mxfp8(*values_source(record), "compact", kernel_dtype)
    except RuntimeError:
        record.check_memory("the tensor")  # by name, if that is it
        raise
    return values.view(record.shape).to(dtype)


def _copy_bytes(target: MXFP8Storage, source: MXFP8Storage, non_blocking: bool = False) -> None:
    """Raises ValueError, before anything is written, where the source lacks a copy that the target has."""
    for name, _ in target.sides():
        if getattr(source, name) is None:
            raise ValueError(
                f"the source has no {name} copy, and its other one does not determine it: "
                f"quantize the original values with {name}=True"
            )
    for name, side in target.sides():
        given: Side = getattr(source, name)
        side.data.copy_(given.data, non_blocking)
        side.scales["compact"].copy_(given.scales["compact"], non_blocking)
        if "swizzled" in side.scales:
            side.scales["swizzled"].copy_(ops.padded_scale(source, name, "swizzled"), non_blocking)


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
        return ops.padded_scale(self.record, side_of(columnwise), "swizzled")


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
    sides = check_sides(rowwise, columnwise)
    if skip is not None and out is None:
        raise ValueError("skip keeps what out has, but there is no out")
    if out is None:
        record = MXFP8Storage(x.shape, x.dtype)
        for side in sides:
            record.allocate_side(side, layouts, x.device, None)
    else:
        check_out(out, MXFP8Tensor, x, sides, layouts)
        torch.autograd.graph.increment_version(out)
        record = out.record
    _quantize_into(record, kernel_input(x), detached("skip", skip))
    return wrap(MXFP8Tensor, record) if out is None else out
