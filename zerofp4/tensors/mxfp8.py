"""MXFP8Tensor; quantize_mxfp8 makes one."""

from collections.abc import Sequence

import torch

from zerofp4.format import MXFP8_SCALE_LAYOUTS
from zerofp4.storage import MXFP8Storage, check_layouts, check_sides, side_names
from zerofp4.tensors.arguments import check_out, check_values, detached, kernel_input
from zerofp4.tensors.quantized_tensor import QuantizedTensor, wrap


def _dequantize(record: MXFP8Storage, dtype: torch.dtype) -> torch.Tensor:
    return torch.ops.zerofp4.dequantize_mxfp8(*record.values_source(), "compact", dtype)


def _quantize_into(x: torch.Tensor, record: MXFP8Storage, skip: torch.Tensor | None = None) -> None:
    buffers = [record.buffer(name) for name in side_names(MXFP8_SCALE_LAYOUTS)]
    # As bytes: inductor has no float8_e8m0fnu.
    buffers = [None if buffer is None else buffer.view(torch.uint8) for buffer in buffers]
    torch.ops.zerofp4.quantize_mxfp8(x.reshape(record.matrix), skip, *buffers)


class MXFP8Tensor(QuantizedTensor):
    """A tensor in MXFP8: E4M3 elements, and an E8M0 scale for each block of 32 of them.

    quantize_mxfp8 makes one. Blocks lie along a row or, in the columnwise copy, along a column. It has the
    logical shape and dtype, and the buffers of MXFP8Storage. See QuantizedTensor for torch's operations.

    Examples:
        >>> t = zerofp4.quantize_mxfp8(torch.randn(64, 64))
        >>> elements, scales = t.rowwise_data, t.rowwise_scale
    """

    record: MXFP8Storage
    _record_type = MXFP8Storage
    _dequantize = staticmethod(_dequantize)
    _quantize_into = staticmethod(_quantize_into)


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
    """Quantize a tensor to MXFP8, in one pass.

    x: [..., K] of float32, bfloat16 or float16, flattened to [M, K].
    rowwise, columnwise: which copies to make. Blocks have 32 elements along rows, or columns, fewer at edges.
    scale_layouts: persistent scale buffers out of "compact" (always there) and "swizzled".
    out: a tensor of x's shape, dtype and device with the buffers asked for. All its buffers are written.
    skip: float32 [1] on x's device, with out only. If it is not 0, out keeps its bytes. The kernel reads it,
        so a captured CUDA graph can refresh a weight, or not.

    Examples:
        >>> t = zerofp4.quantize_mxfp8(x, columnwise=True)

    A block with a NaN gets scale 255, which makes all of it NaN; one with an Inf gets scale 254. The result
    has no autograd history. Raises TypeError for a wrong dtype, ValueError for a wrong shape or option.
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
    _quantize_into(kernel_input(x), record, detached("skip", skip))
    return wrap(MXFP8Tensor, record) if out is None else out
