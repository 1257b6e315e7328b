"""Process groups, and the collectives of a plan and of an optimizer.

A group is a torch.distributed process group, or None for a world of one.
"""

import os
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from zerofp4.distributed.stage import Pending, Stage
from zerofp4.launch import ranks_started


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group to communicate in. None stands for the default group, or for a world of one where
    torch.distributed is not initialized and no launcher started several ranks.

    Raises ValueError when the calling process is not a member, RuntimeError when a launcher started several
    ranks that have no group: each would train a model of its own.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ValueError("group was given, but torch.distributed is not initialized")
        started = ranks_started(os.environ)
        if started > 1:
            raise RuntimeError(
                f"a launcher started {started} ranks (WORLD_SIZE, OMPI_COMM_WORLD_SIZE or PMI_SIZE), and "
                "torch.distributed is not initialized, so each would train a model of its own: call "
                "zerofp4.launch.init_process_group() first, or unset the variable where each is to be alone"
            )
        return None
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ValueError(f"group does not contain the calling process (global rank {dist.get_rank()})")
    return group


class GroupReference:
    """A group that is not kept alive: its connections must close when the caller destroys it, not when the
    last plan goes, which may be as late as the interpreter's own end.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self._weak = None if group is None else weakref.ref(group)

    def __call__(self) -> dist.ProcessGroup | None:
        """The group. Raises RuntimeError when it was destroyed."""
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


def reduce_max(
    vector: torch.Tensor, group: dist.ProcessGroup | None, stage: str = "reducing a maximum"
) -> None:
    """MAX all-reduce in place. stage: what a CollectiveError calls it, here and below."""
    if group is not None and dist.get_world_size(group) > 1:
        with Stage(stage, group):
            dist.all_reduce(vector, dist.ReduceOp.MAX, group=group)


def start_reduce_max(
    vector: torch.Tensor, group: dist.ProcessGroup | None, stage: str = "reducing a maximum"
) -> Pending | None:
    """Begin a MAX all-reduce in place; None where there is nobody to reduce with."""
    if group is None or dist.get_world_size(group) == 1:
        return None
    named = Stage(stage, group)
    with named:
        work = dist.all_reduce(vector, dist.ReduceOp.MAX, group=group, async_op=True)
    return Pending(work, named)


def all_gather_slices(
    flat: torch.Tensor,
    group: dist.ProcessGroup,
    async_op: bool = False,
    stage: str = "gathering slices",
) -> Pending | None:
    """All-gather in place: on entry a rank's own equal slice is valid, afterwards all slices are."""
    rank, size = rank_and_size(group)
    # torch 2.13 renamed both collectives and warns of the old names.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    named = Stage(stage, group)
    with named:
        work = gather(flat, flat.chunk(size)[rank], group=group, async_op=async_op)
    return Pending(work, named) if async_op else None


def start_exchange(
    received: Sequence[Sequence[torch.Tensor]],
    sent: Sequence[Sequence[torch.Tensor]],
    group: dist.ProcessGroup,
    stage: str = "exchanging rows",
) -> list[Pending]:
    """Begin to send every other rank r the messages of sent[r], and to receive those of received[r] from it.

    Contiguous, as many messages of the same lengths and dtypes as the other rank expects. What there is for
    this rank itself is not looked at.
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
        return [Pending(work, named) for work in together.works]
    with named:  # to begin fails too, where the other rank has gone
        return [Pending(call([message], peer, 0), named) for call, message, peer in calls]
