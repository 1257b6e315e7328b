"""Exchange of a bucket by collectives of torch.distributed: NCCL or gloo."""

from collections.abc import Sequence

import torch

from zerofp4 import ops
from zerofp4.distributed import OwnError, Pending, reduce_scatter_slices, start_exchange, start_gather
from zerofp4.engine.buckets import Bucket, GradientMemory, Zeros, gradient_memory, in_turns
from zerofp4.engine.exchange import (
    ABSTAIN,
    UPDATE_DTYPES,
    Abstain,
    Arrived,
    BucketExchange,
    BucketGradients,
    LocalExchange,
)
from zerofp4.ops import RankGradients

STAGE = "averaging gradients"


class CollectiveExchange(BucketExchange):
    """Gradients by sends and receives, or by torch's reduce-scatter; weights by an all-gather in place.

    Ordered: each rank's gradients travel as they are, and the owner adds them up in FP32, in rank order. So
    no bit of a gradient is lost, sums do not depend on a library's algorithm, and bfloat16 gradients take
    half the bytes of FP32 sums.

    By reduce-scatter: the library adds them up, in the dtype in which they are sent and in an order of its
    own, in one call whose cost hardly grows with the number of ranks. The owner divides in FP32.

    received: [world_size, slice_numel] for this rank's slice of all ranks' gradients, or by reduce-scatter
        [1, slice_numel] for its sum. Later buckets may use the same memory, as of in_turns().
    of_replicas: float32, for the exchange of means with replicas, which all buckets share.
    before: the bucket that last sent from the same memory; None where no other does.
    """

    halfway = present = None

    def __init__(
        self,
        bucket: Bucket,
        memory: GradientMemory,
        received: torch.Tensor,
        of_replicas: torch.Tensor,
        ordered: bool,
        before: "CollectiveExchange | None",
    ):
        self.bucket, self.memory, self.received = bucket, memory, received
        self._of_replicas, self._ordered, self._before = of_replicas, ordered, before
        fits_update = ordered and bucket.world_size > 1 and bucket.replica_count == 1
        fits_update &= bucket.sent_as in UPDATE_DTYPES
        self.arrives_as = bucket.sent_as if fits_update else None
        # Memory that later buckets send from does not keep this rank's own row until the update.
        keeps_own = ordered and bucket.world_size > 1 and not memory.aliased
        self._own = received[bucket.rank] if keeps_own else memory.flat[bucket.rank]
        self._own_views = bucket.own_views(self._own)
        # A tensor: torch would multiply by the rounded reciprocal of a number.
        self._divisor = torch.full((), bucket.world_size, dtype=torch.float32, device=bucket.device)
        self._pending: Pending | None = None
        self.error = OwnError()

    def send(self, gradients: BucketGradients | Abstain) -> None:
        self.finish()  # of a step that was left in the middle, in the same memory
        bucket, own = self.bucket, self.memory
        self.error = OwnError()
        if self._before is not None and self._before._pending is not None:
            self._before._pending.wait()
        if gradients is not ABSTAIN:
            with self.error:  # the others wait for this rank's rows, whatever they hold
                own.take(gradients)
                if self._own.data_ptr() != own.flat[bucket.rank].data_ptr():
                    self._own.copy_(own.flat[bucket.rank])
        if bucket.world_size == 1:
            return
        if self._ordered:
            messages = _messages(self.received), _messages(own.flat)
            self._pending = start_exchange(*messages, bucket.group(), STAGE)
        else:
            flats = self.received.view(-1), own.flat.view(-1)
            self._pending = reduce_scatter_slices(*flats, bucket.group(), STAGE)

    def finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def receive(self) -> Arrived | None:
        if self.arrives_as is None:
            self.average()
            return None
        self.finish()
        self.error.raise_if_any()
        return Arrived(self._own_views, RankGradients(self.received, self.bucket.masters, self.bucket.rank))

    def average(self, squares: torch.Tensor | None = None) -> None:
        bucket, means = self.bucket, self.bucket.gradients
        squares = squares if bucket.is_counted else None
        has_replicas = bucket.replica_count > 1
        self.finish()
        counted = None if has_replicas else squares
        if self._ordered or bucket.world_size == 1:
            ops.average(self.received, means, self._own, bucket.rank, counted)
        else:
            means.copy_(self.received[0]).div_(self._divisor)
            if counted is not None:
                ops.add_squares([means], counted)
        if has_replicas:
            self._average_over_replicas(squares)
        self.error.raise_if_any()  # now that this rank has taken its part among the replicas, too

    def _average_over_replicas(self, squares: torch.Tensor | None) -> None:
        """The mean of the means of each replica, in FP32 and in replica order: of 2 x 2 ranks ((g0 + g1) / 2
        + (g2 + g3) / 2) / 2. Each replica averages one part of the slice and sends it to the others.
        """
        bucket, stage = self.bucket, "averaging gradients over replicas"
        group, parts = bucket.replicas(), [bucket.gradients[part] for part in bucket.parts]
        own = parts[bucket.replica]
        received = self._of_replicas[: len(parts) * own.numel()].view(len(parts), own.numel())
        start_exchange(_messages(received), _messages(parts), group, stage).wait()
        if own.numel():
            received[bucket.replica].copy_(own)
            ops.average(received, own, None, 0, squares)
        start_exchange(_messages(parts), _messages([own] * len(parts)), group, stage).wait()

    def gather(self) -> Pending | None:
        return start_gather(self.bucket.gathered, self.bucket.group(), "gathering weights")


def collective_exchanges(
    buckets: Sequence[Bucket],
    zeros: Zeros,
    *,
    early: bool = False,
    turns: int | None = 2,
    aliased: bool = True,
    ordered: bool = True,
) -> list[BucketExchange]:
    """By bucket, an exchange by collectives, or a LocalExchange where one rank has all of it.

    Gradients that are sent as autograd makes them lie in flat memory from the backward pass on. Others are
    copied to memory that buckets share in turns, and so is what is received.

    early: whether a backward pass sends gradients, which wait on their owners for the step: then all buckets
        have memory to receive them.
    turns: how many buckets have memory to send copies from, in turns; None for all. Who sends waits until
        that memory has left: on a CPU the host, which must not in a backward pass.
    aliased: whether p.grad may alias the memory that it is sent from.
    ordered: whether gradients are added up in rank order, or by reduce-scatter.
    """
    rounds = buckets[0].wire not in (None, torch.float32)
    travels = [b.world_size * b.replica_count > 1 for b in buckets]
    sent = [b for b, is_sent in zip(buckets, travels, strict=True) if is_sent or rounds]
    memory = dict(zip(sent, gradient_memory(sent, zeros, turns, aliased), strict=True))
    layouts = [
        ((b.world_size if ordered else 1, b.slice_numel), b.sent_as) if b.world_size > 1 else None
        for b in buckets
    ]
    received = in_turns(layouts, zeros, None if early else 2)
    needed = [b.replica_count * (b.part.stop - b.part.start) for b in buckets if b.replica_count > 1]
    of_replicas = zeros(max(needed, default=0), dtype=torch.float32)
    made: list[BucketExchange] = []
    users: dict[int, CollectiveExchange] = {}  # by the address of memory, the last one that sends from there
    for bucket, is_sent, rows in zip(buckets, travels, received, strict=True):
        own = memory.get(bucket)
        if not is_sent:
            made.append(LocalExchange(bucket, own))
            continue
        rows = own.flat if rows is None else rows  # of one rank with replicas
        place = own.flat.data_ptr()
        users[place] = CollectiveExchange(bucket, own, rows, of_replicas, ordered, users.get(place))
        made.append(users[place])
    return made


def _messages(rows: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """By rank, one message, or none where a row is empty."""
    return [[row] if row.numel() else [] for row in rows]
