"""Exchange of a bucket through memory that the GPUs of one host share."""

from collections.abc import Sequence

import torch

from zerofp4 import ops
from zerofp4.distributed import OwnError, attempt, exchange
from zerofp4.engine.buckets import Bucket, GradientMemory, gradient_memory, zeros_on
from zerofp4.engine.exchange import ABSTAIN, UPDATE_DTYPES, Abstain, Arrived, BucketExchange, BucketGradients
from zerofp4.engine.peers import Copies, Peers, halves
from zerofp4.format import BLOCK
from zerofp4.ops import PeerRows, RankGradients


class PeerExchange(BucketExchange):
    """The owner of a slice reads the gradients of all ranks as it adds them up in FP32, in rank order. The
    copy engines write its codes into the weights of every rank.

    send() brings this rank's gradients into its shared memory, where they usually lie since the backward
    pass. receive(), average() and finish() are a barrier on the device, behind which all ranks have sent.

    [Note: when shared memory may be written]

        turn      t             t + 1         t + 2         t + 3
        send      bucket t      t + 1         t + 2         t + 3
        barrier   t - 1         t             t + 1         t + 2
        read      t - 1         t             t + 1         t + 2

    - Behind the barrier of bucket t + 1 nobody reads bucket t any more, and before it nobody has sent bucket
      t + 3. So three buckets may use one memory in turns.
    - Behind the last bucket come the gathers of weights, which end in a barrier, or the all-reduce of
      clip_grad_norm_: then the next backward pass may write.

    means: float32, as long as a slice at least, where receive() averages; None leaves that to the update. All
        buckets may share it.
    """

    present = None

    def __init__(
        self, bucket: Bucket, memory: GradientMemory, peers: Peers, means: torch.Tensor | None = None
    ):
        self.bucket, self.memory, self._peers = bucket, memory, peers
        self.arrives_as = bucket.sent_as if bucket.sent_as in UPDATE_DTYPES else None
        self._means = None if means is None else means[: bucket.slice_numel]
        if self._means is not None:
            self.arrives_as, self._mean_views = torch.float32, bucket.own_views(self._means)
        self.error = OwnError()
        self.received: torch.Tensor | None = None
        self._sent_halfway = 0
        """How many elements of the slice of weights left halfway through its cast."""
        found = find_halfway(bucket)
        self.halfway = None
        if found is not None:
            position, row, count = found
            self.halfway = position, row, lambda: self._send_weights(count)
        self._connect()

    def _connect(self) -> None:
        own = self.memory.flat[self._peers.rank]
        self._rows = PeerRows(self._peers.rows(own), own.numel(), own.dtype)
        self._own_views = self.bucket.own_views(own)

    def send(self, gradients: BucketGradients | Abstain) -> None:
        self.error = OwnError()
        if gradients is not ABSTAIN:
            with self.error:
                self.memory.take(gradients)

    def finish(self) -> None:
        self._peers.arrive()

    def receive(self) -> Arrived:
        self.finish()
        self.error.raise_if_any()
        if self._means is not None:
            ops.average(self._rows, self._means)
            return Arrived(self._mean_views, None)
        rows = RankGradients(self._rows, self.bucket.masters, self._peers.rank)
        return Arrived(self._own_views, rows)

    def average(self, squares: torch.Tensor | None = None) -> None:
        self.finish()
        self.error.raise_if_any()
        ops.average(self._rows, self.bucket.gradients, squares=squares)

    def _send_weights(self, count: int) -> None:
        self._sent_halfway = count
        self._peers.start_sending(self.bucket.weights, count)

    def gather(self) -> torch.cuda.Event:
        scales, sent = self.bucket.scales, self._sent_halfway
        self._sent_halfway = 0
        if scales is not None:
            self._peers.start_sending(scales.view(-1), scales.shape[1])
        return self._peers.start_gather(self.bucket.weights, sent)


class PushExchange(PeerExchange):
    """send() has the copy engines write to every owner its part of the gradients, in a backward pass.

    Besides p.grad this needs memory on each owner for the rows of the other ranks, of all buckets at once, in
    the dtype in which gradients are sent.

    [Note: writing into another rank's memory without asking]
    - Each row has one writer, which copies in order: sending again overwrites the earlier copy, whatever
      became of it (zero_grad(), a skipped step).
    - Rows are read behind the barrier of receive(), before which all copies have left; the next ones leave
      behind the gathers of weights, or the all-reduce of clip_grad_norm_.
    - Own memory lives as long as this object. Copies of gradients that a later pass has overwritten are of
      dropped ones. Memory that buckets use in turns waits until its copies have left.

    left: by the address of own memory, the last copies from there, which all buckets share.
    """

    def __init__(
        self, bucket: Bucket, memory: GradientMemory, peers: Peers, left: dict[int, torch.cuda.Event]
    ):
        self._left = left
        super().__init__(bucket, memory, peers)

    def _connect(self) -> None:
        """Make rows for what other ranks send, and for this rank's own where its memory is used in turns."""
        peers, memory = self._peers, self.memory
        received = peers.zeros((peers.size - memory.aliased, self.bucket.slice_numel), memory.flat.dtype)

        def row(sender: int, receiver: int) -> torch.Tensor:
            return received[(sender - receiver - 1) % peers.size]  # the last one is the receiver's own

        copies = [(peers.at(r, row(peers.rank, r)), memory.flat[r]) for r in peers.others]
        own = memory.flat[peers.rank]
        if not memory.aliased:
            copies.append((row(peers.rank, peers.rank), own))
            own = row(peers.rank, peers.rank)
        rows = [own if r == peers.rank else row(r, peers.rank) for r in range(peers.size)]
        addresses = tuple(r.data_ptr() for r in rows)
        self._rows = PeerRows(addresses, self.bucket.slice_numel, received.dtype)
        self._own_views, self.received = self.bucket.own_views(own), received
        self._copies: tuple[Copies, Copies] = halves(copies)

    def send(self, gradients: BucketGradients | Abstain) -> None:
        if gradients is ABSTAIN:
            return
        place = self.memory.flat.data_ptr()
        if place in self._left and not self.memory.aliased:
            self._left[place].wait()
        super().send(gradients)
        if not self.error:
            self._left[place] = self._peers.start_copies(*self._copies)

    def finish(self) -> None:
        self._peers.wait_until_sent()
        super().finish()


def peer_exchanges(
    buckets: Sequence[Bucket], peers: Peers, *, early: bool = False, in_turns: bool = False
) -> list[BucketExchange]:
    """By bucket, an exchange through memory of these ranks.

    early: whether a backward pass sends gradients. in_turns: whether buckets use three memories in turns, so
    that p.grad lies elsewhere.
    """
    if early:
        memory, error = attempt(gradient_memory, buckets, zeros_on(peers.device), 2)
        exchange(None, error, peers.group(), "allocating gradients")
        left: dict[int, torch.cuda.Event] = {}
        return [PushExchange(bucket, own, peers, left) for bucket, own in zip(buckets, memory, strict=True)]
    memory = gradient_memory(buckets, peers.zeros, 3 if in_turns else None, aliased=not in_turns)
    # Updates of compact state have few loads on their way at a time: on four GPUs they would wait for rows of
    # other ranks one after the other.
    are_first = [peers.size > 2 and b.state != "full" for b in buckets]
    slices = [b.slice_numel for b, is_first in zip(buckets, are_first, strict=True) if is_first]
    means = peers.zeros((max(slices),), torch.float32) if slices else None
    known = zip(buckets, memory, are_first, strict=True)
    return [PeerExchange(b, own, peers, means if is_first else None) for b, own, is_first in known]


def find_halfway(bucket: Bucket) -> tuple[int, int, int] | None:
    """Where a cast may stop once, so that codes are sent while the rest is cast: the position of a weight,
    its row, or its number of rows where that is behind it, and how many elements of `weights` are before it.
    It is the last row of tiles that begins in the first half of this rank's codes, or the end of a weight
    where the middle is in a gap behind it. None where nothing is sent.
    """
    if not bucket.is_packed or bucket.world_size == 1:
        return None
    middle = bucket.begin + bucket.slice_numel // 2
    owned = [i for i, shard in enumerate(bucket.shards) if shard.numel and bucket.offsets[i] <= middle]
    if not owned:
        return None
    position = owned[-1]
    weight, offset = bucket.parameters[position], bucket.offsets[position]
    rows, cols = weight.record.matrix
    matrix, row = divmod(min(middle - offset, weight.numel()) // cols, rows)
    row = matrix * rows + row // BLOCK * BLOCK
    sent = offset + row * cols - bucket.begin
    return (position, row, sent // 2) if sent > 0 else None
