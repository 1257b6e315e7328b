"""Stacks of matrices [E, N, K]: each is quantized alone, with an amax of its own."""

import torch

from zerofp4.format import BLOCK, FourOverSix
from zerofp4.reference.quantize import Quantized, quantize


def quantize_experts(
    x: torch.Tensor,
    amax: torch.Tensor | None = None,
    *,
    block_rows: int = BLOCK,
    rng_state: torch.Tensor | None = None,
    four_over_six: FourOverSix | None = None,
) -> Quantized:
    """What quantize makes of each matrix of x [E, N, K], E at least 1, stacked: every field has E as its
    first dimension, amaxes are float32 [E].

    amax: float32 [E], taken from x when not given. rng_state: int64 [E, 2].
    """
    nothing = [None] * len(x)
    given = nothing if amax is None else amax.split(1), nothing if rng_state is None else rng_state
    made = [
        quantize(matrix, block_rows, own, rng_state=state, four_over_six=four_over_six)
        for matrix, own, state in zip(x, *given, strict=True)
    ]
    *codes, amaxes, columnwise_amaxes = zip(*made, strict=True)
    stacked = [None if parts[0] is None else torch.stack(parts) for parts in codes]
    own = torch.cat(amaxes)
    return Quantized(*stacked, own, None if columnwise_amaxes[0] is None else own)
