"""The norm of the gradients of all ranks, for clip_grad_norm_."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from zerofp4 import ops
from zerofp4.distributed import Stage, reduce_max
from zerofp4.engine import ALIGNMENT

NORM = "finding the norm of the gradients"


def global_norm(
    means: Iterable[torch.Tensor], p: float, group: dist.ProcessGroup | None, squares: torch.Tensor
) -> torch.Tensor:
    """The p-norm of the reduced gradients of all ranks, float32 []. Collective: one all-reduce.

    means: those that this rank counts, contiguous, cut at multiples of ALIGNMENT elements of a parameter
        or at its end.
    squares: the sums that ops.average left of the means, for the 2-norm. It does not depend on the number of
        ranks. For other norms FP32 sums are kept short and added up in float64: one long FP32 sum is off by
        percents for 10**8 elements.
    """
    if p == 2.0:
        return ops.norm_of_squares(_add_up(squares.sum(0), group))
    rows = [torch.zeros(1, dtype=torch.float32, device=squares.device)]
    for mean in (mean.view(-1) for mean in means):
        whole = mean.numel() // ALIGNMENT * ALIGNMENT
        for short in (mean[:whole].view(-1, ALIGNMENT), mean[whole:].view(1, -1)):
            if short.numel():
                rows.append(torch.linalg.vector_norm(short, p, dim=1, dtype=torch.float32))
    norms = torch.cat(rows).double()
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
