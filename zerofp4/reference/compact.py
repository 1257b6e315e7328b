"""Compact optimizer state: masters of 24 bits, moments in codes of 8 bits with two scales for each group."""

from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from zerofp4.format import STATE_GROUP
from zerofp4.reference.adamw import adamw_moments, adamw_scalars, root
from zerofp4.reference.stochastic import LOW, philox_bytes

CODES, ROOT_CODES = 127, 255
"""The largest code of a first moment, and of the square root of a second moment."""

RANDOM_COLUMNS = 16
"""So many neighbors of a row share a block of Philox."""


class CompactMoments(NamedTuple):
    """Both moments of a matrix [rows, cols].

    exp_avg: int8 [rows, cols], codes from -127 to 127.
    exp_avg_sq: uint8 [rows, cols], codes of the square roots, from 1 to 255; zeros before the first update.
    scales: float32 [rows, groups, 2], of the first moments and of the square roots of the second ones.
    """

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    scales: torch.Tensor


def no_moments(rows: int, cols: int) -> CompactMoments:
    """The moments before the first update."""
    return CompactMoments(
        torch.zeros(rows, cols, dtype=torch.int8),
        torch.zeros(rows, cols, dtype=torch.uint8),
        torch.zeros(rows, -(-cols // STATE_GROUP), 2, dtype=torch.float32),
    )


def compact_adamw_step(
    master: torch.Tensor,
    gradient: torch.Tensor,
    moments: CompactMoments,
    step: int,
    *,
    maximize: bool = False,
    number: int | None = 0,
    first_row: int = 0,
    **options: Any,
) -> tuple[torch.Tensor, CompactMoments]:
    """(master, moments) after AdamW update number `step`, which is 1 for the first.

    master, gradient: [rows, cols]; the master is float32, and the gradient may be bfloat16.
    number: of the parameter in its optimizer, for the random bytes; None leaves the master in float32.
    first_row: the number of the first row, where these are some rows of a parameter.
    options: of adamw_scalars().
    """
    scalars = adamw_scalars(step, **options)
    exp_avg, exp_avg_sq = adamw_moments(*decode_moments(moments), gradient, scalars, maximize)
    roots = root(exp_avg_sq).clamp(max=2.0**64)
    denominator = roots * scalars.inv_sqrt + scalars.eps.clamp(2.0**-126, 2.0**100)
    master = master * scalars.decay - scalars.step_size * (exp_avg * (1 / denominator))
    if number is not None:
        master = round_master(master, master_bytes(*master.shape, number, step, first_row))
    return master, encode_moments(exp_avg, roots)


# Masters


def master_bytes(rows: int, cols: int, number: int, step: int, first_row: int = 0) -> torch.Tensor:
    """uint8 [rows, cols]: the random bytes with which update `step` of parameter `number` rounds masters."""
    blocks = -(-cols // RANDOM_COLUMNS)
    block = torch.arange(rows * blocks, dtype=torch.int64) + first_row * blocks
    zero = torch.zeros((), dtype=torch.int64)
    drawn = philox_bytes((block & LOW, block >> 32, zero + step, zero + number), (zero, zero))
    return drawn.view(rows, blocks * RANDOM_COLUMNS)[:, :cols]


def round_master(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """float32 values rounded to 24 bits, up for as many of the 256 random bytes as the 8 last bits count.

    A low byte of 0x80 would be half way between two bfloat16 values: it becomes 0x81 for an even random byte,
    and 0x7f for an odd one. NaN is 0x7fc00000.
    """
    bits = torch.where(values.isnan(), 0x7FC00000, values.view(torch.int32).long() & LOW)
    bits = (bits + random) & 0xFFFFFF00
    bits += torch.where(bits & 0xFF00 == 0x8000, 0x100 - (random.long() & 1) * 0x200, 0)
    return _from_bits(bits)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bfloat16, uint8): the bfloat16 nearest to a master of 24 bits, and the lowest of its three bytes."""
    bits = master.view(torch.int32).long()
    high = _from_bits(bits + 0x8000).view(torch.int32) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits >> 8 & 0xFF).to(torch.uint8)


def join_master(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """float32: the master of 24 bits. Where the bfloat16 is zero and the byte negative, it is zero."""
    bits = high.view(torch.int16).int()
    magnitude = (bits & 0x7FFF) * 65536 + low.view(torch.int8).int() * 256
    return _from_bits(magnitude.clamp(min=0).long() | (bits & 0x8000).long() << 16)


def _from_bits(bits: torch.Tensor) -> torch.Tensor:
    """float32 of bits in an integer tensor."""
    bits = bits.long() & LOW
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)


# Moments


def code_values(codes: int) -> torch.Tensor:
    """float32 [codes + 1]: what the codes from 0 on stand for, times the scale."""
    y = torch.arange(codes + 1, dtype=torch.float64) / codes
    return (8 * y / (7 + (49 - 48 * y).sqrt())).float()


def decode_moments(moments: CompactMoments) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [rows, cols] (exp_avg, exp_avg_sq)."""
    cols = moments.exp_avg.shape[1]
    s, t = (scale.repeat_interleave(STATE_GROUP, 1)[:, :cols] for scale in moments.scales.unbind(-1))
    code = moments.exp_avg.long()
    values, root_values = (code_values(codes).to(code.device) for codes in (CODES, ROOT_CODES))
    exp_avg = s * (values[code.abs().clamp(max=CODES)] * code.sign())
    roots = t * root_values[moments.exp_avg_sq.long().clamp(min=1)]
    return exp_avg, roots * roots


def encode_moments(exp_avg: torch.Tensor, roots: torch.Tensor) -> CompactMoments:
    """The codes and scales of float32 [rows, cols] first moments and square roots of second moments."""
    m, w = _groups(exp_avg), _groups(roots)
    s, t = (_largest(values) for values in (m, w))
    finite = s.isfinite()
    factor = torch.where(s < 2.0**-100, 2.0**64, torch.where(s >= 2.0**100, 2.0**-64, torch.ones_like(s)))
    x = torch.where(finite, m * factor, 0) * _reciprocal(torch.where(finite, s * factor, 0))
    exp_avg_codes = _codes(x, CODES)
    x = torch.where(t.isfinite(), w, 0) * _reciprocal(torch.where(t.isfinite(), t, 0))
    root_codes = _codes(x, ROOT_CODES).clamp(min=1)
    rows, cols = exp_avg.shape
    return CompactMoments(
        exp_avg_codes.to(torch.int8).view(rows, -1)[:, :cols].contiguous(),
        root_codes.to(torch.uint8).view(rows, -1)[:, :cols].contiguous(),
        torch.cat((s, t), -1),
    )


def _groups(values: torch.Tensor) -> torch.Tensor:
    """[rows, groups, STATE_GROUP], filled up with zeros."""
    rows, cols = values.shape
    return pad(values, (0, -cols % STATE_GROUP)).view(rows, -1, STATE_GROUP)


def _largest(values: torch.Tensor) -> torch.Tensor:
    """[rows, groups, 1]: the largest magnitude of each group; Inf if one is not finite."""
    magnitude = torch.where(values.isfinite(), values.abs(), torch.inf)
    return magnitude.amax(-1, keepdim=True)


def _reciprocal(values: torch.Tensor) -> torch.Tensor:
    """1 / values, and 0 for 0."""
    return torch.where(values > 0, 1 / values, 0)


def _codes(x: torch.Tensor, codes: int) -> torch.Tensor:
    """The integer next to codes * x (7 - 3 |x|) / 4."""
    slope = fma(x.abs(), *torch.tensor([-0.75 * codes, 1.75 * codes], dtype=torch.float32))
    return (x.double() * slope.double()).round().long()  # the product is exact


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of float32, rounded once: the product is exact in double, and an inexact sum made odd."""
    product, c = a.double() * b.double(), c.double()
    total = product + c
    rest = (product - (total - (total - product))) + (c - (total - product))
    even = total.view(torch.int64) & 1 == 0
    odd = torch.nextafter(total, torch.where(rest > 0, torch.inf, -torch.inf))
    return torch.where((rest != 0) & even, odd, total).float()
