"""Matrices that both formats hold exactly, and whose products are known without a sum."""

import torch

from zerofp4.format import BLOCK, E2M1_MAX, E2M1_VALUES


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
