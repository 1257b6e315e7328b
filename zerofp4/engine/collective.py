"""Transport by collectives of torch.distributed: NCCL or gloo."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerofp4 import ops
from zerofp4.distributed import (
    OwnError,
    Pending,
    all_gather_slices,
    reduce_scatter_slices,
    start_exchange,
)
from zerofp4.engine.buckets import (
    Bucket,
    GradientMemory,
    Gradients,
    in_order,
    in_turns,
    private_memory,
)
from zerofp4.engine.late_gather import Waitable
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
    early: how many buckets are on their way at once where a BackwardSchedule sends them; None where a step
        does.
    aliased: whether p.grad may alias the memory that it is sent from.
    ordered: whether gradients are added up in rank order, or by reduce-scatter.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        early: int | None = None,
        aliased: bool = True,
        ordered: bool = True,
    ):
        self.buckets, self.in_flight, device = buckets, early or 2, buckets[0].device
        self._ordered = ordered
        self.dtypes = [bucket.sent_as for bucket in buckets]
        self.sent_bytes = [bucket.sent_bytes for bucket in buckets]
        rounds = buckets[0].wire not in (None, torch.float32)
        travels = [bool(early or rounds or b.world_size * b.replica_count > 1) for b in buckets]
        made = iter(private_memory(list(itertools.compress(buckets, travels)), self.in_flight, aliased))
        self.memory = [next(made) if is_sent else None for is_sent in travels]
        layouts = [
            ((b.world_size if ordered else 1, b.slice_numel), b.sent_as) if b.world_size > 1 else None
            for b in buckets
        ]
        self._received = in_turns(layouts, device, self.in_flight)
        """By bucket, [world_size, slice_numel] for what the other ranks have of this rank's slice, or [1,
        slice_numel] for the sum; in a bucket of one rank its own gradients, or None where they are read in
        place.
        """
        self._own_views: list[list[torch.Tensor | None]] = [[]] * len(buckets)
        self.adds_in_update = [bucket.sent_as in UPDATE_DTYPES for bucket in buckets]
        for b, (bucket, memory) in enumerate(zip(buckets, self.memory, strict=True)):
            if memory is None:
                self.adds_in_update[b] &= bucket.keeps_gradients
                continue
            self.adds_in_update[b] &= ordered and bucket.world_size > 1 and bucket.replica_count == 1
            self._own_views[b] = bucket.own_views(memory.flat[bucket.rank])
            self._received[b] = memory.flat if bucket.world_size == 1 else self._received[b]
        self._in_place = {
            i: bucket.sent_as if adds else None
            for bucket, memory, adds in zip(buckets, self.memory, self.adds_in_update, strict=True)
            for i in (bucket.indices if memory is None else ())
        }
        """By trainable parameter whose gradient kernels read in place: the dtype that an update reads; None
        for the gradient's own.
        """
        divided = [] if ordered else buckets
        self._divisors = [torch.full((), b.world_size, dtype=torch.float32, device=device) for b in divided]
        """By bucket. Tensors: torch would multiply by the rounded reciprocal of a number."""
        self._slices: dict[int, GradientMemory] = {}
        """By bucket without `memory`, its `gradients` as what average() copies to."""
        self._sent: dict[int, tuple[list[Pending], OwnError]] = {}
        """By bucket, what is on its way, and what went wrong on this rank before it was sent."""
        needed = [b.replica_count * (b.part.stop - b.part.start) for b in buckets if b.replica_count > 1]
        self._of_replicas = torch.empty(max(needed, default=0), dtype=torch.float32, device=device)

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

    def send_gradients(self, b: int, gradients: Gradients | None) -> None:
        if self.memory[b] is None:
            return
        error, own, bucket = OwnError(), self.memory[b], self.buckets[b]
        if gradients is not None:
            with error:  # the others wait for this rank's rows, whatever they hold
                own.take(gradients)
        works, received = [], self._received[b]
        if bucket.world_size > 1 and self._ordered:
            messages = ([[row] for row in rows] for rows in (received, own.flat))
            works = start_exchange(*messages, bucket.group(), STAGE)
        elif bucket.world_size > 1:
            works = [reduce_scatter_slices(received.view(-1), own.flat.view(-1), bucket.group(), STAGE)]
        self._sent[b] = works, error

    def _wait(self, b: int) -> OwnError:
        works, error = self._sent.pop(b)
        for work in works:
            work.wait()
        return error

    def discard(self, b: int) -> None:
        if b in self._sent:
            self._wait(b).take()

    def arrived(self, b: int, gradients: Gradients) -> Arrived:
        bucket = self.buckets[b]
        if self.memory[b] is None:
            return Arrived([gradients[i] for i in bucket.indices], None)
        self._wait(b).raise_if_any()
        return Arrived(self._own_views[b], RankGradients(self._received[b], bucket.masters, bucket.rank))

    def average(
        self,
        b: int,
        gradients: Gradients,
        squares: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> None:
        """As Transport.average(). out: float32 [slice_numel] in place of the bucket's `gradients`."""
        bucket = self.buckets[b]
        squares = squares if bucket.is_counted else None
        if self.memory[b] is None:
            if b not in self._slices:
                self._slices[b] = GradientMemory(bucket, bucket.gradients.view(1, -1))
            self._slices[b].take(gradients)
            if squares is not None:
                ops.add_squares([bucket.gradients], squares)
            return
        out = bucket.gradients if out is None else out
        error = self._wait(b)  # raised once this rank has taken its part among the replicas, too
        has_replicas = bucket.replica_count > 1
        counted = None if has_replicas else squares
        if self._ordered or bucket.world_size == 1:
            ops.average(self._received[b], out, self.memory[b].flat[bucket.rank], bucket.rank, counted)
        else:
            out.copy_(self._received[b][0]).div_(self._divisors[b])
            if counted is not None:
                ops.add_squares([out], counted)
        if has_replicas:
            self._average_over_replicas(bucket, out, squares)
        error.raise_if_any()

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

        def messages(rows: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
            return [[row] if row.numel() else [] for row in rows]

        for work in start_exchange(messages(received), messages(parts), group, stage):
            work.wait()
        if own.numel():
            received[bucket.replica].copy_(own)
            ops.average(received, own, None, 0, squares)
        for work in start_exchange(messages(parts), messages([own] * len(parts)), group, stage):
            work.wait()

    def gather(self, b: int) -> Waitable | None:
        return gather_by_collective(self.buckets[b])


class _Gathers(NamedTuple):
    """Several that are under way."""

    gathers: list[Pending]

    def wait(self) -> None:
        for gather in self.gathers:
            gather.wait()


def gather_by_collective(bucket: Bucket) -> Waitable | None:
    if bucket.world_size == 1:
        return None
    options = {"async_op": True, "stage": "gathering weights"}
    return _Gathers([all_gather_slices(flat, bucket.group(), **options) for flat in bucket.gathered])


def find_advice(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """What would make collectives of a group faster, or None."""
    if group is None or device.type != "cuda" or dist.get_world_size(group) == 1:
        return None
    options = getattr(group._get_backend(device), "options", None)
    if getattr(options, "is_high_priority_stream", True):
        return None
    return (
        "NCCL's stream has the priority of the others, so that what travels waits until kernels that were "
        "queued before it have begun all of their blocks; zerofp4.launch.init_process_group makes a group "
        "with one of high priority, as pg_options=ProcessGroupNCCL.Options(is_high_priority_stream=True) does"
    )
