"""The weights of several process groups are published, one group behind the other."""

import itertools
from collections.abc import Callable, Sequence

from zerofp4.cast import CastPlan
from zerofp4.distributed import CollectiveError, OwnError
from zerofp4.engine import Arrivals, FlatBuffer, Publication


def publish_groups(
    buffers: Sequence[FlatBuffer],
    plans: Sequence[CastPlan | None],
    world_size: int,
    update: Callable[[int], None] | None,
    error: Exception | None,
    arrivals: Arrivals | None,
) -> None:
    """One Publication of the buffers of each process group, behind each other: so a rank never has
    collectives of two groups to begin whose order would depend on how many buffers there are in them.
    Collective.

    buffers: those of a group side by side. plans, error, arrivals: as of Publication. world_size: the number
    of all ranks that step together. update: what Publication prepares each buffer by, given its place among
    all of them.

    An error is raised behind the last group, and is `unheard` unless all ranks took part where it was told.
    """
    found, heard = OwnError(), False
    try:
        for first, last in itertools.pairwise(_group_bounds(buffers)):
            of_group = buffers[first:last], plans[first:last]
            try:
                Publication(*of_group, update and _shifted(update, first), error, arrivals).run()
            except Exception as failure:
                if isinstance(failure, CollectiveError) or isinstance(failure.__cause__, CollectiveError):
                    raise  # nobody is left who would wait for the rest
                reached_all = buffers[first].world_size == world_size
                heard = heard or (reached_all and not getattr(failure, "unheard", False))
                found = found or OwnError(failure)
        if found:
            error = found.take()
            error.unheard = not heard
            raise error
    finally:  # see OwnError
        del error


def _group_bounds(buffers: Sequence[FlatBuffer]) -> list[int]:
    """Where the buffers of each process group begin, and where the last ones end."""
    starts = [b for b, (a, c) in enumerate(itertools.pairwise(buffers), start=1) if not c.is_sharded_like(a)]
    return [0, *starts, len(buffers)]


def _shifted(update: Callable[[int], None], first: int) -> Callable[[int], None]:
    """The same, of buffers that are counted from `first` on."""
    return lambda b: update(first + b)
