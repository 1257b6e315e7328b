"""Maxima in the host's memory, in groups that reduce only what is on a GPU."""

from __future__ import annotations

import contextlib
import gc
import weakref
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from distributed.run import on_ranks
from zerofp4.distributed import CollectiveError, connect_on_host, on_host, reduce_max_on_host


@contextlib.contextmanager
def only_for_gpus():
    """Groups of gloo are taken for those of NCCL, which these tests have on GPUs."""
    with mock.patch.object(on_host, "has_cpu_backend", lambda group: False):
        yield


def maximum_of(world, group: dist.ProcessGroup) -> list[int]:
    vector = torch.tensor([world.rank, -world.rank], dtype=torch.int32)
    reduce_max_on_host(vector, group, "comparing ranks")
    return vector.tolist()


@on_ranks(1, 2, 3)
def test_ranks_that_are_in_different_numbers_of_groups(world):
    alone = dist.new_group([0], use_local_synchronization=True) if world.rank == 0 else None
    with only_for_gpus():
        for group in (dist.group.WORLD, dist.new_group()):
            connect_on_host(group, world.device)
            for _ in range(2):
                assert maximum_of(world, group) == [world.world_size - 1, 0]
    if alone is not None:
        dist.destroy_process_group(alone)


@on_ranks(2)
def test_connections_are_made_once_and_closed_with_their_group(world):
    group = dist.new_group()
    with only_for_gpus():
        connect_on_host(group, world.device)
        connected = weakref.ref(on_host._connected[group])
        connect_on_host(group, world.device)
        assert on_host._connected[group] is connected()
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert connected() is None


@on_ranks(2)
def test_a_group_with_a_backend_for_the_cpu_connects_no_more(world):
    group = dist.new_group(backend="gloo")
    connect_on_host(group, world.device)
    assert group not in on_host._connected
    assert maximum_of(world, group) == [1, 0]


@on_ranks(2)
def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_group_says(world):
    group = dist.new_group(timeout=timedelta(seconds=2))
    with only_for_gpus():
        connect_on_host(group, world.device)
        if world.rank == 0:
            with pytest.raises(CollectiveError, match="comparing ranks failed on rank 0 of 2"):
                maximum_of(world, group)
