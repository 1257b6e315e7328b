"""zerofp4::quantize_mxfp8: a matrix to E4M3 with E8M0 scales; zerofp4::dequantize_mxfp8 and its multi-tensor
form: back.
"""

import torch

import zerofp4._C as _C
from zerofp4.format import (
    MXFP8_DATA_DTYPE,
    MXFP8_SCALE_DTYPE,
    MXFP8_SCALE_LAYOUTS,
    SCALE_LAYOUTS,
    WEIGHT_DTYPES,
)
from zerofp4.layout import mxfp8_scale_shape
from zerofp4.ops.device import DTYPE_CODES, target_of
from zerofp4.ops.lists import run_list, zip_lists
from zerofp4.ops.operator import backend, check_bytes, fake
from zerofp4.storage import address_of, check_buffer, check_memory

FIELDS = 7
"""Integers of an item of the native list."""

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
torch.library.define(
    "zerofp4::dequantize_mxfp8_many",
    "(Tensor[] data, Tensor[] scale, bool[] columnwise, str layout, ScalarType dtype) -> Tensor[]",
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
    check_memory("x", x)
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
    addresses = [address_of("out", buffer) for buffer in buffers]
    if x.numel() and any(addresses):
        matrix = (address_of("x", x), DTYPE_CODES[x.dtype], *x.shape)
        options = (address_of("skip", skip), addresses[:3], addresses[3:])
        _C.quantize_mxfp8(target_of(x.device), *matrix, *options)


fake("quantize_mxfp8")(_check_quantize)


def _new_value(data, scale, columnwise, layout, dtype, device, name: str = "") -> torch.Tensor:
    """`name` is what messages append to the names of arguments."""
    if dtype not in WEIGHT_DTYPES:
        raise ValueError(f"dtype must be one of {WEIGHT_DTYPES}, got {dtype}")
    if data.dim() != 2:
        raise ValueError(f"data{name} must be a matrix, got shape {tuple(data.shape)}")
    check_bytes(f"data{name}", data, data.shape, MXFP8_DATA_DTYPE, device)
    shape = mxfp8_scale_shape(*data.shape, columnwise, layout)
    check_bytes(f"scale{name}", scale, shape, MXFP8_SCALE_DTYPE, device)
    return data.new_empty(data.shape, dtype=dtype)


def _new_one(data, scale, columnwise, layout, dtype) -> torch.Tensor:
    return _new_value(data, scale, columnwise, layout, dtype, data.device)


def _new_many(data, scale, columnwise, layout, dtype) -> list[torch.Tensor]:
    items = zip_lists(data=data, scale=scale, columnwise=columnwise)
    return [_new_value(*item, layout, dtype, data[0].device, f"[{i}]") for i, item in enumerate(items)]


@backend("dequantize_mxfp8")
def _dequantize_mxfp8(data, scale, columnwise, layout, dtype) -> torch.Tensor:
    """[M, K] values in dtype of one copy; its scales may be compact or swizzled."""
    out = _new_one(data, scale, columnwise, layout, dtype)
    if out.numel():
        options = (columnwise, SCALE_LAYOUTS.index(layout), DTYPE_CODES[dtype])
        inputs = (address_of("data", data), address_of("scale", scale), *data.shape)
        _C.dequantize_mxfp8(target_of(data.device), *inputs, *options, out.data_ptr())
    return out


@backend("dequantize_mxfp8_many")
def _dequantize_mxfp8_many(data, scale, columnwise, layout, dtype) -> list[torch.Tensor]:
    """The same of a list of copies, in one launch."""
    outputs = _new_many(data, scale, columnwise, layout, dtype)
    code, words = SCALE_LAYOUTS.index(layout), []
    for codes, scales, side, out in zip(data, scale, columnwise, outputs, strict=True):
        if out.numel():
            places = address_of("data", codes), address_of("scale", scales), out.data_ptr()
            words += (*places, *codes.shape, side, code)
    if words:
        device = data[0].device
        native = _C.Mxfp8DequantizeList(device.type == "cpu", words, DTYPE_CODES[dtype])
        run_list(native, len(words) // FIELDS, device)
    return outputs


fake("dequantize_mxfp8")(_new_one)
fake("dequantize_mxfp8_many")(_new_many)
