"""Errors of one rank that the others must hear of."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from zerofp4.distributed.collectives import rank_and_size
from zerofp4.distributed.stage import CollectiveError, Stage


def attempt(function: Callable, *args) -> tuple[Any, Exception | None]:
    """(result, None), or (None, exception): whatever goes wrong here, other ranks have to hear of it."""
    try:
        return function(*args), None
    except Exception as error:
        return None, error


def first_difference(by_rank: Sequence[Sequence[Any]]) -> tuple[int, int | None] | None:
    """(rank, position) of the first entry in which a rank's list is not that of rank 0; the position is None
    for a list of another length, which comes before all others. None where all are equal.
    """
    first = by_rank[0]
    for rank, other in enumerate(by_rank):
        if len(other) != len(first):
            return rank, None
    for rank, other in enumerate(by_rank):
        for position, (mine, theirs) in enumerate(zip(first, other, strict=True)):
            if mine != theirs:
                return rank, position
    return None


def exchange(
    payload: Any,
    error: Exception | None,
    group: dist.ProcessGroup | None,
    stage: str = "agreeing on arguments",
) -> list[Any]:
    """All-gather a picklable payload and agree on errors: the payloads in rank order.

    If any rank brings an error, every rank raises an exception of its kind whose message names the first such
    rank. Every rank must call it, with or without an error. stage: what a CollectiveError calls it.
    """
    if isinstance(error, CollectiveError):
        raise error
    if group is None:
        if error is not None:
            raise error
        return [payload]
    rank, size = rank_and_size(group)
    kinds = {kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError)}
    kind = next((name for name, kind in kinds.items() if isinstance(error, kind)), "RuntimeError")
    # The kind's name and the text: an exception itself may not survive pickling.
    mine = (payload, None if error is None else (kind, str(error)))
    gathered: list[Any] = [None] * size
    with Stage(stage, group):
        dist.all_gather_object(gathered, mine, group=group)
    for other, (_, failure) in enumerate(gathered):
        if failure is not None:
            kind, message = failure
            raise kinds[kind](f"rank {other}: {message}") from (error if other == rank else None)
    return [value for value, _ in gathered]
