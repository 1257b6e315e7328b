"""The norm of the gradients of all ranks, for clip_grad_norm_."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from zerofp4 import ops
from zerofp4.distributed import Stage, reduce_max

NORM = "finding the norm of the gradients"
_AT_ONCE = 1 << 22
"""So many elements have a copy in float64 at a time."""


def global_norm(
    means: Iterable[torch.Tensor], p: float, group: dist.ProcessGroup | None, squares: torch.Tensor
) -> torch.Tensor:
    """The p-norm of the reduced gradients of all ranks, float32 []. Collective: one all-reduce.

    means: those that this rank counts, contiguous.
    squares: the sums that ops.average left of the means, for the 2-norm. It does not depend on the number of
        ranks. Other norms add up in float64, and differ between worlds where that rounds to another float32.
    """
    if p == 2.0:
        return ops.norm_of_squares(_add_up(squares.sum(0), group))
    parts = [part for mean in means if mean.numel() for part in mean.view(-1).split(_AT_ONCE)]
    norms = [torch.linalg.vector_norm(part, p, dtype=torch.float64) for part in parts]
    norms = torch.stack([torch.zeros_like(squares[0, 0], dtype=torch.float64), *norms])
    if p != math.inf:
        return _add_up(norms.pow(p).sum(), group).pow(1 / p).float()
    largest = norms.max()
    # Not every backend's MAX keeps a NaN, so it travels as a flag.
    pair = torch.stack([largest.where(~largest.isnan(), 0.0), largest.isnan().double()])
    reduce_max(pair, group, NORM)
    return pair[0].where(pair[1] == 0, math.nan).float()


def _add_up(words: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None:
        with Stage(NORM, group):
            dist.all_reduce(words, group=group)
    return words
