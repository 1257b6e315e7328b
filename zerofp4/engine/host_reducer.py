"""Gradients of several hosts: averaged on each where they are, so that only means travel between them."""

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
from zerofp4.engine.exchange import GradientReducer
from zerofp4.engine.flat import FlatBuffer
from zerofp4.engine.gradients import FlatGradients
from zerofp4.engine.peer_reducer import shared_sources, take_all
from zerofp4.engine.peers import Peers, find_obstacle, seat_of
from zerofp4.engine.stretches import Stretch, Turns
from zerofp4.engine.wire import Wire
from zerofp4.ops import PeerRows


class Hosts(NamedTuple):
    """The hosts of a group, whose ranks are numbered host by host, as many on each.

    within: the ranks of this rank's host. across: those with its number there, one of every host.
    """

    within: GroupReference
    across: GroupReference

    @property
    def shape(self) -> tuple[int, int]:
        """Hosts, and ranks of each."""
        return dist.get_world_size(self.across()), dist.get_world_size(self.within())


def join_host(hosts: Hosts, group: dist.ProcessGroup, device: torch.device) -> Peers:
    """Collective over the ranks of all hosts: the memory that those of this one share.

    Raises ValueError, on every rank and before anything is allocated, where those of some host cannot.
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


class HostReducer(GradientReducer):
    """GradientReducer that averages over the ranks of each host first, and these means over the hosts, in
    FP32: of 2 x 2 ranks ((g0 + g1) / 2 + (g2 + g3) / 2) / 2.

    What rank l of every host owns is averaged on a host by its rank l, which reads the gradients of the
    others where they are; these means travel to their owners, 4 bytes an element of a slice from each other
    host, however many ranks a host has.

    peers: of this host. Behind begin() the device waits until they have come, and what is queued behind the
    last bucket until they have read all.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        group: dist.ProcessGroup | None,
        wire: Wire,
        peers: Peers,
        hosts: Hosts,
    ):
        self._peers, self._across = peers, hosts.across
        self._host, self._host_count = rank_and_size(hosts.across())
        self._local, self._local_count = rank_and_size(hosts.within())
        super().__init__(buffers, group, wire)
        self.dtypes = [torch.float32] * len(buffers)
        self._errors = [OwnError() for _ in buffers]

    def _make_sources(self) -> list[FlatGradients]:
        arguments = self.buffers, self.dtypes, self._wire, self._places, self._peers
        sources, error = attempt(shared_sources, *arguments)  # the ranks of this host have agreed, no others
        exchange(None, error, self.group(), "sharing memory")
        return sources

    def _make_stretches(self) -> None:
        """here, received: [hosts, n] float32, of means over the ranks of one host."""
        parts = self._parts()
        layouts = [((self._host_count, part.shape[1]), torch.float32) for own in parts for part in own]
        sent, received = (Turns(layouts, self.device, self._turns) for _ in range(2))
        self._rows: list[list[PeerRows]] = []
        # With its means each host sends whether one of its ranks did not come: then they are of no use.
        self._failed_there = torch.zeros(self._host_count, 1, dtype=torch.float32, device=self.device)
        failed = [self._peers.failed.view(1)] * self._host_count
        for source, buffer, own in zip(self._sources, self.buffers, parts, strict=True):
            for number, part in enumerate(own):
                layout = (self._host_count, part.shape[1]), torch.float32
                rows = sent.next(*layout), received.next(*layout)
                sides = zip(rows, (failed, self._failed_there), strict=True)
                messages = [list(map(list, zip(means, words, strict=True))) for means, words in sides]
                self._stretches.append(Stretch(source, buffer, number * own[0].shape[1], *rows, *messages))
                of_this_number = part[self._local :: self._local_count]  # what its rank of each host owns
                self._rows.append([self._peers.rows_like(row) for row in of_this_number])
            self._ends.append(len(self._stretches))

    def _own_views(self) -> list[dict[int, torch.Tensor]]:
        return [self._views_of(b) for b in range(len(self.buffers))]

    def _views_of(self, b: int) -> dict[int, torch.Tensor]:
        """By the position of the parameter, this host's means of what this rank owns; of a bucket that
        travels in parts nothing, since nobody asks.
        """
        buffer, numbers = self.buffers[b], self._numbers(b)
        if len(numbers) > 1:
            return {}
        views = buffer.own_views(self._stretches[numbers[0]].here[self._host])
        return {i: view for i, view in zip(buffer.indices, views, strict=True) if view is not None}

    def nbytes_sent(self, b: int) -> int:
        return (self._host_count - 1) * self.buffers[b].slice_numel * torch.float32.itemsize

    def prepare(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        for source in self._sources:
            source.take(gradients)
        return gradients

    def begin(self, gradients: Sequence[torch.Tensor | None], prepared: bool = False) -> None:
        self._errors = take_all(self._sources, None if prepared else gradients)
        self._peers.arrive()
        super().begin(gradients)

    def _fill(self, number: int) -> None:
        """With the means of this host; behind the last ones its ranks have read all rows."""
        try:
            for rows, mean in zip(self._rows[number], self._stretches[number].here, strict=True):
                ops.average_rows(rows, mean)
        finally:
            if number + 1 == len(self._stretches):
                self._peers.arrive()
        b = next(b for b, end in enumerate(self._ends) if number < end)
        self._errors[b].raise_if_any()

    def _arrive(self, number: int) -> Stretch:
        stretch = super()._arrive(number)
        failed = self._peers.failed
        torch.maximum(failed, self._failed_there.amax(), out=failed)
        return stretch

    def _row(self, buffer: FlatBuffer) -> int:
        return self._host

    def _send(self, stretch: Stretch) -> list[Pending]:
        return start_exchange(
            stretch.arrivals, stretch.sent, self._across(), "averaging gradients over hosts"
        )
