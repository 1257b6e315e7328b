"""What the ranks of a group tell each other without their devices."""

import os
import secrets
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zerofp4.distributed.agreement import attempt, exchange
from zerofp4.distributed.collectives import rank_and_size, timeout_seconds
from zerofp4.distributed.stage import Stage


class _Connection:
    """A ProcessGroupGloo, and whether nothing has failed in it."""

    def __init__(self, gloo: Any):
        self.gloo, self.is_whole = gloo, True


_connections: weakref.WeakKeyDictionary[dist.ProcessGroup, _Connection] = weakref.WeakKeyDictionary()
"""By groups that have no backend for tensors on the CPU; closed with them."""


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Whether tensors on the CPU can be reduced in it."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True


def connect_on_host(group: dist.ProcessGroup, device: torch.device) -> None:
    """Collective. Has gloo connect the ranks of a group that has no backend for tensors on the CPU, unless it
    has.

    device: whose tensors the group reduces; its timeout for them is that of gloo too. What keeps one rank
    from it, all raise.
    """
    rank, size = rank_and_size(group)
    if size == 1 or has_cpu_backend(group):
        return
    stage = "connecting on the host"
    options, error = attempt(_gloo_options, timeout_seconds(group, device))
    held = _connections.get(group)
    answers = exchange((secrets.token_hex(8), held is not None and held.is_whole), error, group, stage)
    if all(is_connected for _, is_connected in answers):
        return
    # A name of its own, for gloo would find addresses of before, in the store that all ranks have: torch
    # names groups, and where they keep things, by how many a rank is in, which may not be as many on all.
    store = dist.PrefixStore(f"zerofp4/{answers[0][0]}", dist.group.WORLD.get_group_store())
    with Stage(stage, group):
        _connections[group] = _Connection(dist.ProcessGroupGloo(store, rank, size, options))


def _gloo_options(seconds: float) -> Any:
    """As torch makes them. Raises RuntimeError where gloo cannot listen."""
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=seconds)
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    if names:
        options._devices = [gloo.create_device(interface=name) for name in names.split(",")]
    else:
        options._devices = [gloo.create_default_device()]
    return options


def reduce_max_on_host(vector: torch.Tensor, group: dist.ProcessGroup, stage: str) -> None:
    """MAX all-reduce in place of a tensor on the CPU, in a group that connect_on_host() was called with.
    stage: what a CollectiveError calls it.
    """
    if dist.get_world_size(group) == 1:
        return
    connection = _connections.get(group)
    with Stage(stage, group):
        if connection is None:  # the group has a backend for it
            dist.all_reduce(vector, dist.ReduceOp.MAX, group=group)
            return
        try:
            connection.gloo.allreduce(vector, dist.ReduceOp.MAX).wait()
        except RuntimeError:
            connection.is_whole = False
            raise
