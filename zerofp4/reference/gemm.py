"""Products of quantized matrices, in double precision."""

import torch

from zerofp4.format import BLOCK, E2M1_MAX, E2M1_VALUES, E4M3_MAX
from zerofp4.reference.elements import e2m1_to_float, unpack
from zerofp4.reference.mxfp8 import mxfp8_decode
from zerofp4.reference.scales import spread


def nvfp4_operand(data: torch.Tensor, scale: torch.Tensor, block_rows: int) -> torch.Tensor:
    """float64 [M, K]: E2M1 value times block scale of packed codes [M, K/2], without the global scale; exact,
    in bfloat16 too.
    """
    codes = unpack(data)
    return e2m1_to_float(codes).double() * spread(scale.double(), block_rows, *codes.shape)


def mxfp8_operand(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64 [M, K] values of E4M3 elements with rowwise scales, rounded to bfloat16 as those products take
    them: exact from 2^-126 on.
    """
    factors = mxfp8_decode(scale).double().repeat_interleave(32, 1)[:, : data.shape[1]]
    return (data.double() * factors).float().bfloat16().double()


def gemm_alpha(
    amax_a: torch.Tensor, amax_b: torch.Tensor, e4m3_max_a: float = E4M3_MAX, e4m3_max_b: float = E4M3_MAX
) -> torch.Tensor:
    """float32 [1], the product of both global scales, each of which is rounded first."""
    return (amax_a * (1 / (E2M1_MAX * e4m3_max_a))) * (amax_b * (1 / (E2M1_MAX * e4m3_max_b)))


def gemm(
    a: torch.Tensor, b: torch.Tensor, alpha: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """float64 [M, N] of operands [M, K] and [N, K], which every backend comes close to, not rounded."""
    out = a @ b.t()
    out = out if alpha is None else out * alpha.double()
    return out if bias is None else out + bias.double()


# Matrices that both formats hold exactly, and whose products are known without a sum


def one_hot(size: int) -> torch.Tensor:
    """[size, size]: in each row one element, 6 times a power of two, on the diagonal."""
    exponents = torch.arange(size, dtype=torch.int64) // BLOCK % 5 - 2
    return torch.diag(E2M1_MAX * 2.0 ** exponents.float())


def pattern(rows: int, contraction: int) -> torch.Tensor:
    """[rows, contraction]: values of E2M1 in all places, a 6 in each block, and scales, powers of two, that
    differ from those of the tiles around.
    """
    i = torch.arange(rows, dtype=torch.int64).unsqueeze(1)
    k = torch.arange(contraction, dtype=torch.int64).unsqueeze(0)
    sign = 1 - 2 * ((i * 5 + k * 3) // 7 % 2)
    value = torch.tensor(E2M1_VALUES, dtype=torch.float32)[(i + 3 * k + k // BLOCK) % 8]
    width = (contraction - k // BLOCK * BLOCK).clamp_max(BLOCK)
    value = torch.where(k % BLOCK == (i + k // BLOCK) % width, E2M1_MAX, value)
    return sign * value * 2.0 ** ((i // BLOCK * 5 + k // BLOCK * 3) % 11 - 5).float()
