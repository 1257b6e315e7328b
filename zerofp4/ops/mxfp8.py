"""zerofp4::quantize_mxfp8 and zerofp4::dequantize_mxfp8: matrices to E4M3 with E8M0 scales, and back."""

import torch

from zerofp4 import _C
from zerofp4.format import (
    MXFP8_DATA_DTYPE,
    MXFP8_SCALE_DTYPE,
    MXFP8_SCALE_LAYOUTS,
    SCALE_LAYOUTS,
    WEIGHT_DTYPES,
)
from zerofp4.layout import mxfp8_scale_shape
from zerofp4.ops.device import DTYPE_CODES, address, target_of
from zerofp4.ops.operator import backend, check_bytes
from zerofp4.storage import check_buffer

torch.library.define(
    "zerofp4::quantize_mxfp8",
    "(Tensor x, Tensor? skip, "
    "Tensor(a!)? rowwise_data, Tensor(b!)? rowwise_scale, Tensor(c!)? rowwise_scale_swizzled, "
    "Tensor(d!)? columnwise_data, Tensor(e!)? columnwise_scale, Tensor(f!)? columnwise_scale_swizzled) -> ()",
)
torch.library.define(
    "zerofp4::dequantize_mxfp8",
    "(Tensor data, Tensor scale, bool columnwise, str layout, ScalarType dtype) -> Tensor",
)


def _check_copy(side: str, x: torch.Tensor, data, scale, swizzled) -> None:
    if data is None:
        for name, buffer in ((f"{side}_scale", scale), (f"{side}_scale_swizzled", swizzled)):
            if buffer is not None:
                raise ValueError(f"{name} must be given together with {side}_data")
        return
    if scale is None:
        raise ValueError(f"{side}_data and {side}_scale must be given together")
    shapes = [mxfp8_scale_shape(*x.shape, side == "columnwise", layout) for layout in MXFP8_SCALE_LAYOUTS]
    check_bytes(f"{side}_data", data, x.shape, MXFP8_DATA_DTYPE, x.device)
    check_bytes(f"{side}_scale", scale, shapes[0], MXFP8_SCALE_DTYPE, x.device)
    if swizzled is not None:
        check_bytes(f"{side}_scale_swizzled", swizzled, shapes[1], MXFP8_SCALE_DTYPE, x.device)


def _check_quantize(x, skip, *buffers) -> None:
    if x.dim() != 2 or x.dtype not in WEIGHT_DTYPES:
        raise ValueError(f"x must be a matrix of one of {WEIGHT_DTYPES}, got {x.dtype} {tuple(x.shape)}")
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {x.stride()}")
    if skip is not None:
        check_buffer("skip", skip, (1,), torch.float32, x.device)
    _check_copy("rowwise", x, *buffers[:3])
    _check_copy("columnwise", x, *buffers[3:])


@backend("quantize_mxfp8")
def _quantize_mxfp8(x, skip, *buffers) -> None:
    """x [M, K] into the buffers that are given, in one pass: data [M, K], compact scales [M, ceil(K/32)] or
    columnwise [ceil(M/32), K], swizzled ones padded with 0 (layout.mxfp8_scale_shape).

    skip: float32 [1], nothing is written where it is not 0.
    """
    _check_quantize(x, skip, *buffers)
    addresses = [address(buffer) for buffer in buffers]
    if x.numel() and any(addresses):
        matrix = (x.data_ptr(), DTYPE_CODES[x.dtype], *x.shape)
        _C.quantize_mxfp8(target_of(x.device), *matrix, address(skip), addresses[:3], addresses[3:])


torch.library.register_fake("zerofp4::quantize_mxfp8", _check_quantize)


def _new_values(data, scale, columnwise, layout, dtype) -> torch.Tensor:
    if dtype not in WEIGHT_DTYPES:
        raise ValueError(f"dtype must be one of {WEIGHT_DTYPES}, got {dtype}")
    if data.dim() != 2:
        raise ValueError(f"data must be a matrix, got shape {tuple(data.shape)}")
    check_bytes("data", data, data.shape, MXFP8_DATA_DTYPE, data.device)
    shape = mxfp8_scale_shape(*data.shape, columnwise, layout)
    check_bytes("scale", scale, shape, MXFP8_SCALE_DTYPE, data.device)
    return data.new_empty(data.shape, dtype=dtype)


@backend("dequantize_mxfp8")
def _dequantize_mxfp8(data, scale, columnwise, layout, dtype) -> torch.Tensor:
    """[M, K] values in dtype of one copy; its scales may be compact or swizzled."""
    out = _new_values(data, scale, columnwise, layout, dtype)
    if out.numel():
        options = (columnwise, SCALE_LAYOUTS.index(layout), DTYPE_CODES[dtype])
        inputs = (data.data_ptr(), scale.data_ptr(), *data.shape)
        _C.dequantize_mxfp8(target_of(data.device), *inputs, *options, out.data_ptr())
    return out


torch.library.register_fake("zerofp4::dequantize_mxfp8", _new_values)
