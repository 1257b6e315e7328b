"""Errors of one rank that the others must hear of."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from zerofp4.distributed.collectives import rank_and_size
from zerofp4.distributed.stage import CollectiveError, Stage


class OwnError:
    """An error of this rank, or none, that it raises once the other ranks have heard of it: until then it
    takes its part in what they do together. `with error:` keeps the first Exception of what is in it. A
    collective that failed is raised as it is, since there is nobody left who would wait.

    A variable holds this object, not the exception, and take() empties it: an exception that a frame of its
    own traceback holds is in a reference cycle. Process groups that these frames refer to would outlive
    destroy_process_group(), until a garbage collection or the end of the interpreter.
    """

    __slots__ = ("_error",)

    def __init__(self, error: BaseException | None = None):
        self._error = error

    def __bool__(self) -> bool:
        return self._error is not None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, _) -> bool:
        kept = isinstance(error, Exception) and not isinstance(error, CollectiveError)
        if kept and self._error is None:
            self._error = error
        return kept

    def take(self) -> BaseException | None:
        """The exception, to be raised; it is not kept any more."""
        error, self._error = self._error, None
        return error

    def raise_if_any(self, cause: BaseException | None = None) -> None:
        """cause: of an exception that has none."""
        if self._error is not None:
            if cause is not None and self._error.__cause__ is None:
                self._error.__cause__ = cause
            raise self.take()


def error_text(error: BaseException) -> str:
    """What is kept of an error where it may be told much later."""
    return f"{type(error).__name__}: {error}"


def raised_by_all(error: BaseException) -> BaseException:
    """The error, marked: the other ranks raise one too, and need not be told."""
    error.all_ranks_raise = True
    return error


def attempt(function: Callable, *args) -> tuple[Any, OwnError]:
    """What the function returns, and no error; or None and its exception."""
    try:
        return function(*args), OwnError()
    except Exception as error:
        return None, OwnError(error)


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
    error: OwnError | None,
    group: dist.ProcessGroup | None,
    stage: str = "agreeing on arguments",
) -> list[Any]:
    """All-gather a picklable payload and agree on errors: the payloads in rank order.

    If any rank brings an error, every rank raises an exception of its kind whose message names the first such
    rank. Every rank must call it, with or without an error. stage: what a CollectiveError calls it.
    """
    own = error.take() if error else None
    try:
        if own is not None and (group is None or isinstance(own, CollectiveError)):
            raise own
        if group is None:
            return [payload]
        rank, size = rank_and_size(group)
        kinds = {kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError)}
        kind = next((name for name, kind in kinds.items() if isinstance(own, kind)), "RuntimeError")
        # The kind's name and the text: an exception itself may not survive pickling.
        mine = (payload, None if own is None else (kind, str(own)))
        gathered: list[Any] = [None] * size
        with Stage(stage, group):
            dist.all_gather_object(gathered, mine, group=group)
        for other, (_, failure) in enumerate(gathered):
            if failure is not None:
                kind, message = failure
                raise kinds[kind](f"rank {other}: {message}") from (own if other == rank else None)
        return [value for value, _ in gathered]
    finally:
        del own
