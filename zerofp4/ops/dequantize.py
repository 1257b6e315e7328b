"""zerofp4::dequantize: packed codes and compact scales to values."""

import torch

from zerofp4 import _C
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.layout import scale_shape
from zerofp4.ops.device import DTYPE_CODES, target_of
from zerofp4.ops.operator import backend, check_block_rows, check_scale
from zerofp4.storage import check_buffer

torch.library.define(
    "zerofp4::dequantize",
    "(Tensor data, Tensor scale, Tensor amax, int block_rows, ScalarType dtype) -> Tensor",
)


def _check_dequantize(data, scale, amax, block_rows, dtype) -> None:
    check_block_rows(block_rows)
    if dtype not in WEIGHT_DTYPES:
        raise ValueError(f"dtype must be one of {WEIGHT_DTYPES}, got {dtype}")
    rows, half = data.shape
    check_buffer("data", data, (rows, half), torch.uint8, data.device)
    check_scale("scale", scale, scale_shape(rows, 2 * half, block_rows), data.device)
    check_buffer("amax", amax, (1,), torch.float32, data.device)


@backend("dequantize")
def _dequantize(data, scale, amax, block_rows, dtype) -> torch.Tensor:
    _check_dequantize(data, scale, amax, block_rows, dtype)
    rows, cols = data.shape[0], 2 * data.shape[1]
    out = torch.empty(rows, cols, dtype=dtype, device=data.device)
    if out.numel():
        inputs = (data.data_ptr(), scale.data_ptr(), amax.data_ptr())
        _C.dequantize(
            target_of(data.device), *inputs, rows, cols, block_rows, DTYPE_CODES[dtype], out.data_ptr()
        )
    return out


@torch.library.register_fake("zerofp4::dequantize")
def _(data, scale, amax, block_rows, dtype) -> torch.Tensor:
    _check_dequantize(data, scale, amax, block_rows, dtype)
    return data.new_empty((data.shape[0], 2 * data.shape[1]), dtype=dtype)
