"""Gradients between hosts in few bits: each host's mean is rounded once, at random, before they are added up.

The random bytes are those of an element, not of a message: cutting a parameter into slices changes nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zerofp4.format import BLOCK, E4M3_MAX, MXFP8_BLOCK, SCALE_DTYPE, STRIP
from zerofp4.reference.adamw import average
from zerofp4.reference.elements import e2m1_to_float, pack, unpack
from zerofp4.reference.hadamard import hadamard_rows
from zerofp4.reference.mxfp8 import dequantize_mxfp8, mxfp8_block_amax, mxfp8_encode, mxfp8_scale
from zerofp4.reference.scales import block_amax, block_encode, encode_scale, magnitude, scale_value, spread
from zerofp4.reference.stochastic import LOW, float_to_e2m1_stochastic, philox_bytes


class SentMean(NamedTuple):
    """The mean of one host's gradients of a parameter [R, C], as it travels.

    data: bfloat16 [R, C]; E4M3 [R, C]; or packed E2M1 codes of the transform, uint8 [R, ceil(C / 16) * 8].
    scale: None; E8M0 [R, ceil(C / 32)]; or E4M3 [R, ceil(C / 16)].
    amax: float32 [ceil(R / 16), ceil(C / 128)], of NVFP4 alone: the largest magnitude of a strip's transform.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None
    amax: torch.Tensor | None = None


def send_mean(
    mean: torch.Tensor, wire: str, *, number: int, step: int, host: int, first_row: int = 0
) -> SentMean:
    """Round the mean of one host, float32 [R, C].

    wire: "bf16", "mxfp8" or "nvfp4". number: of the parameter in the optimizer. step: of the update.
    host: number of the host that sends. first_row: of the parameter, if these are not all of its rows; for
    NVFP4 a multiple of 16.
    """
    x = hadamard_rows(mean) if wire == "nvfp4" else mean
    where = {"first": first_row * x.shape[1], "number": number, "step": step, "host": host}
    drawn = wire_bytes(x.shape, 2 if wire == "bf16" else 1, **where)
    if wire == "bf16":
        return SentMean(float_to_bfloat16_stochastic(x, drawn))
    if wire == "mxfp8":
        scale = mxfp8_scale(mxfp8_block_amax(x))
        factor = mxfp8_encode(scale).repeat_interleave(MXFP8_BLOCK, 1)[:, : x.shape[1]]
        return SentMean(float_to_e4m3_stochastic(x * factor, drawn[..., 0]), scale)
    amax = _strips(magnitude(x)).amax((2, 3))
    per_block = _of_blocks(amax, x)
    scale = covering_scale(block_amax(x, 1), per_block)
    scaled = x * spread(block_encode(scale, per_block), 1, *x.shape)
    return SentMean(pack(float_to_e2m1_stochastic(scaled, drawn[..., 0])), scale, amax)


def mean_of_hosts(sent: Sequence[SentMean], wire: str, cols: int) -> torch.Tensor:
    """float32 [R, C]: the values of all hosts' means, added in host order and divided by their number. Those
    of NVFP4 are transforms, and so is their mean: it is transformed back.
    """
    mean = average(torch.stack([_values(each, wire).flatten() for each in sent]))
    mean = mean.view(sent[0].data.shape[0], -1)
    return hadamard_rows(mean, inverse=True)[:, :cols] if wire == "nvfp4" else mean


def _values(sent: SentMean, wire: str) -> torch.Tensor:
    if wire == "bf16":
        return sent.data.float()
    if wire == "mxfp8":
        return dequantize_mxfp8(sent.data, sent.scale, columnwise=False)
    codes = e2m1_to_float(unpack(sent.data))
    factor = (scale_value(sent.scale) * _of_blocks(sent.amax, codes)) * (1 / (6 * E4M3_MAX))
    return codes * spread(factor, 1, *codes.shape)


def _strips(x: torch.Tensor) -> torch.Tensor:
    """[R, C] cut into strips [ceil(R / 16), ceil(C / 128), 16, 128]; 0 past the edges."""
    rows, cols = STRIP
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % cols, 0, -x.shape[0] % rows))
    return x.unflatten(1, (-1, cols)).unflatten(0, (-1, rows)).transpose(1, 2)


def _of_blocks(amax: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[R, C / 16]: the amax of its strip for each block of 1x16 of x [R, C]."""
    rows, cols = STRIP
    spread_out = amax.repeat_interleave(rows, 0).repeat_interleave(cols // BLOCK, 1)
    return spread_out[: x.shape[0], : x.shape[1] // BLOCK]


def covering_scale(amax_of_blocks: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """The smallest E4M3 scale with which no element of a block is above 6: rounded up where that of a weight
    is rounded to nearest, since an element that saturates is wrong by the same sign in every step.
    """
    wanted = (amax_of_blocks * (encode_scale(amax) * (1 / 6))).clamp(max=E4M3_MAX)
    nearest = wanted.to(SCALE_DTYPE)
    above = nearest.view(torch.uint8) + (nearest.float() < wanted).to(torch.uint8)
    return above.view(SCALE_DTYPE)


def wire_bytes(
    shape: Sequence[int], count: int, *, first: int, number: int, step: int, host: int
) -> torch.Tensor:
    """uint8 [*shape, count]: the random bytes of elements, `count` each. first: number of the first one.

    Element i of a parameter, counted row by row, has the bytes from i * count on. The key is host + 1. The
    counter holds the number of a block of 16 bytes (64 bits), the step, and the number of the parameter.
    """
    begin, end = first * count, (first + torch.Size(shape).numel()) * count
    block = torch.arange(begin // 16, -(-end // 16), dtype=torch.int64)
    zero = torch.zeros((), dtype=torch.int64)
    drawn = philox_bytes((block & LOW, block >> 32, zero + step, zero + number), (zero + host + 1, zero))
    return drawn[begin % 16 :][: end - begin].view(*shape, count)


def float_to_bfloat16_stochastic(x: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """bfloat16 of float32 values, with two random bytes each (..., 2), little endian: up for as many of the
    65,536 numbers as the lower 16 bits count. A finite value stays finite.
    """
    bits = x.view(torch.int32).long() & LOW
    sign, size = bits & 0x80000000, bits & 0x7FFFFFFF
    random = drawn[..., 0].long() | drawn[..., 1].long() << 8
    rounded = torch.where(size < 0x7F800000, (size + random).clamp(max=0x7F7FFFFF), size) >> 16
    rounded = torch.where(x.isnan(), 0x7FC0, rounded | sign >> 16)
    return torch.where(rounded >= 1 << 15, rounded - (1 << 16), rounded).to(torch.int16).view(torch.bfloat16)


def float_to_e4m3_stochastic(y: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """E4M3 of float32 values with a random byte each: (r + 1/2) / 256 of a grid step is added to |y|, and the
    sum is rounded down on its own step, saturating at 448. NaN gives 0x7F.
    """
    step = _e4m3_step(y.abs())
    t = (y.abs() + ((r.float() + 0.5) * (1 / 256)) * step).clamp(max=E4M3_MAX)
    step = _e4m3_step(t)
    byte = ((t / step).floor() * step).copysign(y).to(SCALE_DTYPE).view(torch.uint8)
    return torch.where(y.isnan(), 0x7F, byte).view(SCALE_DTYPE)


def _e4m3_step(a: torch.Tensor) -> torch.Tensor:
    """The distance of neighboring E4M3 values at a: 2^-9 below 2^-6, then 1/8 of a power of two."""
    exponent = (a.view(torch.int32) >> 23).clamp(min=127 - 6)
    return (exponent - 3 << 23).view(torch.float32)
