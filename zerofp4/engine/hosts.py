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
from zerofp4.engine.collective import Turns, check_gradients, gather_by_collective
from zerofp4.engine.flat import FlatBuffer
from zerofp4.engine.peer import shared_gradients
from zerofp4.engine.peers import Peers, find_obstacle, seat_of
from zerofp4.engine.transport import Arrived, Gradients
from zerofp4.engine.wire import Wire
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


class HostTransport:
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
        self.buckets, self._wire, self._peers, self._across = buckets, wire, peers, hosts.across
        self.dtypes = [torch.float32] * len(buckets)
        self._read_as = [wire.dtype_of(bucket.parameters) for bucket in buckets]
        self._host, count = rank_and_size(hosts.across())
        local, local_count = rank_and_size(hosts.within())
        # The ranks of this host agree on an error; those of the others hear of it here.
        self._own, error = attempt(shared_gradients, buckets, self._read_as, wire, peers)
        exchange(None, error, group, "sharing memory")
        layouts = [((count, bucket.slice_numel), torch.float32) for bucket in buckets]
        means, received = (Turns(layouts, buckets[0].device) for _ in range(2))
        self._means = [means.next(*layout) for layout in layouts]
        self._received = [received.next(*layout) for layout in layouts]
        self._rows = [[peers.rows_like(row) for row in own.flat[local::local_count]] for own in self._own]
        # With its means each host sends whether one of its ranks did not come, so that they are of no use.
        self._failed_there = torch.zeros(count, 1, dtype=torch.float32, device=buckets[0].device)
        self._sent: dict[int, tuple[list[Pending], OwnError]] = {}

    def is_local(self, b: int) -> bool:
        return False

    def check(self, b: int, gradients: Gradients, names: Sequence[str]) -> None:
        check_gradients(self.buckets[b], self._read_as[b], self._own[b], gradients, names, self._wire)

    def prepare(self, gradients: Gradients) -> Gradients:
        for own in self._own:
            own.take(gradients)
        return gradients

    def begin(self) -> None:
        for works, _ in self._sent.values():  # of a step that was left in the middle
            for work in works:
                work.wait()
        self._sent.clear()
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

    def _wait(self, b: int) -> None:
        works, error = self._sent.pop(b)
        for work in works:
            work.wait()
        failed = self._peers.failed
        torch.maximum(failed, self._failed_there.amax(), out=failed)
        error.raise_if_any()

    def discard(self, b: int) -> None:
        error = OwnError()
        with error:
            self._wait(b)
        error.take()

    def can_add_in_update(self, b: int) -> bool:
        return True

    def arrived(self, b: int, gradients: Gradients) -> Arrived:
        self._wait(b)
        own = self.buckets[b].own_views(self._means[b][self._host])
        return Arrived(own, RankGradients(self._received[b], self.buckets[b].masters, self._host))

    def average(
        self,
        b: int,
        gradients: Gradients,
        squares: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> None:
        self._wait(b)
        own, out = self._means[b][self._host], self.buckets[b].gradients if out is None else out
        ops.average(self._received[b], out, own, self._host, squares)

    def end(self) -> None:
        """Nothing: the means were sent behind the barrier of each host."""

    def open_weights(self) -> None:
        """Nothing: a gather waits for what is queued on each rank."""

    def halfway(self, b: int) -> None:
        return None

    def gather(self, b: int) -> Pending | None:
        return gather_by_collective(self.buckets[b])

    def nbytes_sent(self, b: int) -> int:
        return (len(self._failed_there) - 1) * self.buckets[b].slice_numel * torch.float32.itemsize
