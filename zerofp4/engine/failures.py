"""Errors of a rank that goes on, because the others wait for its part in what they do together."""

from zerofp4.distributed import CollectiveError


class Failures:
    """`with failures:` around what may go wrong on this rank alone: the error is kept, and what comes behind
    is done. A collective that failed is raised as it is, since there is nobody left who would wait.
    """

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, _) -> bool:
        kept = isinstance(error, Exception) and not isinstance(error, CollectiveError)
        if kept:
            self.errors.append(error)
        return kept

    def raise_first(self) -> None:
        if self.errors:
            raise self.errors[0]
