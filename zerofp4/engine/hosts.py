"""Transport over several hosts: gradients are averaged on each host first, then between hosts."""

from collections.abc import Iterable, Sequence

import torch

from zerofp4 import ops
from zerofp4.distributed import OwnError, Pending, attempt, exchange, start_exchange, start_gather
from zerofp4.engine.buckets import Bucket, Gradients, gradient_memory, in_turns, zeros_on
from zerofp4.engine.peers import Peers
from zerofp4.engine.step import Arrived, Transport
from zerofp4.engine.topology import Hosts
from zerofp4.ops import RankGradients


class HostTransport(Transport):
    """Gradients are averaged over the ranks of each host first, then these means over the hosts, in FP32: of
    2 x 2 ranks ((g0 + g1) / 2 + (g2 + g3) / 2) / 2. Weights travel by an all-gather.

    A rank averages, of its host's gradients, what the ranks with its local rank own on all hosts. It reads
    them in the memory that the ranks of its host share, or else these send each other rows. The means are
    sent to their owners: 4 bytes an element of a slice from each other host, however many ranks it has.

    peers: the ranks of this host, if they share memory.
    """

    def __init__(self, buckets: Sequence[Bucket], hosts: Hosts, peers: Peers | None):
        self.buckets, self._peers, self._group = buckets, peers, buckets[0].group
        self.dtypes, self.adds_in_update = [torch.float32] * len(buckets), [True] * len(buckets)
        self._host, self._local = divmod(buckets[0].rank, hosts.size)
        zeros, size, count = zeros_on(buckets[0].device), hosts.size, hosts.count
        layouts = [((2, count, bucket.slice_numel), torch.float32) for bucket in buckets]
        self._means, self._received = zip(*in_turns(layouts, zeros, count=2), strict=True)
        """By bucket, [hosts, slice_numel]: the means of this host's gradients for the owner on each host; and
        those of each host, for this rank.
        """
        self._own_views = [b.own_views(m[self._host]) for b, m in zip(buckets, self._means, strict=True)]

        def by_rank(ranks: Sequence[int], messages: Iterable[Iterable[torch.Tensor]]) -> list:
            found = dict(zip(ranks, map(list, messages), strict=True))
            return [found.get(rank, []) for rank in range(count * size)]

        if peers is None:
            self.memory = gradient_memory(buckets, zeros, count=1)
            layouts = [((count, size, b.slice_numel), b.sent_as) for b in buckets]
            self._rows = in_turns(layouts, zeros, count=1)
            """By bucket, [hosts, ranks of this host, slice_numel]: what the other ranks of this host send."""
            on_host = hosts.ranks_of(self._host)
            self._on_host = [
                (
                    by_rank(on_host, rows.unbind(1)),
                    by_rank(on_host, (memory.flat[local::size] for local in range(size))),
                )
                for rows, memory in zip(self._rows, self.memory, strict=True)
            ]
            """By bucket and rank, the messages inside this host: those that are received, and those sent."""
            failed, failed_there = [], [[]] * count
        else:
            # The ranks of this host agree on an error; this exchange tells the other hosts.
            self.memory, error = attempt(gradient_memory, buckets, peers.zeros)
            exchange(None, error, self._group(), "sharing memory")
            self._shared_rows = [
                [peers.rows_like(row) for row in own.flat[self._local :: size]] for own in self.memory
            ]
            """By bucket and host, the gradients of this host's ranks for the owner on that host."""
            self._failed_there = zeros((count, 1), dtype=torch.float32)
            """By host, 1 if one of its ranks did not come to a barrier, so that its means are of no use."""
            failed, failed_there = [peers.failed.view(1)], [[flag] for flag in self._failed_there]
        across = range(self._local, count * size, size)
        self._between = [
            (
                by_rank(across, ([row, *flag] for row, flag in zip(received, failed_there, strict=True))),
                by_rank(across, ([mean, *failed] for mean in means)),
            )
            for means, received in zip(self._means, self._received, strict=True)
        ]
        """By bucket and rank, the messages between hosts: those that are received, and those sent."""
        self.sent_bytes = [
            b.slice_numel * ((size - 1) * count * b.sent_as.itemsize + 4 * (count - 1)) for b in buckets
        ]
        self._sent: dict[int, Pending] = {}
        """By bucket, what is on its way."""
        self._error = OwnError()
        """What went wrong on this rank as it sent any bucket of the present exchange."""

    def prepare(self, gradients: Gradients, as_sent: bool = False) -> Gradients:
        for memory in self.memory if self._peers is not None else ():
            memory.take(gradients)
        return gradients

    # Gradients

    def begin(self) -> None:
        for b in list(self._sent):  # of a step that was left in the middle, in the same memory
            self.discard(b)
        self._error = OwnError()
        if self._peers is not None:
            self._peers.arrive()

    def send_gradients(self, b: int, gradients: Gradients | None) -> None:
        """Average on this host, and begin to send the means to the other hosts."""
        if self._peers is None:
            self._average_sent(b, gradients)
        else:
            with self._error:
                for rows, mean in zip(self._shared_rows[b], self._means[b], strict=True):
                    ops.average(rows, mean)
            if b + 1 == len(self.buckets):
                self._peers.arrive()  # the ranks of this host have read all rows
        self._sent[b] = start_exchange(*self._between[b], self._group(), "averaging gradients over hosts")

    def _average_sent(self, b: int, gradients: Gradients | None) -> None:
        """Send the other ranks of this host their rows, wait for theirs, and average them."""
        own = self.memory[b]
        if gradients is not None:
            with self._error:  # the others wait for this rank's rows, whatever they hold
                own.take(gradients)
        start_exchange(*self._on_host[b], self._group(), "averaging gradients on a host").wait()
        mine = own.flat[self._local :: self._rows[b].shape[1]]
        for rows, own_row, mean in zip(self._rows[b], mine, self._means[b], strict=True):
            ops.average(rows, mean, own_row, self._local)

    def discard(self, b: int) -> None:
        self._wait(b)

    def _wait(self, b: int) -> None:
        self._sent.pop(b).wait()
        if self._peers is not None:
            failed = self._peers.failed
            torch.maximum(failed, self._failed_there.amax(), out=failed)

    def arrived(self, b: int, gradients: Gradients) -> Arrived:
        self._wait(b)
        self._error.raise_if_any()
        rows = RankGradients(self._received[b], self.buckets[b].masters, self._host)
        return Arrived(self._own_views[b], rows)

    def average(self, b: int, gradients: Gradients, squares: torch.Tensor | None = None) -> None:
        self._wait(b)
        self._error.raise_if_any()
        own = self._means[b][self._host]
        ops.average(self._received[b], self.buckets[b].gradients, own, self._host, squares)

    def gather(self, b: int) -> Pending | None:
        return start_gather(self.buckets[b].gathered, self.buckets[b].group(), "gathering weights")
