"""What a vote of the ranks means for a step."""

from typing import NamedTuple

import torch


class Decision(NamedTuple):
    """As of ops.Decision. found_inf: that of the optimizer."""

    nonfinite: int
    first: int
    skipped: int
    skip: float
    refused: float
    present: torch.Tensor
    found_inf: float


def decide(
    before: Decision,
    vote: torch.Tensor | None,
    count: int = 0,
    *,
    own: int = 0,
    failed: float = 0.0,
    writes_found_inf: bool = False,
    looks: bool = True,
    counts: bool = False,
    goes_on: bool = False,
    keeps: bool = False,
) -> Decision:
    """The decision after `before`. Arguments as of ops.Decision and its decide()."""
    word, refused, present = own, False, before.present
    if vote is not None:
        equal = (len(vote) - count - 4) // 2
        highest, minus_lowest = vote[count : count + equal], vote[count + equal :][:equal]
        word = int(vote[-2])
        refused = bool((highest != -minus_lowest).any() or vote[-1] != 0 or (keeps and before.refused))
    nonfinite, first = before.nonfinite, before.first
    earlier = first if goes_on else 0
    if looks:
        nonfinite, first = word, max(earlier, word)
    skip = nonfinite != 0 or refused or failed != 0
    if vote is not None:
        present = present.clone()
        present[len(present) - count :] = 0.0 if skip else vote[:count]
    is_first_skip = nonfinite != 0 and earlier == 0 and not refused
    found_inf = float(skip or (goes_on and before.found_inf)) if writes_found_inf else before.found_inf
    skipped = before.skipped + (counts and is_first_skip)
    return Decision(nonfinite, first, skipped, float(skip), float(refused), present, found_inf)
