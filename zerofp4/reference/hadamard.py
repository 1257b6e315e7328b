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
        groups = groups * _signs(x)
    return _butterfly(groups).flatten(0, 1).bfloat16()


def hadamard_rows(x: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """float32 [M, round_up(K, 16)]: the transform of a float32 [M, K] matrix along K, in groups of 16
    columns, without rounding to bfloat16. Columns past K count as 0. inverse: signs are multiplied last.
    """
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK)).t().unflatten(0, (-1, BLOCK))
    signs = _signs(x)
    groups = _butterfly(groups) * signs if inverse else _butterfly(groups * signs)
    return groups.flatten(0, 1).t().contiguous()


def _signs(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(RANDOM_SIGNS, dtype=torch.float32, device=x.device).unsqueeze(1)


def _butterfly(groups: torch.Tensor) -> torch.Tensor:
    """float32 [groups, 16, n], transformed along the 16."""
    for stride in (1, 2, 4, 8):
        a, b = groups.unflatten(1, (-1, 2, stride)).unbind(2)
        groups = torch.stack([a + b, a - b], dim=2).flatten(1, 3)
    return groups * 0.25 + 0.0
