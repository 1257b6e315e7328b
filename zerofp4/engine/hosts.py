"""Transport over several hosts: gradients are averaged on each host first, then between hosts."""

import itertools
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from zerofp4 import ops
from zerofp4.distributed import (
    GroupReference,
    OwnError,
    Pending,
    attempt,
    exchange,
    rank_and_size,
    start_exchange,
    timeout_seconds,
)
from zerofp4.engine.buckets import Wire
from zerofp4.engine.collective import gather_by_collective
from zerofp4.engine.flat import FlatBuffer
from zerofp4.engine.gradient_memory import (
    GradientMemory,
    Gradients,
    in_turns,
    private_memory,
    shared_memory,
)
from zerofp4.engine.peers import Peers, Seat, find_obstacle, seat_of, try_to_share
from zerofp4.engine.transport import Arrived, Transport
from zerofp4.ops import RankGradients

# What a group can do


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

    def position(self, rank: int) -> tuple[int, int]:
        """The host of a rank, and its local rank there."""
        return divmod(rank, self.size)

    def ranks_of(self, host: int) -> range:
        return range(host * self.size, (host + 1) * self.size)


class Ways(NamedTuple):
    """What the ranks of a group can use.

    peers: the ranks of this host, if they share memory.
    hosts: None where gradients are added up over all ranks at once.
    why_collective: why the ranks of a host share no memory.
    """

    peers: Peers | None
    hosts: Hosts | None
    why_collective: str | None


def find_ways(
    transport: str,
    hosts: Hosts | None,
    group: dist.ProcessGroup | None,
    device: torch.device,
    may_use_hosts: bool = True,
) -> Ways:
    """Let the ranks of each host share memory, if transport allows it and they can. Collective.

    transport: "auto", "collective" or "peer". "auto" groups ranks by host name if no hosts are given;
    may_use_hosts=False turns that off.

    Raises ValueError on every rank if transport is "peer" and ranks cannot share memory.
    """
    rank, size = rank_and_size(group)
    if size == 1:
        return Ways(None, None, "a world of one has nobody to share memory with")
    if transport == "collective":
        return Ways(None, hosts, "it was asked for")
    seats = exchange(*attempt(seat_of, device), group, "comparing where ranks run")
    if hosts is None and transport == "auto" and may_use_hosts:
        hosts = hosts_of(seats)
    local = hosts or Hosts(1, size, GroupReference(group))
    own = local.ranks_of(local.position(rank)[0])
    found = [find_obstacle(seats, local.ranks_of(host)) for host in range(local.count)]
    if local.within is None:
        found += [_find_group_obstacle(seats, local.ranks_of(host)) for host in range(local.count)]
    peers, obstacle = None, next(filter(None, found), None)
    if obstacle is None:
        peers, obstacle = try_to_share(lambda: _share(local, own, group, device), group)
    if transport == "peer" and obstacle is not None:
        raise ValueError(f'transport="peer" cannot be: {obstacle}; "collective" works everywhere')
    return Ways(peers, hosts, obstacle)


def hosts_of(seats: Sequence[Seat]) -> Hosts | None:
    """None for one host, for one rank on each, and unless each host has as many ranks, consecutive ones."""
    runs = [len(list(run)) for _, run in itertools.groupby(seats, key=lambda seat: seat.host)]
    is_regular = len(set(runs)) == 1 and len({seat.host for seat in seats}) == len(runs)
    return Hosts(len(runs), runs[0]) if is_regular and len(runs) > 1 and runs[0] > 1 else None


def _find_group_obstacle(seats: Sequence[Seat], ranks: range) -> str | None:
    """Why torch cannot make a group of these ranks alone, or None. It names such a group by the number of
    groups that a rank is in, and ranks that use different names wait for each other until the timeout.
    """
    first = ranks[0]
    other = next((rank for rank in ranks if seats[rank].groups != seats[first].groups), None)
    if other is None:
        return None
    return (
        f"ranks {first} and {other} of a host are in {seats[first].groups} and {seats[other].groups} process "
        "groups, so torch cannot make one of that host: give Communication(hosts=) a mesh"
    )


_groups_of_hosts: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""By the default process group: those of some of its ranks on this host, made once for all optimizers."""


def _share(hosts: Hosts, ranks: range, group: dist.ProcessGroup, device: torch.device) -> Peers:
    """The memory of this host's ranks. Raises RuntimeError if their group has another order."""
    everyone, seconds = dist.get_process_group_ranks(group), timeout_seconds(group, device)
    named = tuple(everyone[rank] for rank in ranks)
    if hosts.within is not None:
        within = hosts.within()
    else:
        made = _groups_of_hosts.setdefault(dist.group.WORLD, {})
        key = named, dist.get_backend(group), seconds
        if key not in made:
            # Only this host's ranks call this, so the group must not synchronize with the world.
            made[key] = dist.new_group(
                named, timedelta(seconds=seconds), key[1], use_local_synchronization=True
            )
        within = made[key]
    if tuple(dist.get_process_group_ranks(within)) != named:
        raise RuntimeError(f"the group of this host does not have global ranks {named} in this order")
    return Peers(within, device)


# Means of a host


class HostMeans(Protocol):
    """Averages the gradients of this host's ranks, for the owners on all hosts."""

    memory: Sequence[GradientMemory]
    """By bucket, this rank's own gradients."""

    def prepare(self, gradients: Gradients) -> None:
        """As Transport.prepare()."""

    def begin(self) -> None:
        """As Transport.begin()."""

    def average(self, b: int, gradients: Gradients | None, means: torch.Tensor) -> OwnError:
        """Fill means [hosts, slice_numel] of bucket b. Collective on this host."""

    def flags(self, host: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What is sent to a host, and received from it, beside the means."""

    def heed_flags(self) -> None:
        """The flags of all hosts have arrived."""


class SharedRows(HostMeans):
    """Ranks of a host read each other's gradients in shared memory. Collective to build."""

    def __init__(
        self, buckets: Sequence[FlatBuffer], group: dist.ProcessGroup, wire: Wire, hosts: Hosts, peers: Peers
    ):
        self._peers, self._last = peers, len(buckets) - 1
        # The ranks of this host agree on an error; this exchange tells the other hosts.
        self.memory, error = attempt(shared_memory, buckets, wire, peers)
        exchange(None, error, group, "sharing memory")
        self._rows = [
            [peers.rows_like(row) for row in own.flat[peers.rank :: peers.size]] for own in self.memory
        ]
        """By bucket and host, the gradients of this host's ranks for the owner on that host."""
        self._failed_there = torch.zeros(hosts.count, 1, dtype=torch.float32, device=peers.device)
        """By host, 1 if one of its ranks did not come to a barrier, so that its means are of no use."""

    def prepare(self, gradients: Gradients) -> None:
        for memory in self.memory:
            memory.take(gradients)

    def begin(self) -> None:
        self._peers.arrive()

    def average(self, b: int, gradients: Gradients | None, means: torch.Tensor) -> OwnError:
        error = OwnError()
        with error:
            for rows, mean in zip(self._rows[b], means, strict=True):
                ops.average_rows(rows, mean)
        if b == self._last:
            self._peers.arrive()  # the ranks of this host have read all rows
        return error

    def flags(self, host: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return [self._peers.failed.view(1)], [self._failed_there[host]]

    def heed_flags(self) -> None:
        failed = self._peers.failed
        torch.maximum(failed, self._failed_there.amax(), out=failed)


class SentRows(HostMeans):
    """Ranks of a host send each other their gradients, and wait for them before the means leave."""

    def __init__(self, buckets: Sequence[FlatBuffer], group: dist.ProcessGroup, wire: Wire, hosts: Hosts):
        self._group, self._size = GroupReference(group), hosts.size
        host, self._local = hosts.position(dist.get_rank(group))
        self._neighbours = hosts.ranks_of(host)
        self.memory = private_memory(buckets, wire, buckets[0].device, count=1)
        layouts = [((*hosts.shape, b.slice_numel), wire.dtype_of(b.parameters)) for b in buckets]
        self._received = in_turns(layouts, buckets[0].device, count=1)
        """By bucket, [hosts, ranks of this host, slice_numel]."""

    def prepare(self, gradients: Gradients) -> None:
        pass

    def begin(self) -> None:
        pass

    def average(self, b: int, gradients: Gradients | None, means: torch.Tensor) -> OwnError:
        error, own, received = OwnError(), self.memory[b], self._received[b]
        if gradients is not None:
            with error:  # the others wait for this rank's rows, whatever they hold
                own.take(gradients)
        messages_in, messages_out = ([[] for _ in range(own.flat.shape[0])] for _ in range(2))
        for local, rank in enumerate(self._neighbours):
            messages_in[rank] = list(received[:, local])
            messages_out[rank] = list(own.flat[local :: self._size])
        for work in start_exchange(messages_in, messages_out, self._group(), "averaging gradients on a host"):
            work.wait()
        for rows, mine, mean in zip(received, own.flat[self._local :: self._size], means, strict=True):
            ops.average(rows, mean, mine, self._local)
        return error

    def flags(self, host: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return [], []

    def heed_flags(self) -> None:
        pass


class HostTransport(Transport):
    """Gradients are averaged over the ranks of each host first, then these means over the hosts, in FP32: of
    2 x 2 ranks ((g0 + g1) / 2 + (g2 + g3) / 2) / 2. Weights travel by an all-gather.

    A rank averages, of its host's gradients, what the ranks with its local rank own on all hosts. These means
    are sent to their owners: 4 bytes an element of a slice from each other host, however many ranks it has.

    buckets: of all ranks of all hosts.
    group: all ranks.
    wire: the dtype in which gradients are read or sent on a host.
    peers: the ranks of this host, if they share memory.
    """

    def __init__(
        self,
        buckets: Sequence[FlatBuffer],
        group: dist.ProcessGroup,
        wire: Wire,
        hosts: Hosts,
        peers: Peers | None,
    ):
        self.buckets, self.wire, self._group = buckets, wire, GroupReference(group)
        self.dtypes, self.adds_in_update = [torch.float32] * len(buckets), [True] * len(buckets)
        self._host, local = hosts.position(dist.get_rank(group))
        self._across = [h * hosts.size + local for h in range(hosts.count)]
        """By host, its rank with this rank's local rank."""
        self._on_host: HostMeans
        if peers is None:
            self._on_host = SentRows(buckets, group, wire, hosts)
        else:
            self._on_host = SharedRows(buckets, group, wire, hosts, peers)
        self.memory = self._on_host.memory
        on_host = [(hosts.size - 1) * hosts.count * own.flat.itemsize for own in self.memory]
        between = 4 * (hosts.count - 1)
        self.sent_bytes = [b.slice_numel * (n + between) for b, n in zip(buckets, on_host, strict=True)]
        device = buckets[0].device
        layouts = [((2, hosts.count, bucket.slice_numel), torch.float32) for bucket in buckets]
        pairs = in_turns(layouts, device)
        self._means = [means for means, _ in pairs]
        """By bucket, [hosts, slice_numel]: the means of this host's gradients for the owner on each host."""
        self._received = [received for _, received in pairs]
        """The same of each host, for this rank."""
        self._own_views = [b.own_views(m[self._host]) for b, m in zip(buckets, self._means, strict=True)]
        self._sent: dict[int, tuple[list[Pending], OwnError]] = {}
        """By bucket, what is on its way, and what went wrong on this rank before it was sent."""

    def prepare(self, gradients: Gradients) -> Gradients:
        self._on_host.prepare(gradients)
        return gradients

    # Gradients

    def begin(self) -> None:
        for b in list(self._sent):  # of a step that was left in the middle, in the same memory
            self.discard(b)
        self._on_host.begin()

    def send_gradients(self, b: int, gradients: Gradients | None) -> None:
        error = self._on_host.average(b, gradients, self._means[b])
        received, sent = ([[] for _ in range(self.buckets[b].world_size)] for _ in range(2))
        for host, rank in enumerate(self._across):
            own_flags, their_flags = self._on_host.flags(host)
            sent[rank] = [self._means[b][host], *own_flags]
            received[rank] = [self._received[b][host], *their_flags]
        works = start_exchange(received, sent, self._group(), "averaging gradients over hosts")
        self._sent[b] = works, error

    def _wait(self, b: int) -> OwnError:
        works, error = self._sent.pop(b)
        for work in works:
            work.wait()
        self._on_host.heed_flags()
        return error

    def discard(self, b: int) -> None:
        self._wait(b).take()

    def arrived(self, b: int, gradients: Gradients) -> Arrived:
        self._wait(b).raise_if_any()
        rows = RankGradients(self._received[b], self.buckets[b].masters, self._host)
        return Arrived(self._own_views[b], rows)

    def average(self, b: int, gradients: Gradients, squares: torch.Tensor | None = None) -> None:
        self._wait(b).raise_if_any()
        own = self._means[b][self._host]
        ops.average(self._received[b], self.buckets[b].gradients, own, self._host, squares)

    def gather(self, b: int) -> Pending | None:
        return gather_by_collective(self.buckets[b])
