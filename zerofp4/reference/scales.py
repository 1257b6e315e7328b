"""Two-level NVFP4 scales: one float per tensor, one E4M3 byte per block."""

import torch

from zerofp4.format import BLOCK, E2M1_MAX, E4M3_MAX, FLOAT32_MAX, SCALE_DTYPE
from zerofp4.reference.elements import float_to_e2m1


def magnitude(x: torch.Tensor) -> torch.Tensor:
    """|x| in float32 with NaN as +inf: what an amax sees."""
    return torch.where(x.isnan(), torch.inf, x.float().abs())


def blocks(x: torch.Tensor, block_rows: int) -> torch.Tensor:
    """[M, K] cut into blocks [ceil(M/block_rows), ceil(K/16), block_rows, 16]; 0 past the edges."""
    rows, cols = x.shape
    x = torch.nn.functional.pad(x, (0, -cols % BLOCK, 0, -rows % block_rows))
    return x.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, block_rows)).transpose(1, 2)


def block_amax(x: torch.Tensor, block_rows: int) -> torch.Tensor:
    """float32 [ceil(M/block_rows), ceil(K/16)]: the largest magnitude of each block."""
    return blocks(magnitude(x), block_rows).amax(dim=(2, 3))


def divide(a: torch.Tensor | float, b: torch.Tensor | float) -> torch.Tensor:
    """a / b, at least one a tensor, rounded once: with a number `/` would multiply by a reciprocal."""
    if not isinstance(a, torch.Tensor):
        a = torch.full_like(b, a)
    if not isinstance(b, torch.Tensor):
        b = torch.full_like(a, b)
    return a / b


def encode_scale(amax: torch.Tensor, e4m3_max: float = E4M3_MAX) -> torch.Tensor:
    """S_enc, which maps the tensor's amax to the largest product of scale and code: 448 * 6, or e4m3_max * 6.
    1 for an amax of 0, inf, NaN or below 0.
    """
    encode = divide(e4m3_max * E2M1_MAX, amax).clamp(max=FLOAT32_MAX)
    return torch.where((amax > 0) & (amax < torch.inf), encode, 1.0)


def block_scale(amax_of_blocks: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """The E4M3 scale of each block. May be 0: a block of zeros, or one that underflows."""
    factor = encode_scale(amax) * (1 / 6)
    return (amax_of_blocks * factor).clamp(max=E4M3_MAX).to(SCALE_DTYPE)


def scale_value(scale: torch.Tensor) -> torch.Tensor:
    """float32 values of E4M3 scales, which are not negative: the sign of a byte means nothing."""
    return scale.float().abs()


def block_encode(scale: torch.Tensor, amax: torch.Tensor, e4m3_max: float = E4M3_MAX) -> torch.Tensor:
    """What the elements of a block are multiplied with before they are rounded to E2M1."""
    decode = divide(1.0, encode_scale(amax, e4m3_max))
    encode = divide(1.0, scale_value(scale) * decode).clamp(max=FLOAT32_MAX)
    return torch.where(scale_value(scale) > 0, encode, FLOAT32_MAX)


def spread(per_block: torch.Tensor, block_rows: int, rows: int, cols: int) -> torch.Tensor:
    """One value per block to one per element of [rows, cols]."""
    return per_block.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]


def scaled(
    x: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, block_rows: int, e4m3_max: float = E4M3_MAX
) -> torch.Tensor:
    """float32 [M, K]: what is rounded to E2M1."""
    return x.float() * spread(block_encode(scale, amax, e4m3_max), block_rows, *x.shape)


def encode(
    x: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, block_rows: int, e4m3_max: float = E4M3_MAX
) -> torch.Tensor:
    """uint8 codes [M, K] of a matrix whose block scales are known."""
    return float_to_e2m1(scaled(x, scale, amax, block_rows, e4m3_max))
