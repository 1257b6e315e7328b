"""How one bucket travels: its gradients to their owners, its weights to every rank."""

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from zerofp4 import ops
from zerofp4.distributed import OwnError, Pending, reduce_scatter_slices, start_exchange, start_gather
from zerofp4.engine.buckets import (
    Bucket,
    GradientMemory,
    Gradients,
    gradient_memory,
    in_slots,
    is_sendable,
    zeros_on,
)
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.ops import RankGradients
from zerofp4.storage import is_freed

Waitable = Pending | torch.cuda.Event
"""A transfer that has begun. wait() makes the current stream, or without a GPU the host, wait for it."""


class Abstain(enum.Enum):
    ABSTAIN = 0


ABSTAIN = Abstain.ABSTAIN
"""Instead of gradients: this rank joins collectives without data, to keep them paired."""


class Arrived(NamedTuple):
    """The gradients of a bucket, for an update."""

    own: Gradients  # by parameter, this rank's gradient of its shard, contiguous; None if there is none
    rows: RankGradients | None  # of all ranks: the update averages as it reads; None if `own` is the mean


UPDATE_DTYPES = (torch.float32, torch.bfloat16)
"""Gradients that an update can average as it reads them."""


class BucketExchange(Protocol):
    """Moves one bucket: its gradients to their owners, its weights to every rank.

    In a step: send(), then receive() or average(), with at most one other bucket sent in between; then the
    cast, and gather(). All are collective. An error that receive() or average() raises is of this rank alone,
    which has joined their collectives by then.
    """

    bucket: Bucket
    memory: GradientMemory | None = None  # gradients are sent from it; None if kernels read p.grad
    arrives_as: torch.dtype | None  # the dtype of receive(); None if only average() can read the gradients
    received: torch.Tensor | None = None  # memory for gradients of other ranks; buckets may share it
    present: Sequence[bool] | None = None  # by parameter, if send() had a gradient; None if the device knows
    halfway: tuple[int, int, Callable[[], None]] | None = None
    """(position of a weight, its row, function to call): where the cast may pause once, to send codes."""
    error: OwnError  # of this rank in the last send(), raised by receive() and average()
    gradient_bytes: int  # that this rank sends to other ranks
    bytes_between_hosts: int | None = None  # the part of them that leaves the host; None if nobody counts
    means_travel_as: str | None = None  # the format of means between hosts; None if there are no such means
    bring_down: Callable[[bool], None] | None = None
    """Called after send(), or with False if the means are in `bucket.gradients`: begins what receive() waits
    for on the host. None if the host waits for nothing.
    """

    def send(self, gradients: Gradients | Abstain) -> None:
        """Begin to send gradients to the ranks that own them; without memory as of in_place()."""

    def receive(self) -> Arrived:
        """The gradients of all ranks, which may be read until the bucket after the next is sent."""

    def average(self, means: torch.Tensor, squares: torch.Tensor | None = None) -> None:
        """Write the mean into `means`, float32 [slice_numel], and add its squares to `squares`."""

    def finish(self) -> None:
        """Instead of receive(): finish the exchange and ignore the data."""

    def gather(self) -> Waitable | None:
        """Begin to send this rank's slice of the weights to all ranks. None in a bucket of one rank."""
        return start_gather(self.bucket.gathered, self.bucket.group(), "gathering weights")


class LocalExchange(BucketExchange):
    """A bucket of one rank, whose gradients are the means, and are read in place."""

    gradient_bytes = 0

    def __init__(self, bucket: Bucket):
        self.bucket = bucket
        is_read = bucket.keeps_gradients and bucket.sent_as in UPDATE_DTYPES
        self.arrives_as = bucket.sent_as if is_read else None
        self.error = OwnError()
        self._gradients: Gradients = ()
        self._means: GradientMemory | None = None

    def send(self, gradients: Gradients | Abstain) -> None:
        self._gradients = () if gradients is ABSTAIN else gradients
        self.present = [gradient is not None for gradient in self._gradients]

    def receive(self) -> Arrived:
        gradients, self._gradients = self._gradients, ()  # to be freed after the update
        return Arrived(gradients, None)

    def average(self, means: torch.Tensor, squares: torch.Tensor | None = None) -> None:
        if self._means is None or self._means.flat.data_ptr() != means.data_ptr():
            self._means = GradientMemory(self.bucket, means.view(1, -1))
        self._means.take(self._gradients)
        if squares is not None:
            ops.add_squares([means], squares)

    def finish(self) -> None:
        self._gradients = ()


class CollectiveExchange(BucketExchange):
    """Collectives of torch.distributed, NCCL or gloo: sends and receives of gradients, or a reduce-scatter;
    an all-gather of weights in place. One rank alone rounds its gradients as several would.

    Ordered: each rank's gradients travel as they are, and the owner adds them up in FP32, in rank order.

    By reduce-scatter: the library adds them up, in the dtype in which they are sent and in an order of its
    own, in one call whose cost hardly grows with the number of ranks. The owner divides in FP32.

    received: [world_size, slice_numel] for this rank's slice of all ranks' gradients, or by reduce-scatter
        [1, slice_numel] for its sum. Buckets may share it as a slot.
    of_replicas: float32, for the exchange of means with replicas, which all buckets share.
    before: the bucket that last sent from the same slot; None if no other does.
    """

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
        self.gradient_bytes = bucket.bytes_to_others
        fits_update = ordered and bucket.world_size > 1 and bucket.replica_count == 1
        fits_update &= bucket.sent_as in UPDATE_DTYPES
        self.arrives_as = bucket.sent_as if fits_update else None
        # A slot that later buckets send from does not keep this rank's own row until the update.
        keeps_own = ordered and bucket.world_size > 1 and not memory.aliased
        self._own = received[bucket.rank] if keeps_own else memory.flat[bucket.rank]
        self._own_views = bucket.own_views(self._own)
        # A tensor: torch would multiply by the rounded reciprocal of a number.
        self._divisor = torch.full((), bucket.world_size, dtype=torch.float32, device=bucket.device)
        self._pending: Pending | None = None
        self.error = OwnError()

    def send(self, gradients: Gradients | Abstain) -> None:
        self.finish()  # of an aborted step, in the same memory
        bucket, own, stage = self.bucket, self.memory, "averaging gradients"
        self.error = OwnError()
        if self._before is not None and self._before._pending is not None:
            self._before._pending.wait()
        if gradients is not ABSTAIN:
            with self.error:  # the others wait for this rank's rows, whatever they hold
                own.take(gradients)
                if self._own.data_ptr() != own.flat[bucket.rank].data_ptr():
                    self._own.copy_(own.flat[bucket.rank])
        if bucket.world_size == 1:
            if bucket.replica_count == 1 and gradients is not ABSTAIN:
                self.present = [gradient is not None for gradient in gradients]
            return
        if self._ordered:
            messages = _messages(self.received), _messages(own.flat)
            self._pending = start_exchange(*messages, bucket.group(), stage)
        else:
            flats = self.received.view(-1), own.flat.view(-1)
            self._pending = reduce_scatter_slices(*flats, bucket.group(), stage)

    def finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def receive(self) -> Arrived:
        self.finish()
        self.error.raise_if_any()
        return Arrived(self._own_views, RankGradients(self.received, self.bucket.masters, self.bucket.rank))

    def average(self, means: torch.Tensor, squares: torch.Tensor | None = None) -> None:
        bucket = self.bucket
        has_replicas = bucket.replica_count > 1
        counted = None if has_replicas else squares
        self.finish()
        if self._ordered or bucket.world_size == 1:
            ops.average(self.received, means, self._own, bucket.rank, counted)
        else:
            means.copy_(self.received[0]).div_(self._divisor)
            if counted is not None:
                ops.add_squares([means], counted)
        if has_replicas:
            self._average_over_replicas(means, squares)
        self.error.raise_if_any()  # now that this rank has joined the exchange of replicas, too

    def _average_over_replicas(self, means: torch.Tensor, squares: torch.Tensor | None) -> None:
        """The mean of the means of each replica, in FP32 and in replica order: of 2 x 2 ranks ((g0 + g1) / 2
        + (g2 + g3) / 2) / 2. Each replica averages one part of the slice and sends it to the others.
        """
        bucket, stage = self.bucket, "averaging gradients over replicas"
        group, parts = bucket.replicas(), [means[part] for part in bucket.parts]
        own = parts[bucket.replica]
        received = self._of_replicas[: len(parts) * own.numel()].view(len(parts), own.numel())
        start_exchange(_messages(received), _messages(parts), group, stage).wait()
        if own.numel():
            received[bucket.replica].copy_(own)
            ops.average(received, own, None, 0, squares)
        start_exchange(_messages(parts), _messages([own] * len(parts)), group, stage).wait()


def _messages(rows: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """By rank, one message, or none if its row is empty."""
    return [[row] if row.numel() else [] for row in rows]


def collective_exchanges(
    buckets: Sequence[Bucket], *, early: bool = False, aliased: bool = True, ordered: bool = True
) -> list[BucketExchange]:
    """By bucket, an exchange by collectives, or a LocalExchange if one rank has all of it and rounds nothing.

    early: whether a backward pass sends gradients. They wait on their owners for the step, so each bucket
        receives into its own memory. On a CPU each bucket also sends from its own: the host waits for a free
        slot, and must not wait in a backward pass. Otherwise buckets share two slots for each purpose.
    aliased: as of gradient_memory().
    ordered: whether gradients are added up in rank order, or by reduce-scatter.
    """
    device, rounds = buckets[0].device, buckets[0].wire not in (None, torch.float32)
    zeros = zeros_on(device)
    sent = [b for b in buckets if b.world_size * b.replica_count > 1 or rounds]
    slots = None if early and device.type == "cpu" else 2
    memory = dict(zip(sent, gradient_memory(sent, zeros, slots, aliased), strict=True))
    shared = [b for b in buckets if b.world_size > 1]
    layouts = [((b.world_size if ordered else 1, b.slice_numel), b.sent_as) for b in shared]
    received = dict(zip(shared, in_slots(layouts, zeros, None if early else 2), strict=True))
    needed = [b.replica_count * (b.part.stop - b.part.start) for b in buckets if b.replica_count > 1]
    of_replicas = zeros(max(needed, default=0), dtype=torch.float32)
    made: list[BucketExchange] = []
    users: dict[int, CollectiveExchange] = {}  # by the address of memory, the last one that sends from there
    for bucket in buckets:
        own = memory.get(bucket)
        if own is None:
            made.append(LocalExchange(bucket))
            continue
        rows = received.get(bucket, own.flat)  # one rank receives nothing
        place = own.flat.data_ptr()
        users[place] = CollectiveExchange(bucket, own, rows, of_replicas, ordered, users.get(place))
        made.append(users[place])
    return made


def in_place(exchange: BucketExchange, gradients: Gradients) -> Gradients:
    """Gradients for send(): without memory, kernels read contiguous ones, and others are copied."""
    if exchange.memory is not None:
        return gradients
    copied = []
    for gradient in gradients:
        if gradient is not None:
            own = gradient.dtype if gradient.dtype in WEIGHT_DTYPES else torch.float32
            dtype = exchange.arrives_as or own
            if not is_sendable(gradient, dtype):
                gradient = torch.empty(gradient.shape, dtype=dtype, device=gradient.device).copy_(gradient)
        copied.append(gradient)
    return copied


def check_gradients(exchange: BucketExchange, gradients: Gradients, are_known: bool = False) -> None:
    """Raise RuntimeError for a gradient that is sparse, on another device, freed, of another shape, or in the
    memory of another parameter's gradient; TypeError for one that would be rounded without gradient_wire.

    are_known: whether gradients of the same kinds have passed before.
    """
    bucket, sent_as = exchange.bucket, exchange.bucket.sent_as
    members = () if are_known else zip(bucket.names, gradients, bucket.shapes, strict=True)
    for name, gradient, shape in members:
        if gradient is None:
            continue
        problem = None
        if gradient.layout != torch.strided:
            problem = f"of layout {gradient.layout}: gradients must be dense"
        elif gradient.device != bucket.device:
            problem = f"on {gradient.device}, and its master is on {bucket.device}"
        elif is_freed(gradient) and not gradient._is_zerotensor():
            problem = "whose storage was freed in place (resize_)"
        elif gradient.shape != shape:
            problem = f"of shape {tuple(gradient.shape)}, and has shape {tuple(shape)}"
        if problem is not None:
            raise RuntimeError(f"{name} has a gradient {problem}")
        if bucket.wire is None and gradient.dtype != sent_as != torch.float32:
            raise TypeError(
                f"{name} has a gradient of {gradient.dtype}, which would be rounded to {sent_as} to be added "
                "to those of other ranks: build the optimizer with gradient_wire=torch.float32, or "
                f"{sent_as} if that is meant"
            )
    if exchange.memory is not None:
        exchange.memory.check(gradients)
