"""Collectives of groups, None for a world of one; agreement on errors; phases that a profiler shows."""

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.distributed.distributed_c10d import _coalescing_manager

from zerofp4.launch import ranks_started

# Process groups


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group to communicate in. None stands for the default group, or, if torch.distributed is not
    initialized, for a world of one.

    Raises ValueError if the calling process is not a member, RuntimeError if a launcher started several ranks
    and torch.distributed is not initialized: each rank would train a model of its own.
    """
    if not dist.is_initialized():
        if group is not None:
            raise ValueError("group was given, but torch.distributed is not initialized")
        started = ranks_started(os.environ)
        if started is not None and started > 1:
            raise RuntimeError(
                f"a launcher started {started} ranks (RANK and WORLD_SIZE, or those of MPI), and "
                "torch.distributed is not initialized, so each would train a model of its own: call "
                "zerofp4.launch.init_process_group() first, or unset the variables where each is to be alone"
            )
        return None
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ValueError(f"group does not contain the calling process (global rank {dist.get_rank()})")
    return group


class GroupReference:
    """A group that is not kept alive, so that its connections close when the caller destroys it."""

    def __init__(self, group: dist.ProcessGroup | None):
        self._weak = None if group is None else weakref.ref(group)

    def __call__(self) -> dist.ProcessGroup | None:
        """The group. Raises RuntimeError if it was destroyed."""
        if self._weak is None:
            return None
        group = self._weak()
        if group is None:
            raise RuntimeError("the process group that this was built for has been destroyed")
        return group

    def is_alive(self) -> bool:
        return self._weak is None or self._weak() is not None

    def refers_to(self, group: dist.ProcessGroup | None) -> bool:
        return (None if self._weak is None else self._weak()) is group


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def timeout_seconds(group: dist.ProcessGroup, device: torch.device) -> float:
    """How long a collective of the group may wait for a rank, with tensors on this device."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", dist.constants.default_pg_timeout).total_seconds()


# Errors of a collective, and of one rank


class CollectiveError(dist.DistBackendError):
    """A collective failed: a rank has died, was stopped or runs other code, and the process group is of no
    more use. The message names the stage, this rank, and of two ranks the other one. Code that reports errors
    to other ranks raises it as it is: a second collective would wait as long again.
    """

    all_ranks_raise = True


class Stage:
    """`with Stage(name, group):` around calls of torch.distributed, and nothing else: a RuntimeError from
    them becomes a CollectiveError. name: what the ranks do together, as in "averaging gradients".
    """

    __slots__ = ("_group", "_name")

    def __init__(self, name: str, group: dist.ProcessGroup | None):
        self._name, self._group = name, group

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, _) -> None:
        # gloo raises RuntimeErrors, NCCL DistBackendErrors, which are RuntimeErrors too.
        if not isinstance(error, RuntimeError) or isinstance(error, CollectiveError | torch.OutOfMemoryError):
            return
        rank, size = rank_and_size(self._group)
        if size == 1:
            return
        # In a larger world the other rank of two may have left because of a third.
        who = f"rank {1 - rank}" if size == dist.get_world_size() == 2 else "a rank"
        raise CollectiveError(
            f"{self._name} failed on rank {rank} of {size}: {str(error).splitlines()[0]} ({who} has died, "
            "was stopped or is elsewhere; this process group is of no more use)"
        ) from error


class Pending:
    """Collectives that are under way."""

    __slots__ = ("_stage", "_works")

    def __init__(self, stage: Stage, *works: dist.Work):
        self._stage, self._works = stage, works

    def wait(self) -> None:
        """With NCCL the device's stream waits, else the host."""
        with self._stage:
            for work in self._works:
                work.wait()


class OwnError:
    """An error of this rank, or none, that is raised once this rank has joined the collectives of the others.
    `with error:` keeps the first Exception raised inside; a CollectiveError is raised as it is, since no rank
    is left that would wait.

    A variable holds this object, not the exception, and take() empties it: an exception that a frame of its
    own traceback holds is in a reference cycle, which would keep process groups alive.
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
        """The exception, which is not kept any more."""
        error, self._error = self._error, None
        return error

    def raise_if_any(self, cause: BaseException | None = None) -> None:
        """cause: of an exception that has none."""
        if self._error is not None:
            if cause is not None and self._error.__cause__ is None:
                self._error.__cause__ = cause
            raise self.take()


def attempt(function: Callable, *args) -> tuple[Any, OwnError]:
    """What the function returns, and no error; or None and its exception."""
    try:
        return function(*args), OwnError()
    except Exception as error:
        return None, OwnError(error)


def error_text(error: BaseException) -> str:
    """What is kept of an error that may be reported much later."""
    return f"{type(error).__name__}: {error}"


def raised_by_all(error: BaseException) -> BaseException:
    """The error, marked: the other ranks raise one too, and need no report of it."""
    error.all_ranks_raise = True
    return error


# Collectives. stage: what a CollectiveError calls one.


def exchange(payload: Any, error: OwnError | None, group: dist.ProcessGroup | None, stage: str) -> list[Any]:
    """All-gather a picklable payload and agree on errors: the payloads in rank order. If a rank has an error,
    all raise an exception of its kind whose message names the first such rank; a world of one its own.
    """
    rank, size = rank_and_size(group)
    own = error.take() if error else None
    try:
        if own is not None and (size == 1 or isinstance(own, CollectiveError)):
            raise own
        if size == 1:
            return [payload]
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


def first_difference(by_rank: Sequence[Sequence[Any]]) -> tuple[int, int | None] | None:
    """(rank, position) of the first entry that differs from rank 0's, None for another length; or None."""
    first = by_rank[0]
    for rank, other in enumerate(by_rank):
        if len(other) != len(first):
            return rank, None
    for rank, other in enumerate(by_rank):
        for position, (mine, theirs) in enumerate(zip(first, other, strict=True)):
            if mine != theirs:
                return rank, position
    return None


def reduce_max(vector: torch.Tensor, group: dist.ProcessGroup | None, stage: str) -> None:
    """MAX all-reduce in place."""
    if rank_and_size(group)[1] > 1:
        with Stage(stage, group):
            dist.all_reduce(vector, dist.ReduceOp.MAX, group=group)


def start_reduce_max(vector: torch.Tensor, group: dist.ProcessGroup | None, stage: str) -> Pending | None:
    """Begin a MAX all-reduce in place; None in a world of one."""
    if rank_and_size(group)[1] == 1:
        return None
    named = Stage(stage, group)
    with named:
        return Pending(named, dist.all_reduce(vector, dist.ReduceOp.MAX, group=group, async_op=True))


def all_gather_slices(flat: torch.Tensor, group: dist.ProcessGroup, stage: str = "gathering slices") -> None:
    """All-gather in place: on entry a rank's own equal slice is valid, afterwards all slices are."""
    with Stage(stage, group):
        _gather(flat, group)


def start_gather(
    flats: Sequence[torch.Tensor], group: dist.ProcessGroup | None, stage: str
) -> Pending | None:
    """Begin all_gather_slices() of each; None in a world of one."""
    if rank_and_size(group)[1] == 1:
        return None
    named = Stage(stage, group)
    with named:
        return Pending(named, *[_gather(flat, group, async_op=True) for flat in flats])


def _gather(flat: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
    rank, size = rank_and_size(group)
    # torch 2.13 renamed both collectives and warns of the old names.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(flat, flat.chunk(size)[rank], group=group, async_op=async_op)


def reduce_scatter_slices(
    out: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup, stage: str
) -> Pending:
    """Begin to add up a rank's equal slice of `flat` over all ranks into `out`, in the backend's order."""
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    named = Stage(stage, group)
    with named:
        return Pending(named, reduce(out, flat, group=group, async_op=True))


def start_exchange(
    received: Sequence[Sequence[torch.Tensor]],
    sent: Sequence[Sequence[torch.Tensor]],
    group: dist.ProcessGroup,
    stage: str,
) -> Pending:
    """Begin to send the messages sent[r] to every other rank r, and to receive received[r] from it:
    contiguous, and like those of the other rank in number, lengths and dtypes.
    """
    rank, size = rank_and_size(group)
    calls: list[tuple[Callable, torch.Tensor, int]] = []
    for step in range(1, size):  # every rank begins with its neighbour, not all with rank 0
        to, source = (rank + step) % size, (rank - step) % size
        calls += [(group.send, message, to) for message in sent[to]]
        calls += [(group.recv, message, source) for message in received[source]]
    # Not dist.isend() and dist.P2POp, whose checks of each message take the host longer than to send it.
    device, named = calls[0][1].device, Stage(stage, group)
    if device.type == "cuda" and group._get_backend(device).supports_coalescing:
        with named, _coalescing_manager(group, device, async_ops=True) as together:
            for call, message, peer in calls:
                call([message], peer, 0)
        return Pending(named, *together.works)
    with named:  # to begin fails too if the other rank has gone
        return Pending(named, *[call([message], peer, 0) for call, message, peer in calls])


# Phases of a step

PHASES = ("scan", "vote", "gradients", "norm", "update", "amaxes", "cast", "weights", "transpose")
"""The phases of a step of many ranks. What an update averages counts as "update"."""

PREFIX = "zerofp4::"
"""Of a phase's name in a trace of torch.profiler."""

Work = TypeVar("Work", bound=Callable[..., Any])


def in_phase(phase: str, work: Work) -> Work:
    """`work` itself; while a profiler is on, `work` inside a range with the phase's name. (A record_function
    takes the host 10 us without one, too.)
    """
    if not profiler._is_profiler_enabled:
        return work

    def named(*arguments: Any, **options: Any) -> Any:
        with profiler.record_function(PREFIX + phase):
            return work(*arguments, **options)

    return named  # type: ignore[return-value]
