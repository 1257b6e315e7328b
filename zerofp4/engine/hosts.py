"""The exchange of a bucket over several hosts: each averages its gradients, and these means are exchanged."""

from collections.abc import Callable, Iterable, Sequence

import torch

from zerofp4 import ops
from zerofp4.distributed import GroupReference, OwnError, Pending, rank_and_size, start_exchange
from zerofp4.engine.buckets import Bucket, GradientMemory, Gradients, gradient_memory, in_slots, zeros_on
from zerofp4.engine.exchange import ABSTAIN, Abstain, Arrived, BucketExchange
from zerofp4.shard import intersect

Circle = tuple[GroupReference, range]  # ranks of a group, which exchange rows


class HostsExchange(BucketExchange):
    """Local rank l of every host averages its host's gradients, in FP32 and in rank order, for the slices
    that local rank l of all hosts owns. The owner receives each host's mean, and adds them in host order. If
    hosts hold replicas, these ranks own one slice, and each of them receives and adds the same means.

    A mean travels in the format of its bucket, rounded once at random (page on numerics), or as the float32
    that it is. The mean of the owner's own host is rounded, too: so no sum depends on who owns an element.

    On a GPU all this runs on a stream of its own, which waits for the network. On a CPU the host waits, so
    means are made and sent when they are needed: a backward pass never waits.

    hosts: their number, each with as many consecutive ranks.
    memory: of this rank's gradients.
    inside: [ranks of a host, slices, slice_numel], this host's gradients for slices of its counterparts.
    means: float32 [slices, slice_numel], which buckets share.
    sent: messages, one for each slice; or `means`. received: messages, one from each host.
    layout: of messages; None if they are the means.
    user: the last bucket before this one that is sent from `memory`. before: the last from that of `sent`.
    stream: None on a CPU. taken: returns the number of steps taken so far.
    """

    def __init__(
        self,
        bucket: Bucket,
        hosts: int,
        memory: GradientMemory,
        inside: torch.Tensor,
        means: torch.Tensor,
        sent: torch.Tensor,
        received: torch.Tensor,
        layout: ops.MeansLayout | None,
        user: "HostsExchange | None",
        before: "HostsExchange | None",
        stream: torch.cuda.Stream | None,
        taken: Callable[[], int],
    ):
        self.bucket, self.memory, self.received = bucket, memory, received
        self._inside, self._means, self._sent = inside, means, sent
        self._layout, self._before, self._user = layout, before, user
        self._stream, self._taken = stream, taken
        local_size = len(inside)
        self._own_slice, self._local = divmod(bucket.rank, local_size)
        first = bucket.rank - self._local
        self._neighbours: Circle = bucket.group, range(first, first + local_size)
        self._counterparts: Circle = bucket.group, range(self._local, bucket.world_size, local_size)
        self._host = self._own_slice
        if bucket.replica_count > 1:
            self._host, self._counterparts = bucket.replica, (bucket.replicas, range(hosts))
        self._rows = memory.flat.view(-1, local_size, bucket.slice_numel)  # by owner
        is_decoded = layout is not None and layout.is_decoded
        self.arrives_as: torch.dtype | None = None if is_decoded else received.dtype
        self._own_views = bucket.own_views(None if is_decoded else received[self._host])
        inside_host = memory.flat.nbytes * (local_size - 1) // local_size
        self.bytes_between_hosts = (hosts - 1) * received[0].nbytes
        self.means_travel_as = bucket.between_hosts or "float32"
        self.gradient_bytes = inside_host + self.bytes_between_hosts
        self._from_inside: Pending | None = None
        self._pending: Pending | None = None
        self._has_means = True  # nothing was sent without its means
        self._rounds_now = False  # not if this rank abstains
        self._left: torch.cuda.Event | None = None  # gradients have been read from `memory`
        self.error = OwnError()

    def send(self, gradients: Gradients | Abstain) -> None:
        self._drop()
        self.error, self._rounds_now = OwnError(), self._layout is not None and gradients is not ABSTAIN
        if self._user is not None and self._user._left is not None:
            self._user._left.wait()
        if gradients is not ABSTAIN:
            with self.error:  # the others wait for this rank's rows, whatever they hold
                self.memory.take(gradients)
        if self._stream is None:
            self._send_inside()
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self.bucket.device))
            with torch.cuda.stream(self._stream):
                self._send_inside()
                self._send_means()

    def _drop(self) -> None:
        """End the exchange of an aborted step as far as all ranks have begun it. CPUs send no means."""
        for pending in filter(None, (self._from_inside, self._pending)):
            pending.wait()
        self._from_inside = self._pending = None
        self._has_means = True

    def _send_inside(self) -> None:
        """Begin to send each rank of this host its rows of this rank's gradients."""
        self._inside[self._local].copy_(self._rows[:, self._local])
        if len(self._inside) > 1:
            self._from_inside = _exchange(
                self._neighbours, self._inside, self._rows.unbind(1), "averaging gradients inside hosts"
            )
        self._has_means = False

    def _send_means(self) -> None:
        """Average the gradients of this host, and begin to send the means to other hosts."""
        if self._from_inside is not None:
            self._from_inside.wait()
            self._from_inside = None
        self._has_means = True
        if self._stream is not None:
            self._left = self._stream.record_event()
            if self._before is not None and self._before._pending is not None:
                self._before._pending.wait()
        ops.average(self._inside.flatten(1), self._means.view(-1))
        if self._rounds_now:
            with self.error:
                where = {"step": self._taken(), "host": self._host}
                ops.round_means(self._means, self._sent, self._layout, **where)
        sent = self._sent.expand_as(self.received)  # to replicas the same
        self.received[self._host].copy_(sent[self._host])
        stage = "averaging gradients over hosts"
        self._pending = _exchange(self._counterparts, self.received, sent, stage)

    def finish(self) -> None:
        if not self._has_means:
            self._send_means()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def receive(self) -> Arrived:
        self.finish()
        self.error.raise_if_any()
        return Arrived(self._own_views, ops.RankGradients(self.received, self.bucket.masters, self._host))

    def average(self, means: torch.Tensor, squares: torch.Tensor | None = None) -> None:
        self.finish()
        if self.arrives_as is None:
            ops.average_means(self.received, means, self._layout, self._own_slice)
        else:
            ops.average(self.received, means)
        if squares is not None:  # of several replicas each counts a part
            ops.add_squares([means[self.bucket.part]], squares)
        self.error.raise_if_any()


def _exchange(
    circle: Circle, received: Iterable[torch.Tensor], sent: Iterable[torch.Tensor], stage: str
) -> Pending:
    """Begin to send each rank of the circle its row, contiguous or made of such rows, and to receive one."""
    group, ranks = circle[0](), circle[1]
    messages = [[[] for _ in range(rank_and_size(group)[1])] for _ in (received, sent)]
    for by_rank, rows in zip(messages, (received, sent), strict=True):
        for rank, row in zip(ranks, rows, strict=True):
            by_rank[rank] = list(row) if row.dim() > 1 else [row]
    return start_exchange(*messages, group, stage)


def message_layout(bucket: Bucket, local_size: int) -> ops.MeansLayout | None:
    """How the means that this rank sends lie in their messages; None for means that travel exactly."""
    if bucket.between_hosts is None:
        return None
    pieces: list[list[ops.MeansPiece]] = []  # by owner
    for begin in range(0, bucket.world_size * bucket.slice_numel, bucket.slice_numel):
        pieces.append([])
        for i, offset, shape in zip(bucket.indices, bucket.offsets, bucket.shapes, strict=True):
            shard = intersect(offset, shape.numel(), begin, begin + bucket.slice_numel)
            if shard.numel:
                place, cols = offset + shard.start - begin, shape[-1] if shape else 1
                pieces[-1].append(ops.MeansPiece(place, shard.numel, shard.start, i, cols))
    strips = max(sum(piece.strips for piece in own) for own in pieces)
    own = pieces[bucket.rank % local_size :: local_size]
    return ops.MeansLayout(bucket.between_hosts, bucket.slice_numel, own, strips, bucket.device)


def _message_of(bucket: Bucket, layout: ops.MeansLayout | None) -> tuple[int, torch.dtype]:
    if layout is not None and layout.is_decoded:
        return layout.nbytes, torch.uint8
    return bucket.slice_numel, torch.float32 if layout is None else torch.bfloat16


def hosts_exchanges(
    buckets: Sequence[Bucket], hosts: int, taken: Callable[[], int], *, early: bool, aliased: bool
) -> list[BucketExchange]:
    """By bucket, a HostsExchange. early, aliased: as of collective_exchanges()."""
    device, zeros = buckets[0].device, zeros_on(buckets[0].device)
    most = max(bucket.slice_numel for bucket in buckets)
    # On a CPU nothing leaves a slot in a backward pass.
    slots, places = None if early else 2, None if early and device.type == "cpu" else 2
    memory = gradient_memory(buckets, zeros, places, aliased)
    sizes = [b.world_size * b.replica_count // hosts for b in buckets]  # ranks of a host
    shapes = [(size, b.world_size // size, b.slice_numel) for b, size in zip(buckets, sizes, strict=True)]
    inside = in_slots(list(zip(shapes, (b.sent_as for b in buckets), strict=True)), zeros, places)
    messages = list(map(message_layout, buckets, sizes))
    lengths = list(map(_message_of, buckets, messages))
    received = in_slots([((hosts, length), dtype) for length, dtype in lengths], zeros, slots)
    counts = [slices for _, slices, _ in shapes]
    sent = [((count, length), dtype) for count, (length, dtype) in zip(counts, lengths, strict=True)]
    sent = in_slots(sent, zeros, 2)  # a message is made while the one before travels
    means = zeros(hosts * most, dtype=torch.float32)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    made: list[HostsExchange] = []
    users: dict[int, HostsExchange] = {}  # by the address of memory, the last one that sends from there
    for bucket, own, local, row, rows, layout in zip(
        buckets, memory, inside, sent, received, messages, strict=True
    ):
        mean = row if layout is None else means[: len(row) * bucket.slice_numel].view(len(row), -1)
        used = [own.flat.data_ptr(), row.data_ptr()]
        ends = *map(users.get, used), stream, taken
        made.append(HostsExchange(bucket, hosts, own, local, mean, row, rows, layout, *ends))
        users |= dict.fromkeys(used, made[-1])
    return list(made)
