"""Transport by collectives of torch.distributed: NCCL or gloo."""

import itertools
from collections.abc import Mapping, Sequence

import torch

from zerofp4 import ops
from zerofp4.distributed import OwnError, Pending, reduce_scatter_slices, start_exchange, start_gather
from zerofp4.engine.buckets import (
    Bucket,
    GradientMemory,
    Gradients,
    gradient_memory,
    in_order,
    in_turns,
    zeros_on,
)
from zerofp4.engine.step import UPDATE_DTYPES, Arrived, Transport
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.ops import RankGradients

STAGE = "averaging gradients"


class CollectiveTransport(Transport):
    """Gradients by sends and receives, or by torch's reduce-scatter; weights by an all-gather in place.

    Ordered: the rows of a slice travel as they are; its owner adds them up in FP32, in rank order. So no bit
    of a gradient is lost, sums do not depend on a library's algorithm, and bfloat16 gradients take half the
    bytes of FP32 sums.

    By reduce-scatter: the library adds them up, in the dtype in which they are sent and in an order of its
    own, in one call a bucket whose cost hardly grows with the number of ranks. The owner divides in FP32.

    Gradients that are sent as autograd makes them lie in flat memory from the backward pass on. Others are
    copied to memory that buckets share in turns; so is what is received. A step reads the gradients of a
    bucket of one rank where they are, unless they are rounded.

    buckets: those of each process group side by side.
    in_flight: how many buckets are on their way at once.
    aliased: whether p.grad may alias the memory that it is sent from.
    ordered: whether gradients are added up in rank order, or by reduce-scatter.
    """

    def __init__(
        self, buckets: Sequence[Bucket], in_flight: int = 2, aliased: bool = True, ordered: bool = True
    ):
        self.buckets, self._ordered, device = buckets, ordered, buckets[0].device
        self.in_flight, zeros = in_flight, zeros_on(device)
        self.dtypes = [bucket.sent_as for bucket in buckets]
        self.sent_bytes = [bucket.sent_bytes for bucket in buckets]
        rounds = buckets[0].wire not in (None, torch.float32)
        travels = [rounds or b.world_size * b.replica_count > 1 for b in buckets]
        sent = list(itertools.compress(buckets, travels))
        made = iter(gradient_memory(sent, zeros, self.in_flight, aliased))
        self.memory = [next(made) if is_sent else None for is_sent in travels]
        layouts = [
            ((b.world_size if ordered else 1, b.slice_numel), b.sent_as) if b.world_size > 1 else None
            for b in buckets
        ]
        self._received = in_turns(layouts, zeros, self.in_flight)
        """By bucket, [world_size, slice_numel] for what the other ranks have of this rank's slice, or [1,
        slice_numel] for its sum; of one rank its own memory, or None where gradients are read in place.
        """
        self._own_views: list[list[torch.Tensor | None] | None] = [None] * len(buckets)
        """By bucket with memory, this rank's own row by parameter."""
        self.adds_in_update = [bucket.sent_as in UPDATE_DTYPES for bucket in buckets]
        self._in_place: dict[int, torch.dtype | None] = {}
        """By trainable parameter whose gradient kernels read in place: the dtype that an update reads; None
        for the gradient's own.
        """
        for b, (bucket, memory) in enumerate(zip(buckets, self.memory, strict=True)):
            if memory is None:
                self.adds_in_update[b] &= bucket.keeps_gradients
                dtype = bucket.sent_as if self.adds_in_update[b] else None
                self._in_place |= dict.fromkeys(bucket.indices, dtype)
                continue
            self.adds_in_update[b] &= ordered and bucket.world_size > 1 and bucket.replica_count == 1
            self._own_views[b] = bucket.own_views(memory.flat[bucket.rank])
            if bucket.world_size == 1:
                self._received[b] = memory.flat
        divided = [] if ordered else buckets
        self._divisors = [torch.full((), b.world_size, dtype=torch.float32, device=device) for b in divided]
        """By bucket. Tensors: torch would multiply by the rounded reciprocal of a number."""
        self._slices: dict[int, GradientMemory] = {}
        """By bucket without `memory`, its `gradients` as what average() copies to."""
        self._sent: dict[int, Pending] = {}
        """By bucket, what is on its way."""
        self._error = OwnError()
        """What went wrong on this rank as it sent any bucket of the present exchange."""
        needed = [b.replica_count * (b.part.stop - b.part.start) for b in buckets if b.replica_count > 1]
        self._of_replicas = zeros(max(needed, default=0), dtype=torch.float32)

    def prepare(self, gradients: Gradients, as_sent: bool = False) -> Gradients:
        if as_sent:
            return gradients
        is_partial = isinstance(gradients, Mapping)
        found = dict(gradients) if is_partial else list(gradients)
        for i in found if is_partial else range(len(found)):
            if found[i] is not None and i in self._in_place:  # kernels read addresses
                own = found[i].dtype if found[i].dtype in WEIGHT_DTYPES else torch.float32
                found[i] = in_order(found[i], self._in_place[i] or own)
        return found

    # Gradients

    def begin(self) -> None:
        for b in list(self._sent):  # of a step that was left in the middle, in the same memory
            self.discard(b)
        self._error = OwnError()

    def send_gradients(self, b: int, gradients: Gradients | None) -> None:
        own, bucket, received = self.memory[b], self.buckets[b], self._received[b]
        if own is None:
            return
        if gradients is not None:
            with self._error:  # the others wait for this rank's rows, whatever they hold
                own.take(gradients)
        if bucket.world_size == 1:
            return
        if self._ordered:
            self._sent[b] = start_exchange(_messages(received), _messages(own.flat), bucket.group(), STAGE)
        else:
            flats = received.view(-1), own.flat.view(-1)
            self._sent[b] = reduce_scatter_slices(*flats, bucket.group(), STAGE)

    def discard(self, b: int) -> None:
        self._wait(b)

    def _wait(self, b: int) -> None:
        pending = self._sent.pop(b, None)
        if pending is not None:
            pending.wait()

    def arrived(self, b: int, gradients: Gradients) -> Arrived:
        bucket = self.buckets[b]
        if self.memory[b] is None:
            return Arrived([gradients[i] for i in bucket.indices], None)
        self._wait(b)
        self._error.raise_if_any()
        return Arrived(self._own_views[b], RankGradients(self._received[b], bucket.masters, bucket.rank))

    def average(self, b: int, gradients: Gradients, squares: torch.Tensor | None = None) -> None:
        bucket = self.buckets[b]
        squares = squares if bucket.is_counted else None
        if self.memory[b] is None:
            if b not in self._slices:
                self._slices[b] = GradientMemory(bucket, bucket.gradients.view(1, -1))
            self._slices[b].take(gradients)
            if squares is not None:
                ops.add_squares([bucket.gradients], squares)
            return
        self._wait(b)
        out, has_replicas = bucket.gradients, bucket.replica_count > 1
        counted = None if has_replicas else squares
        if self._ordered or bucket.world_size == 1:
            ops.average(self._received[b], out, self.memory[b].flat[bucket.rank], bucket.rank, counted)
        else:
            out.copy_(self._received[b][0]).div_(self._divisors[b])
            if counted is not None:
                ops.add_squares([out], counted)
        if has_replicas:
            self._average_over_replicas(bucket, out, squares)
        self._error.raise_if_any()  # now that this rank has taken its part among the replicas, too

    def _average_over_replicas(
        self, bucket: Bucket, means: torch.Tensor, squares: torch.Tensor | None
    ) -> None:
        """The mean of the means of each replica, in FP32 and in replica order: of 2 x 2 ranks ((g0 + g1) / 2
        + (g2 + g3) / 2) / 2. Each replica averages one part of the slice and sends it to the others.
        """
        group, stage = bucket.replicas(), "averaging gradients over replicas"
        parts = [means[part] for part in bucket.parts]
        own = parts[bucket.replica]
        received = self._of_replicas[: len(parts) * own.numel()].view(len(parts), own.numel())
        start_exchange(_messages(received), _messages(parts), group, stage).wait()
        if own.numel():
            received[bucket.replica].copy_(own)
            ops.average(received, own, None, 0, squares)
        start_exchange(_messages(parts), _messages([own] * len(parts)), group, stage).wait()

    def gather(self, b: int) -> Pending | None:
        return start_gather(self.buckets[b].gathered, self.buckets[b].group(), "gathering weights")


def _messages(rows: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """By rank, one message, or none where a row is empty."""
    return [[row] if row.numel() else [] for row in rows]
