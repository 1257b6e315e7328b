"""MXFP8: E4M3 elements with a power of two, as an E8M0 byte, for every 32 of them along a row or a column."""

from typing import NamedTuple

import torch

from zerofp4.format import E4M3_MAX, MXFP8_BLOCK, MXFP8_SCALE_DTYPE
from zerofp4.reference.elements import float_to_e4m3
from zerofp4.reference.layouts import pad_scale, swizzle_scale

_QUIET_NAN = 0x7FC00000
_MIN_POWER = 0x00400000
"""Bits of 2^-127, the only power of two in the range of E8M0 that is a subnormal float."""


class QuantizedMXFP8(NamedTuple):
    """Both copies of a [M, K] matrix: data E4M3 [M, K], rowwise_scale E8M0 [M, ceil(K/32)], columnwise_scale
    E8M0 [ceil(M/32), K]. The columnwise copy is not transposed.
    """

    rowwise_data: torch.Tensor
    rowwise_scale: torch.Tensor
    columnwise_data: torch.Tensor
    columnwise_scale: torch.Tensor


def mxfp8_block_amax(x: torch.Tensor) -> torch.Tensor:
    """float32 [M, ceil(K/32)]: the largest magnitude of each block along a row, NaN where there is one."""
    padded = torch.nn.functional.pad(x.float().abs(), (0, -x.shape[1] % MXFP8_BLOCK))
    return padded.unflatten(1, (-1, MXFP8_BLOCK)).amax(dim=2)


def mxfp8_scale(block_amax: torch.Tensor) -> torch.Tensor:
    """E8M0: block_amax / 448 rounded up to a power of two, 0 where it is at most 2^-127; inf gives 254, NaN
    255.
    """
    bits = (block_amax * (1 / E4M3_MAX)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # A subnormal above 2^-127 is rounded up to the smallest normal, 2^-126.
    rounds_up = torch.where(exponent == 0, mantissa > _MIN_POWER, mantissa > 0)
    byte = torch.where(exponent == 255, 254, exponent) + rounds_up.int()
    return byte.to(torch.uint8).view(MXFP8_SCALE_DTYPE)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """float32 2^(exponent - 127) of an int32 exponent 0..254; NaN for -1 and 255."""
    bits = torch.where(exponent == 0, _MIN_POWER, exponent << 23)
    return torch.where((exponent < 0) | (exponent == 255), _QUIET_NAN, bits).view(torch.float32)


def mxfp8_decode(scale: torch.Tensor) -> torch.Tensor:
    """What the elements of a block are multiplied with to get values back: 2^(b - 127)."""
    return _power(scale.view(torch.uint8).int())


def mxfp8_encode(scale: torch.Tensor) -> torch.Tensor:
    """What the elements of a block are multiplied with before they are rounded to E4M3: 2^-(b - 127)."""
    return _power(254 - scale.view(torch.uint8).int())


def _spread(per_block: torch.Tensor, cols: int) -> torch.Tensor:
    return per_block.repeat_interleave(MXFP8_BLOCK, 1)[:, :cols]


def _quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = mxfp8_scale(mxfp8_block_amax(x))
    return float_to_e4m3(x.float() * _spread(mxfp8_encode(scale), x.shape[1])), scale


def _transpose(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.uint8).t().contiguous().view(data.dtype)


def quantize_mxfp8(x: torch.Tensor) -> QuantizedMXFP8:
    """Quantize a [M, K] matrix of float32, bfloat16 or float16."""
    columnwise = _quantize_rows(x.t().contiguous())
    return QuantizedMXFP8(*_quantize_rows(x), *map(_transpose, columnwise))


def dequantize_mxfp8(
    data: torch.Tensor, scale: torch.Tensor, columnwise: bool, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[M, K] values of a copy and its compact scales."""
    if columnwise:
        return dequantize_mxfp8(_transpose(data), _transpose(scale), False, dtype).t().contiguous()
    return (data.float() * _spread(mxfp8_decode(scale), data.shape[1])).to(dtype)


def swizzle_mxfp8_scale(scale: torch.Tensor, rows: int, cols: int, columnwise: bool) -> torch.Tensor:
    """Compact scales of a [rows, cols] matrix in the order in which block-scaled GEMMs read them, padded with
    0; columnwise ones with the column first, as scales of the transpose.
    """
    compact = _transpose(scale) if columnwise else scale
    return swizzle_scale(pad_scale(compact.view(torch.uint8))).view(scale.dtype)
