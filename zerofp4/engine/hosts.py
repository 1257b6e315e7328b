"""Transport over several hosts: shared memory inside each host, collectives between hosts."""

from collections.abc import Sequence
from typing import NamedTuple

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
)
from zerofp4.engine.buckets import Wire
from zerofp4.engine.collective import gather_by_collective
from zerofp4.engine.flat import FlatBuffer
from zerofp4.engine.gradient_memory import Gradients, in_turns, shared_memory
from zerofp4.engine.peers import Peers, find_obstacle, seat_of
from zerofp4.engine.transport import Arrived, Transport
from zerofp4.ops import RankGradients


class Hosts(NamedTuple):
    """The hosts of a process group, whose ranks are numbered host by host, as many on each.

    within: the ranks of this rank's host.
    across: the ranks with this rank's number on their host, one of every host.
    """

    within: GroupReference
    across: GroupReference

    @property
    def shape(self) -> tuple[int, int]:
        """Hosts, and ranks of each."""
        return dist.get_world_size(self.across()), dist.get_world_size(self.within())


def join_host(hosts: Hosts, group: dist.ProcessGroup, device: torch.device) -> Peers:
    """The memory that the ranks of this host share. Collective over the ranks of all hosts.

    Raises ValueError, on every rank and before anything is allocated, where those of some host cannot share
    memory.
    """
    size = hosts.shape[1]
    seats = exchange(seat_of(device), None, group, "comparing where ranks run")
    for first in range(0, len(seats), size):
        obstacle = find_obstacle(seats[first : first + size])
        if obstacle is not None:
            raise ValueError(
                f"hosts: ranks {first} to {first + size - 1}, which are one host's, cannot share memory: "
                f"{obstacle} (numbered from 0 on each host)"
            )
    peers, error = attempt(Peers, hosts.within(), device)
    exchange(None, error, group, "sharing memory")
    return peers


class HostTransport(Transport):
    """Gradients are averaged over the ranks of each host first, then these means over the hosts, in FP32: of
    2 x 2 ranks ((g0 + g1) / 2 + (g2 + g3) / 2) / 2. Weights travel by an all-gather.

    What rank l of every host owns is averaged on a host by its rank l, which reads the gradients of the
    others where they lie. These means are sent to their owners: 4 bytes an element of a slice from each other
    host, however many ranks a host has.

    buckets: of all ranks of all hosts.
    group: all ranks.
    wire: the dtype in which gradients are read on a host.
    peers: the ranks of this host.
    """

    def __init__(
        self,
        buckets: Sequence[FlatBuffer],
        group: dist.ProcessGroup,
        wire: Wire,
        peers: Peers,
        hosts: Hosts,
    ):
        self.buckets, self.wire, self._peers, self._across = buckets, wire, peers, hosts.across
        self.dtypes, self.adds_in_update = [torch.float32] * len(buckets), [True] * len(buckets)
        self._host, count = rank_and_size(hosts.across())
        self.senders = [count] * len(buckets)
        local, local_count = rank_and_size(hosts.within())
        # The ranks of this host agree on an error; those of the others hear of it here.
        self.memory, error = attempt(shared_memory, buckets, wire, peers)
        exchange(None, error, group, "sharing memory")
        self._rows = [[peers.rows_like(row) for row in own.flat[local::local_count]] for own in self.memory]
        """By bucket and host, the gradients of this host's ranks for the slice that rank l of that host owns.
        """
        device = buckets[0].device
        layouts = [((2, count, bucket.slice_numel), torch.float32) for bucket in buckets]
        pairs = in_turns(layouts, device)
        self._means = [means for means, _ in pairs]
        """By bucket, [hosts, slice_numel]: the means of this host's gradients for the owner on each host."""
        self._received = [received for _, received in pairs]
        """The same of each host, for this rank."""
        self._own_views = [b.own_views(m[self._host]) for b, m in zip(buckets, self._means, strict=True)]
        self._failed_there = torch.zeros(count, 1, dtype=torch.float32, device=device)
        """By host, 1 where one of its ranks did not come, so that its means are of no use."""
        self._sent: dict[int, tuple[list[Pending], OwnError]] = {}
        """By bucket, what is on its way, and what went wrong on this rank before it was sent."""

    def prepare(self, gradients: Gradients) -> Gradients:
        for memory in self.memory:
            memory.take(gradients)
        return gradients

    # Gradients

    def begin(self) -> None:
        for b in list(self._sent):  # of a step that was left in the middle, in the same memory
            self.discard(b)
        self._peers.arrive()

    def send_gradients(self, b: int, gradients: Gradients | None) -> None:
        error = OwnError()
        with error:
            for rows, mean in zip(self._rows[b], self._means[b], strict=True):
                ops.average_rows(rows, mean)
        if b + 1 == len(self.buckets):
            self._peers.arrive()  # the ranks of this host have read all rows
        failed = self._peers.failed.view(1)
        sent = [[mean, failed] for mean in self._means[b]]
        received = [list(pair) for pair in zip(self._received[b], self._failed_there, strict=True)]
        works = start_exchange(received, sent, self._across(), "averaging gradients over hosts")
        self._sent[b] = works, error

    def _wait(self, b: int) -> OwnError:
        works, error = self._sent.pop(b)
        for work in works:
            work.wait()
        failed = self._peers.failed
        torch.maximum(failed, self._failed_there.amax(), out=failed)
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
