"""Topology: which ranks are on one host, and whether they can share memory."""

import itertools
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerofp4.distributed import CollectiveError, attempt, exchange, rank_and_size
from zerofp4.engine.peers import Peers
from zerofp4.ops import MAX_PEERS


def host_name() -> str:
    """The name and the boot of this host, or NCCL_HOSTID if it is set: NCCL tells hosts apart by it, too."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    return os.environ.get("NCCL_HOSTID") or name


def find_hosts(names: Sequence[str]) -> tuple[int, int] | None:
    """The numbers of hosts and of ranks on each; None unless each has as many, consecutive ones.

    names: host_name() of each rank.
    """
    runs = [len(list(run)) for _, run in itertools.groupby(names)]
    is_regular = len(set(runs)) == 1 and len(set(names)) == len(runs)
    return (len(runs), runs[0]) if is_regular else None


def find_peers(
    transport: str, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[Peers | None, str | None]:
    """Let the ranks share memory, if transport allows it and they can. Collective.

    transport: "auto", "collective" or "peer".

    Returns the ranks if they share memory, and else why they do not.

    Raises ValueError on every rank if transport is "peer" and ranks cannot share memory.
    """
    if rank_and_size(group)[1] == 1:
        return None, "a world of one has nobody to share memory with"
    if transport == "collective":
        return None, "it was asked for"
    locations = exchange(*attempt(locate, device), group, "comparing where ranks run")
    peers, obstacle = None, find_obstacle(locations)
    if obstacle is None:
        peers, error = attempt(Peers, group, device)
        try:  # a system may keep processes from each other's memory, as containers do
            exchange(None, error, group, "sharing memory")
        except CollectiveError:  # no rank is left that would wait
            raise
        except RuntimeError as failure:
            peers, obstacle = None, str(failure)
    if transport == "peer" and obstacle is not None:
        raise ValueError(f'transport="peer" is not available: {obstacle}; use "collective"')
    return peers, obstacle


class Location(NamedTuple):
    """Where a rank runs.

    host: host_name().
    index: of its GPU; -1 without one.
    reachable: the indices of the GPUs whose memory its own can access.
    obstacle: what keeps this rank from sharing memory, whatever the others are.
    rendezvous_count: that of Peers.
    """

    host: str
    index: int
    reachable: list[int]
    obstacle: str | None
    rendezvous_count: int = 0


def locate(device: torch.device) -> Location:
    if device.type != "cuda":
        obstacle = f"the parameters are on {device}, and only GPUs read each other's memory"
        return Location(host_name(), -1, [], obstacle)
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
    return Location(host_name(), index, reachable, obstacle, Peers.rendezvous_count)


_EQUAL = {
    "host": "the host",
    "rendezvous_count": "how often they have shared memory: build first what all share",
}
"""By field of Location, in what ranks must not differ. torch's rendezvous keys are counters: ranks with
different counts would wait for each other until the timeout.
"""


def find_obstacle(locations: Sequence[Location]) -> str | None:
    """Why these ranks cannot share memory; None if they can. locations: of all ranks."""
    if len(locations) > MAX_PEERS:
        return f"{len(locations)} ranks are more than {MAX_PEERS}"
    for rank, mine in enumerate(locations):
        if mine.obstacle is not None:
            return f"on rank {rank}: {mine.obstacle}"
        for field, what in _EQUAL.items():
            values = [getattr(each, field) for each in (locations[0], mine)]
            if values[0] != values[1]:
                return f"ranks 0 and {rank} differ ({values[0]} and {values[1]}) in {what}"
    for (rank, mine), (other, theirs) in itertools.permutations(enumerate(locations), 2):
        if theirs.index not in mine.reachable:
            return (
                f"cuda:{mine.index} of rank {rank} cannot access the memory of cuda:{theirs.index} of rank "
                f"{other} (each rank needs another GPU, and has to see those of all)"
            )
    return None
