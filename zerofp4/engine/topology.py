"""Topology: which ranks are on one host, and whether they can share memory."""

import itertools
import os
import socket
import weakref
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerofp4.distributed import (
    CollectiveError,
    GroupReference,
    attempt,
    exchange,
    rank_and_size,
    timeout_seconds,
)
from zerofp4.engine.peers import Peers
from zerofp4.ops import MAX_PEERS


class Hosts(NamedTuple):
    """The hosts of a process group: consecutive ranks on each, the same number everywhere.

    count, size: how many hosts, and how many ranks on each.
    within: the ranks of this rank's host; None unless a DeviceMesh was given.
    """

    count: int
    size: int
    within: GroupReference | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.count, self.size

    def ranks_of(self, host: int) -> range:
        return range(host * self.size, (host + 1) * self.size)


def find_topology(
    transport: str,
    hosts: Hosts | None,
    group: dist.ProcessGroup | None,
    device: torch.device,
    may_use_hosts: bool = True,
) -> tuple[Peers | None, Hosts | None, str | None]:
    """Let the ranks of each host share memory, if transport allows it and they can. Collective.

    transport: "auto", "collective" or "peer". "auto" groups ranks by host name if no hosts are given;
    may_use_hosts=False turns that off.

    Returns the ranks of this host, if they share memory; the hosts, or None where gradients are added up over
    all ranks at once; and why the ranks of a host share no memory.

    Raises ValueError on every rank if transport is "peer" and ranks cannot share memory.
    """
    rank, size = rank_and_size(group)
    if size == 1:
        return None, None, "a world of one has nobody to share memory with"
    if transport == "collective":
        return None, hosts, "it was asked for"
    locations = exchange(*attempt(locate, device), group, "comparing where ranks run")
    if hosts is None and transport == "auto" and may_use_hosts:
        hosts = find_hosts(locations)
    local = hosts or Hosts(1, size, GroupReference(group))
    found = (find_obstacle(locations, local.ranks_of(h), local.within is None) for h in range(local.count))
    peers, obstacle = None, next(filter(None, found), None)
    if obstacle is None:
        peers, error = attempt(_share_on_host, local, rank, group, device)
        try:  # a system may keep processes from each other's memory, as containers do
            exchange(None, error, group, "sharing memory")
        except CollectiveError:  # no rank is left that would wait
            raise
        except RuntimeError as failure:
            peers, obstacle = None, str(failure)
    if transport == "peer" and obstacle is not None:
        raise ValueError(f'transport="peer" cannot be: {obstacle}; "collective" works everywhere')
    return peers, hosts, obstacle


class Location(NamedTuple):
    """Where a rank runs.

    reachable: the indices of the GPUs whose memory its own can access.
    obstacle: what keeps this rank from sharing memory, whatever the others are.
    groups: how many process groups it is in.
    rendezvous_count: that of Peers.
    """

    host: str
    index: int
    reachable: list[int]
    obstacle: str | None
    groups: int = 1
    rendezvous_count: int = 0


def locate(device: torch.device) -> Location:
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    groups = len(dist.distributed_c10d._world.pg_names)
    if device.type != "cuda":
        obstacle = f"the parameters are on {device}, and only GPUs read each other's memory"
        return Location(host, -1, [], obstacle, groups)
    from torch.distributed._symmetric_memory import get_backend

    index = torch.cuda.current_device() if device.index is None else device.index
    is_shared = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"  # as torch has it
    reachable = [
        other
        for other in range(torch.cuda.device_count())
        if (is_shared if other == index else torch.cuda.can_device_access_peer(index, other))
    ]
    backend = get_backend(device)
    obstacle = f"the backend of torch's symmetric memory is {backend!r}" if backend != "CUDA" else None
    return Location(host, index, reachable, obstacle, groups, Peers.rendezvous_count)


def find_hosts(locations: Sequence[Location]) -> Hosts | None:
    """None for one host, for one rank on each, and unless each host has as many ranks, consecutive ones."""
    runs = [len(list(run)) for _, run in itertools.groupby(locations, key=lambda location: location.host)]
    is_regular = len(set(runs)) == 1 and len({location.host for location in locations}) == len(runs)
    return Hosts(len(runs), runs[0]) if is_regular and len(runs) > 1 and runs[0] > 1 else None


_EQUAL = {
    "host": "the host",
    "rendezvous_count": "how often they have shared memory: build first what all share",
    "groups": "how many process groups they are in: give Communication(hosts=) a mesh",
}
"""By field of Location, in what the ranks of a host must not differ. torch tells exchanges of memory apart by
their number, and names a group of some ranks by how many groups these are in: ranks that differ would wait
for each other until the timeout.
"""


def find_obstacle(locations: Sequence[Location], ranks: range, makes_group: bool = False) -> str | None:
    """Why these ranks cannot share memory.

    locations: of all ranks.
    makes_group: whether torch is to make a process group of these ranks alone.
    """
    if len(ranks) > MAX_PEERS:
        return f"{len(ranks)} ranks are more than {MAX_PEERS}"
    first = ranks[0]
    for rank in ranks:
        if locations[rank].obstacle is not None:
            return f"on rank {rank}: {locations[rank].obstacle}"
        for field, what in _EQUAL.items():
            values = [getattr(locations[each], field) for each in (first, rank)]
            if values[0] != values[1] and (makes_group or field != "groups"):
                return f"ranks {first} and {rank} differ ({values[0]} and {values[1]}) in {what}"
    for rank, other in itertools.permutations(ranks, 2):
        mine, theirs = locations[rank], locations[other]
        if theirs.index not in mine.reachable:
            return (
                f"cuda:{mine.index} of rank {rank} cannot access the memory of cuda:{theirs.index} of rank "
                f"{other} (each rank needs another GPU, and has to see those of all)"
            )
    return None


_groups_of_hosts: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""By the default process group: those of some of its ranks on this host, made once for all optimizers."""


def _share_on_host(hosts: Hosts, rank: int, group: dist.ProcessGroup, device: torch.device) -> Peers:
    """The ranks of this rank's host. Raises RuntimeError if they cannot share memory, or if the group of this
    host has them in another order.
    """
    everyone, seconds = dist.get_process_group_ranks(group), timeout_seconds(group, device)
    named = tuple(everyone[r] for r in hosts.ranks_of(rank // hosts.size))
    if hosts.within is not None:
        within = hosts.within()
    else:
        made = _groups_of_hosts.setdefault(dist.group.WORLD, {})
        key = named, dist.get_backend_config(group), seconds
        if key not in made:
            # Only this host's ranks call this, so the group must not synchronize with the world.
            made[key] = dist.new_group(
                named, timedelta(seconds=seconds), key[1], use_local_synchronization=True
            )
        within = made[key]
    if tuple(dist.get_process_group_ranks(within)) != named:
        raise RuntimeError(f"the group of this host does not have global ranks {named} in this order")
    return Peers(within, device)
