"""What the ranks of a group tell each other without their devices."""

import secrets
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zerofp4.distributed.agreement import exchange
from zerofp4.distributed.collectives import rank_and_size, timeout_seconds
from zerofp4.distributed.stage import Stage

_connected: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()
"""ProcessGroupGloo, by groups that have no backend for tensors on the CPU; closed with them."""


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Whether tensors on the CPU can be reduced in it."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True


def connect_on_host(group: dist.ProcessGroup, device: torch.device) -> None:
    """Collective. Has gloo connect the ranks of a group that has no backend for tensors on the CPU, once.

    device: whose tensors the group reduces; its timeout for them is that of gloo too.
    """
    rank, size = rank_and_size(group)
    if size == 1 or has_cpu_backend(group) or group in _connected:
        return
    # dist.new_group(use_local_synchronization=True) names a group by how many a rank is in, and waits for one
    # that never comes where the ranks are not in as many; a name that was there before has its addresses.
    stage = "connecting on the host"
    name = exchange(secrets.token_hex(8), None, group, stage)[0]
    store = dist.PrefixStore(f"zerofp4/{name}", group.get_group_store())
    timeout = timedelta(seconds=timeout_seconds(group, device))
    with Stage(stage, group):
        _connected[group] = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def reduce_max_on_host(vector: torch.Tensor, group: dist.ProcessGroup, stage: str) -> None:
    """MAX all-reduce in place of a tensor on the CPU, in a group that connect_on_host() was called with.
    stage: what a CollectiveError calls it.
    """
    if dist.get_world_size(group) == 1:
        return
    with Stage(stage, group):
        if has_cpu_backend(group):
            dist.all_reduce(vector, dist.ReduceOp.MAX, group=group)
        else:
            _connected[group].allreduce(vector, dist.ReduceOp.MAX).wait()
