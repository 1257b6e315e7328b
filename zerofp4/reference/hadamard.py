"""The random Hadamard transform."""

import torch

from zerofp4.format import BLOCK

RANDOM_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""What the 16 rows of a group are multiplied with first, unless the signs are left out."""


def hadamard_transform(x: torch.Tensor, random_signs: bool = True) -> torch.Tensor:
    """bfloat16 [round_up(M, 16), K]: the transform of a [M, K] matrix along M, in groups of 16 rows.

    Rows past M count as 0. x of any floating dtype is rounded to bfloat16 first; all between that and the
    last rounding is float32, a butterfly with strides 1, 2, 4, 8. Adding 0 turns a group of -0 into +0.
    """
    x = torch.nn.functional.pad(x.bfloat16().float(), (0, 0, 0, -x.shape[0] % BLOCK))
    groups = x.unflatten(0, (-1, BLOCK))
    if random_signs:
        groups = groups * torch.tensor(RANDOM_SIGNS, dtype=groups.dtype, device=x.device).unsqueeze(1)
    for stride in (1, 2, 4, 8):
        a, b = groups.unflatten(1, (-1, 2, stride)).unbind(2)
        groups = torch.stack([a + b, a - b], dim=2).flatten(1, 3)
    return (groups * 0.25 + 0.0).flatten(0, 1).bfloat16()
