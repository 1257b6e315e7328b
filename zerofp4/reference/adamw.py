"""AdamW."""

import math
from typing import Any, NamedTuple

import torch

from zerofp4.reference.scales import divide


def power(base: float, exponent: int) -> float:
    """base**exponent by repeated squaring: the same bits everywhere, which no pow() promises."""
    result = 1.0
    while exponent > 0:
        if exponent % 2:
            result *= base
        base *= base
        exponent //= 2
    return result


def adamw_step(
    master: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: int,
    *,
    maximize: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(master, exp_avg, exp_avg_sq) after AdamW update number `step`, which is 1 for the first.

    float32 tensors of one shape; the gradient may be bfloat16. options: of adamw_scalars(), computed in
    double and rounded once. Then every operation rounds once, in the order written. The first moment is
    torch.lerp's formula.
    """
    scalars = adamw_scalars(step, **options)
    exp_avg, exp_avg_sq = adamw_moments(exp_avg, exp_avg_sq, gradient, scalars, maximize)
    denominator = root(exp_avg_sq) * scalars.inv_sqrt + scalars.eps
    master = master * scalars.decay - scalars.step_size * (exp_avg / denominator)
    return master, exp_avg, exp_avg_sq


class AdamWScalars(NamedTuple):
    """float32 []."""

    decay: torch.Tensor
    weight1: torch.Tensor
    beta2: torch.Tensor
    weight2: torch.Tensor
    step_size: torch.Tensor
    inv_sqrt: torch.Tensor
    eps: torch.Tensor


def adamw_scalars(
    step: int, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> AdamWScalars:
    """What the elements of a tensor need in an update: computed in double, each rounded once."""
    beta1, beta2 = betas
    scalars = (
        1 - lr * weight_decay,
        1 - beta1,
        beta2,
        1 - beta2,
        lr / (1 - power(beta1, step)),
        1 / math.sqrt(1 - power(beta2, step)),
        eps,
    )
    return AdamWScalars(*torch.tensor(scalars, dtype=torch.float64).float().unbind())


def adamw_moments(
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor,
    scalars: AdamWScalars,
    maximize: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(exp_avg, exp_avg_sq) after an update."""
    g = -gradient.float() if maximize else gradient.float()
    weight1 = scalars.weight1
    if weight1 < 0.5:
        exp_avg = exp_avg + weight1 * (g - exp_avg)
    else:
        exp_avg = g - (1 - weight1) * (g - exp_avg)
    return exp_avg, exp_avg_sq * scalars.beta2 + (g * scalars.weight2) * g


def root(values: torch.Tensor) -> torch.Tensor:
    """Square roots of float32 values, each the nearest float, which torch's own often are not on a CPU."""
    return values.double().sqrt().float()


def average(pieces: torch.Tensor, ranks: int | None = None) -> torch.Tensor:
    """float32 [n]: the mean of gradients of all ranks.

    pieces [ranks, n] of any floating dtype: converted to float32, added in rank order from the first on, then
    divided by their number. ranks: what to divide by, if a piece is a sum of several ranks.
    """
    total, *others = pieces.float()
    for other in others:
        total = total + other
    return divide(total, float(ranks or len(pieces)))


def square_sums(values: torch.Tensor) -> torch.Tensor:
    """int64 [34]: the sum of the squares of float32 values [n], exactly the same in any order of chunks.

    Of each 128 neighbours four at a time are added one after the other, then pairs of neighbours, all in
    float32. A sum m * 2^e of 24 bits is m * 2^(e % 8) in word e // 8, with e the exponent as it is stored and
    not below 1; words 32 and 33 count infinite sums and NaN.
    """
    padded = torch.nn.functional.pad(values, (0, -len(values) % 128)).view(-1, 32, 4)
    a, b, c, d = (padded * padded).unbind(-1)
    sums = ((a + b) + c) + d
    while sums.shape[1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    bits = sums.view(torch.int32).view(-1).long() & 0x7FFFFFFF
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    mantissa = torch.where(exponent > 0, mantissa + 0x800000, mantissa)
    exponent = exponent.clamp(min=1)
    finite = bits < 0x7F800000
    words = torch.where(finite, exponent >> 3, 32 + (bits > 0x7F800000).long())
    added = torch.where(finite, mantissa << (exponent & 7), 1)
    return torch.zeros(34, dtype=torch.int64).index_add_(0, words, added)


def norm_of_squares(words: torch.Tensor) -> torch.Tensor:
    """float32 []: the root of what square_sums() found, added up over parameters and ranks."""
    *sums, infinite, nan = words.double()
    if nan or infinite:
        return torch.tensor(math.nan if nan else math.inf, dtype=torch.float32)
    return sum(word * 2.0 ** (8 * i - 150) for i, word in enumerate(sums)).sqrt().float()
