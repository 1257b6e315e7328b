"""Transport over several hosts: gradients are averaged on each host first, then between hosts."""

from collections.abc import Sequence

import torch

from zerofp4 import ops
from zerofp4.distributed import OwnError, Pending, attempt, exchange, start_exchange
from zerofp4.engine.buckets import Bucket, Gradients, in_turns, private_memory, shared_memory
from zerofp4.engine.collective import gather_by_collective
from zerofp4.engine.late_gather import Waitable
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
        self._host, self._local = hosts.position(buckets[0].rank)
        self._neighbours = hosts.ranks_of(self._host)
        """The ranks of this host."""
        self._across = [h * hosts.size + self._local for h in range(hosts.count)]
        """By host, its rank with this rank's local rank."""
        device = buckets[0].device
        if peers is None:
            self.memory = private_memory(buckets, count=1)
            layouts = [((*hosts.shape, b.slice_numel), b.sent_as) for b in buckets]
            self._rows = in_turns(layouts, device, count=1)
            """By bucket, [hosts, ranks of this host, slice_numel]: what the other ranks of this host send."""
        else:
            # The ranks of this host agree on an error; this exchange tells the other hosts.
            self.memory, error = attempt(shared_memory, buckets, peers)
            exchange(None, error, self._group(), "sharing memory")
            self._shared_rows = [
                [peers.rows_like(row) for row in own.flat[self._local :: hosts.size]] for own in self.memory
            ]
            """By bucket and host, the gradients of this host's ranks for the owner on that host."""
            self._failed_there = torch.zeros(hosts.count, 1, dtype=torch.float32, device=device)
            """By host, 1 if one of its ranks did not come to a barrier, so that its means are of no use."""
        on_host = [(hosts.size - 1) * hosts.count * own.flat.itemsize for own in self.memory]
        between = 4 * (hosts.count - 1)
        self.sent_bytes = [b.slice_numel * (n + between) for b, n in zip(buckets, on_host, strict=True)]
        layouts = [((2, hosts.count, bucket.slice_numel), torch.float32) for bucket in buckets]
        self._means, self._received = zip(*in_turns(layouts, device), strict=True)
        """By bucket, [hosts, slice_numel]: the means of this host's gradients for the owner on each host; and
        those of each host, for this rank.
        """
        self._own_views = [b.own_views(m[self._host]) for b, m in zip(buckets, self._means, strict=True)]
        self._sent: dict[int, tuple[list[Pending], OwnError]] = {}
        """By bucket, what is on its way, and what went wrong on this rank before it was sent."""

    def prepare(self, gradients: Gradients, as_sent: bool = False) -> Gradients:
        for memory in self.memory if self._peers is not None else ():
            memory.take(gradients)
        return gradients

    # Gradients

    def begin(self) -> None:
        for b in list(self._sent):  # of a step that was left in the middle, in the same memory
            self.discard(b)
        if self._peers is not None:
            self._peers.arrive()

    def send_gradients(self, b: int, gradients: Gradients | None) -> None:
        """Average on this host, and begin to send the means to the other hosts."""
        received, sent = ([[] for _ in range(self.buckets[b].world_size)] for _ in range(2))
        for host, rank in enumerate(self._across):
            sent[rank].append(self._means[b][host])
            received[rank].append(self._received[b][host])
            if self._peers is not None:
                sent[rank].append(self._peers.failed.view(1))
                received[rank].append(self._failed_there[host])
        average = self._average_sent if self._peers is None else self._average_shared
        error = average(b, gradients)
        works = start_exchange(received, sent, self._group(), "averaging gradients over hosts")
        self._sent[b] = works, error

    def _average_shared(self, b: int, _: Gradients | None) -> OwnError:
        """Average the gradients that the ranks of this host have in shared memory."""
        error = OwnError()
        with error:
            for rows, mean in zip(self._shared_rows[b], self._means[b], strict=True):
                ops.average_rows(rows, mean)
        if b + 1 == len(self.buckets):
            self._peers.arrive()  # the ranks of this host have read all rows
        return error

    def _average_sent(self, b: int, gradients: Gradients | None) -> OwnError:
        """Send the other ranks of this host their rows, wait for theirs, and average them."""
        error, own, rows = OwnError(), self.memory[b], self._rows[b]
        if gradients is not None:
            with error:  # the others wait for this rank's rows, whatever they hold
                own.take(gradients)
        size = len(self._neighbours)
        received, sent = ([[] for _ in range(self.buckets[b].world_size)] for _ in range(2))
        for local, rank in enumerate(self._neighbours):
            received[rank] = list(rows[:, local])
            sent[rank] = list(own.flat[local::size])
        for work in start_exchange(received, sent, self._group(), "averaging gradients on a host"):
            work.wait()
        mine = own.flat[self._local :: size]
        for pieces, own_row, mean in zip(rows, mine, self._means[b], strict=True):
            ops.average(pieces, mean, own_row, self._local)
        return error

    def _wait(self, b: int) -> OwnError:
        works, error = self._sent.pop(b)
        for work in works:
            work.wait()
        if self._peers is not None:
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

    def gather(self, b: int) -> Waitable | None:
        return gather_by_collective(self.buckets[b])
