"""Maxima in the host's memory, in groups that reduce only what is on a GPU."""

from __future__ import annotations

import contextlib
import gc
import os
import time
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
    alone = dist.new_group([0])  # of which rank 0 alone counts one more
    with only_for_gpus():
        for group in (dist.group.WORLD, dist.new_group()):
            connect_on_host(group, world.device)
            for _ in range(2):
                assert maximum_of(world, group) == [world.world_size - 1, 0]
    if world.rank == 0:
        dist.destroy_process_group(alone)


@on_ranks(2)
def test_a_group_that_keeps_things_in_other_places_on_other_ranks(world):
    """As one of split_group() does, where the ranks are in different numbers of groups."""
    group, store_of = dist.new_group(), dist.ProcessGroup.get_group_store

    def store(one: dist.ProcessGroup) -> dist.Store:
        return dist.PrefixStore(str(world.rank), store_of(one)) if one is group else store_of(one)

    with only_for_gpus(), mock.patch.object(dist.ProcessGroup, "get_group_store", store):
        connect_on_host(group, world.device)
        assert maximum_of(world, group) == [1, 0]


@on_ranks(2, 3)
def test_connections_are_made_once(world):
    """And anew where a rank has none, whose address of before the others must not take."""
    group, store_of = dist.new_group(timeout=timedelta(seconds=20)), dist.PrefixStore

    def late(*args) -> dist.Store:
        time.sleep(0.5)
        return store_of(*args)

    with only_for_gpus():
        connect_on_host(group, world.device)
        first = on_host._connections[group]
        connect_on_host(group, world.device)
        assert on_host._connections[group] is first
        if world.rank == 1:  # as where it failed to connect, and the others did not
            del on_host._connections[group]
        with mock.patch.object(dist, "PrefixStore", late if world.rank == 1 else dist.PrefixStore):
            connect_on_host(group, world.device)
        assert on_host._connections[group] is not first
        assert maximum_of(world, group) == [world.world_size - 1, 0]


@on_ranks(2)
def test_connections_are_closed_with_their_group(world):
    group = dist.new_group()
    with only_for_gpus():
        connect_on_host(group, world.device)
    connected = weakref.ref(on_host._connections[group])
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert connected() is None


@on_ranks(2)
def test_a_group_with_a_backend_for_the_cpu_connects_no_more(world):
    group = dist.new_group(backend="gloo")
    connect_on_host(group, world.device)
    assert group not in on_host._connections
    assert maximum_of(world, group) == [1, 0]


@on_ranks(2, 3)
def test_what_keeps_one_rank_from_it_all_raise(world):
    group = dist.new_group()
    places = {"GLOO_SOCKET_IFNAME": "nothing0"} if world.rank == 1 else {}
    with only_for_gpus():
        with mock.patch.dict(os.environ, places), pytest.raises(RuntimeError, match=r"rank 1: .*nothing0"):
            connect_on_host(group, world.device)
        assert group not in on_host._connections
        connect_on_host(group, world.device)
        assert maximum_of(world, group) == [world.world_size - 1, 0]


@on_ranks(2)
def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_group_says(world):
    # Of gloo on GPUs too: with NCCL a rank that is as late on a busy machine would end the process.
    group, device = dist.new_group(backend="gloo", timeout=timedelta(seconds=2)), torch.device("cpu")
    with only_for_gpus():
        connect_on_host(group, device)
        if world.rank == 0:
            began = time.monotonic()
            with pytest.raises(CollectiveError, match="comparing ranks failed on rank 0 of 2"):
                maximum_of(world, group)
            assert time.monotonic() - began > 1.5
        dist.barrier()
        connect_on_host(group, device)  # rank 1 has not seen anything fail
        assert maximum_of(world, group) == [1, 0]
