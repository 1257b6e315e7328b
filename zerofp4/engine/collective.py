"""Transport by collectives of torch.distributed: NCCL or gloo."""

import itertools
import math
from collections.abc import Sequence

import torch

from zerofp4 import ops
from zerofp4.distributed import OwnError, Pending, all_gather_slices, start_exchange
from zerofp4.engine.flat import FlatBuffer
from zerofp4.engine.gradient_memory import GradientMemory, are_sendable, in_order
from zerofp4.engine.transport import Arrived, Gradients
from zerofp4.engine.wire import Wire
from zerofp4.ops import RankGradients


class CollectiveTransport:
    """Reduce-scatter by sends and receives, weights by an all-gather in place.

    The rows of a slice travel as they are; its owner adds them up in FP32, in rank order. So no bit of a
    gradient is lost, sums do not depend on a library's algorithm, and bfloat16 gradients take half the bytes
    of FP32 sums.

    Gradients that are sent as autograd makes them lie in flat memory from the backward pass on, and are not
    copied. Gradients that are rounded are copied to memory that `places` buckets share in turns; so is what
    is received. In a bucket of one rank gradients are read where they are.

    buckets: those of each process group side by side.
    wire: the dtype in which gradients are sent.
    places: how many buckets are on their way at once; None is for all.
    aliased: whether p.grad may alias the memory that it is sent from.
    """

    def __init__(
        self, buckets: Sequence[FlatBuffer], wire: Wire, *, places: int | None = 2, aliased: bool = True
    ):
        self.buckets, self._wire = buckets, wire
        self.device = buckets[0].device
        self.dtypes = [wire.dtype_of(bucket.parameters) for bucket in buckets]
        self._keeps = [wire.keeps(bucket.parameters) for bucket in buckets]
        self.aliased_storages: set[int] = set()
        self.memory = self._make_memory(places, aliased)
        """By bucket, where this rank's own gradients are sent from; None in a local one."""
        self._received = self._make_received(places)
        self._own_views = [
            own and own.own_views(bucket.rank) for own, bucket in zip(self.memory, buckets, strict=True)
        ]
        """By bucket, what arrived() gives of this rank's own gradients."""
        self._slices: dict[int, GradientMemory] = {}
        self._sent: dict[int, tuple[list[Pending], OwnError]] = {}
        """By bucket, what is on its way, and what went wrong on this rank before it was sent."""
        needed = [b.replica_count * (b.part.stop - b.part.start) for b in buckets if b.replica_count > 1]
        self._of_replicas = torch.empty(max(needed, default=0), dtype=torch.float32, device=self.device)

    def is_local(self, b: int) -> bool:
        """Whether gradients of bucket b are read where they are, and are the means."""
        bucket = self.buckets[b]
        return bucket.world_size == bucket.replica_count == 1 and self._wire.dtype in (None, torch.float32)

    def _make_memory(self, places: int | None, aliased: bool) -> list[GradientMemory | None]:
        layouts = [
            ((b.world_size, b.slice_numel), dtype) for b, dtype in zip(self.buckets, self.dtypes, strict=True)
        ]
        stays = [aliased and keeps for keeps in self._keeps]
        local = [self.is_local(b) for b in range(len(self.buckets))]
        copied = [layout for b, layout in enumerate(layouts) if not stays[b] and not local[b]]
        turns = Turns(copied, self.device, places)
        found: list[GradientMemory | None] = []
        for b, (bucket, (shape, dtype)) in enumerate(zip(self.buckets, layouts, strict=True)):
            if local[b]:
                found.append(None)
            elif stays[b]:
                flat = torch.zeros(shape, dtype=dtype, device=self.device)
                found.append(GradientMemory(bucket, flat, self.aliased_storages))
            else:
                found.append(GradientMemory(bucket, turns.next(shape, dtype)))
        return found

    def _make_received(self, places: int | None) -> list[torch.Tensor | None]:
        """By bucket, [world_size, slice_numel] for what the other ranks have of this rank's slice; in a
        bucket of one rank its own gradients, None in a local one.
        """
        travel = [
            own is not None and bucket.world_size > 1
            for own, bucket in zip(self.memory, self.buckets, strict=True)
        ]
        layouts = [
            (own.flat.shape, own.flat.dtype)
            for own, travels in zip(self.memory, travel, strict=True)
            if travels
        ]
        turns = Turns(layouts, self.device, places)
        return [
            turns.next(own.flat.shape, own.flat.dtype) if travels else own and own.flat
            for own, travels in zip(self.memory, travel, strict=True)
        ]

    def check(self, b: int, gradients: Gradients, names: Sequence[str]) -> None:
        check_gradients(self.buckets[b], self.dtypes[b], self.memory[b], gradients, names, self._wire)

    def prepare(self, gradients: Gradients) -> Gradients:
        found = list(gradients)
        for b in filter(self.can_add_in_update, filter(self.is_local, range(len(self.buckets)))):
            mine = [i for i in self.buckets[b].indices if found[i] is not None]
            if not are_sendable([found[i] for i in mine], [self.dtypes[b]] * len(mine)):
                for i in mine:  # an update reads addresses
                    found[i] = in_order(found[i], self.dtypes[b])
        return found

    # Gradients

    def begin(self) -> None:
        """Waits for messages of a step that was left in the middle: they share memory with those to come."""
        for works, _ in self._sent.values():
            for work in works:
                work.wait()
        self._sent.clear()

    def send_gradients(self, b: int, gradients: Gradients | None) -> None:
        if self.is_local(b):
            return
        error, own, bucket = OwnError(), self.memory[b], self.buckets[b]
        if gradients is not None:
            with error:  # the others wait for this rank's rows, whatever they hold
                own.take(gradients)
        works = []
        if bucket.world_size > 1:
            sent, received = ([[row] for row in rows] for rows in (own.flat, self._received[b]))
            works = start_exchange(received, sent, bucket.group(), "averaging gradients")
        self._sent[b] = works, error

    def discard(self, b: int) -> None:
        """Wait for what was sent of bucket b; nobody uses it."""
        works, error = self._sent.pop(b, ((), OwnError()))
        error.take()
        for work in works:
            work.wait()

    def _wait(self, b: int) -> None:
        works, error = self._sent.pop(b)
        for work in works:
            work.wait()
        error.raise_if_any()

    def can_add_in_update(self, b: int) -> bool:
        if self.is_local(b):
            return self._keeps[b]
        return self.buckets[b].world_size > 1 and self.buckets[b].replica_count == 1

    def arrived(self, b: int, gradients: Gradients) -> Arrived:
        bucket = self.buckets[b]
        if self.is_local(b):
            return Arrived([gradients[i] for i in bucket.indices], None)
        self._wait(b)
        rows = RankGradients(self._received[b], bucket.masters, bucket.rank)
        return Arrived(self._own_views[b], rows)

    def average(
        self,
        b: int,
        gradients: Gradients,
        squares: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> None:
        bucket = self.buckets[b]
        out = bucket.gradients if out is None else out
        squares = squares if bucket.is_counted else None
        if self.is_local(b):
            if out is not bucket.gradients:
                GradientMemory(bucket, out.view(1, -1)).take(gradients)
            else:
                self._slice(b).take(gradients)
            if squares is not None:
                ops.add_squares([out[bucket.part]], squares)
            return
        self._wait(b)
        own = self.memory[b].flat[bucket.rank]
        of_group = None if bucket.replica_count > 1 else squares
        ops.average(self._received[b], out, own, bucket.rank, of_group)
        if bucket.replica_count > 1:
            self._average_over_replicas(bucket, out, squares)

    def _slice(self, b: int) -> GradientMemory:
        """The averaged gradients of a local bucket, as memory that gradients are copied to."""
        if b not in self._slices:
            self._slices[b] = GradientMemory(self.buckets[b], self.buckets[b].gradients.view(1, -1))
        return self._slices[b]

    def _average_over_replicas(
        self, bucket: FlatBuffer, means: torch.Tensor, squares: torch.Tensor | None
    ) -> None:
        """The mean of the means of each replica, in FP32 and in replica order: of 2 x 2 ranks ((g0 + g1) / 2
        + (g2 + g3) / 2) / 2. Each replica averages one part of the slice and sends it to the others.
        """
        if not bucket.slice_numel:
            return
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

    def end(self) -> None:
        """Nothing: an exchange is over for the rank that has waited for it."""

    # Weights

    def open_weights(self) -> None:
        """Nothing: a gather waits for what is queued on each rank."""

    def halfway(self, b: int) -> None:
        return None

    def gather(self, b: int) -> Pending | None:
        return gather_by_collective(self.buckets[b])

    def nbytes_sent(self, b: int) -> int:
        bucket = self.buckets[b]
        return (bucket.world_size - 1) * bucket.slice_numel * self.dtypes[b].itemsize


def gather_by_collective(bucket: FlatBuffer) -> Pending | None:
    if bucket.world_size == 1:
        return None
    return all_gather_slices(bucket.weights, bucket.group(), async_op=True, stage="gathering weights")


def check_gradients(
    bucket: FlatBuffer,
    dtype: torch.dtype,
    memory: GradientMemory | None,
    gradients: Gradients,
    names: Sequence[str],
    wire: Wire,
) -> None:
    """Transport.check() of every transport. dtype: in which the gradients of the bucket are sent.

    Raises TypeError for a gradient that would lose values on its way without gradient_wire, and RuntimeError
    as GradientMemory.check() does.
    """
    if memory is not None:
        memory.check(gradients, names)
    if wire.dtype is not None or dtype == torch.float32:
        return
    for i in bucket.indices:
        gradient = gradients[i]
        if gradient is not None and gradient.dtype != dtype:
            raise TypeError(
                f"{names[i]} has a gradient of {gradient.dtype}, which would be rounded to {dtype} to be "
                "added to those of other ranks: build the optimizer with gradient_wire=torch.float32, or "
                f"{dtype} if that is meant"
            )


class Turns:
    """Memory for tensors of which `count` are used at a time, each in turn with those after it.

    layouts: their shapes and dtypes.
    count: None is for all of them.
    """

    def __init__(
        self,
        layouts: Sequence[tuple[Sequence[int], torch.dtype]],
        device: torch.device,
        count: int | None = 2,
    ):
        most = max((math.prod(shape) * dtype.itemsize for shape, dtype in layouts), default=0)
        count = len(layouts) if count is None else min(count, len(layouts))
        self._places = itertools.cycle(torch.empty(max(count, 1), most, dtype=torch.uint8, device=device))

    def next(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for the next one, contiguous."""
        return next(self._places)[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
