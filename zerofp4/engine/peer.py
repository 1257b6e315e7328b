"""Transport through memory that the GPUs of one host share."""

from collections.abc import Callable, Sequence

import torch

from zerofp4 import ops
from zerofp4.distributed import error_text
from zerofp4.engine.buckets import Bucket, GradientMemory, Gradients, gradient_memory, zeros_on
from zerofp4.engine.peers import Copies, Peers, halves
from zerofp4.engine.step import UPDATE_DTYPES, Arrived, Transport
from zerofp4.format import BLOCK
from zerofp4.ops import PeerRows, RankGradients


class PeerTransport(Transport):
    """The owner of a slice reads the gradients of all ranks as it adds them up in FP32, in rank order. The
    copy engines write its codes into the weights of every rank.

    Without `early` the gradients of every rank lie in its own shared memory, where the owners read them, and
    nothing is sent. begin() waits on the device until every rank has come, and gradients stay as they are
    until end() or, without one, the first gather of weights is over.

    With `early` send_gradients() has the copy engines write to every owner what it owns of a bucket. Besides
    p.grad this needs memory on each owner for the rows of the other ranks, all buckets at once, in the dtype
    in which gradients are sent.

    [Note: writing into another rank's memory without asking]
    - A row has one writer, whose copies are queued in one order: a bucket that is sent again lands behind
      what was sent before, whatever became of that (zero_grad(), a skipped step).
    - Rows are read only behind begin(), which all ranks call or none, since they have agreed before. Nobody
      sends anything before all ranks have read their rows: behind average() comes end(), which is a barrier,
      and behind arrived() the gather of weights, which has a barrier on the streams that copies are queued
      on.
    - Gradients are sent from memory that lives as long as this object. Where a backward pass writes there
      while copies are queued, these are of gradients that were dropped: what a step uses has left before
      anything behind begin(). Memory that buckets use in turns waits until its copies have left.

    [Note: three buffers in turns] With `in_turns` the shared memory of a rank has the gradients of three
    buckets at a time. send_gradients() copies a bucket there; arrived(), average() and discard() wait in a
    barrier until every rank has. Every rank sends bucket b + 1, enters the barrier of bucket b, and reads
    bucket b. So behind the barrier of bucket b + 1 nobody reads bucket b any more, and in front of it nobody
    has sent bucket b + 3, which is copied over bucket b. Behind the last bucket come the gathers of weights,
    as above.

    early: whether a BackwardSchedule sends gradients.
    in_turns: whether buckets have memory in turns. Then begin() does not wait.
    """

    def __init__(
        self, buckets: Sequence[Bucket], peers: Peers, early: bool = False, in_turns: bool = False
    ):
        self.buckets, self._peers, self._early, self._in_turns = buckets, peers, early, in_turns
        self.dtypes = [bucket.sent_as for bucket in buckets]
        self.adds_in_update = [bucket.sent_as in UPDATE_DTYPES for bucket in buckets]
        self.sent_bytes = [bucket.sent_bytes for bucket in buckets]
        self.error: str | None = None
        """Why what this rank has sent since drop() must not be used."""
        self._rows: list[PeerRows] = []
        """By bucket, what all ranks have of this rank's slice."""
        self._own_views: list[list[torch.Tensor | None]] = []
        """By bucket, this rank's own row by parameter."""
        self._copies: list[tuple[Copies, Copies]] = []
        """By bucket, what send_gradients() copies to the other ranks."""
        self._received: list[torch.Tensor] = []
        """By bucket, where the other ranks copy it to."""
        self._left: dict[int, torch.cuda.Event] = {}
        """By the address of own memory, the last copies that were queued from there."""
        self._halfway = [find_halfway(bucket) for bucket in buckets]
        self._sent_halfway: dict[int, int] = {}
        """By bucket, how many elements of the slice of weights left halfway through its cast."""
        if early:
            self.memory = gradient_memory(buckets, zeros_on(peers.device), count=2)
        else:
            self.memory = gradient_memory(buckets, peers.zeros, 3 if in_turns else None, aliased=not in_turns)
        for bucket, memory in zip(buckets, self.memory, strict=True):
            own = memory.flat[peers.rank]
            if early:
                own = self._connect(bucket, memory)
            else:
                self._rows.append(peers.rows_like(own))
            self._own_views.append(bucket.own_views(own))

    def _connect(self, bucket: Bucket, memory: GradientMemory) -> torch.Tensor:
        """Make rows for what other ranks send, and for this rank's own where its memory is used in turns.
        Returns this rank's own row.
        """
        peers = self._peers
        received = peers.zeros((peers.size - memory.aliased, bucket.slice_numel), memory.flat.dtype)

        def row(sender: int, receiver: int) -> torch.Tensor:
            return received[(sender - receiver - 1) % peers.size]  # the last one is the receiver's own

        copies = [(peers.at(r, row(peers.rank, r)), memory.flat[r]) for r in peers.others]
        mine = memory.flat[peers.rank]
        if not memory.aliased:
            copies.append((row(peers.rank, peers.rank), mine))
            mine = row(peers.rank, peers.rank)
        rows = [mine if r == peers.rank else row(r, peers.rank) for r in range(peers.size)]
        self._rows.append(PeerRows(tuple(r.data_ptr() for r in rows), bucket.slice_numel, received.dtype))
        self._copies.append(halves(copies))
        self._received.append(received)
        return mine

    def prepare(self, gradients: Gradients, as_sent: bool = False) -> Gradients:
        for memory in () if self._early or self._in_turns else self.memory:
            memory.take(gradients)
        return gradients

    # Gradients

    def begin(self) -> None:
        if self._in_turns:
            self.error = None
            return
        if self._early:
            self._peers.wait_until_sent()
        self._peers.arrive()

    def send_gradients(self, b: int, gradients: Gradients | None) -> None:
        """Waits for no other rank. Does nothing where other ranks read gradients where they are."""
        if gradients is None or not (self._early or self._in_turns):
            return
        memory, place = self.memory[b], self.memory[b].flat.data_ptr()
        if place in self._left and not memory.aliased:
            self._left[place].wait()
        try:
            memory.take(gradients)
        except Exception as error:  # the agreement tells the others
            self.error = self.error or error_text(error)
            return
        if self._early:
            self._left[place] = self._peers.start_copies(*self._copies[b])

    def arrived(self, b: int, gradients: Gradients) -> Arrived:
        self._wait()
        rows = RankGradients(self._rows[b], self.buckets[b].masters, self._peers.rank)
        return Arrived(self._own_views[b], rows)

    def average(self, b: int, gradients: Gradients, squares: torch.Tensor | None = None) -> None:
        self._wait()
        ops.average(self._rows[b], self.buckets[b].gradients, squares=squares)

    def discard(self, b: int) -> None:
        if self._in_turns:
            self._peers.arrive()

    def _wait(self) -> None:
        if self._in_turns:
            self._peers.arrive()
        if self.error is not None:
            raise RuntimeError(self.error)

    def end(self) -> None:
        self._peers.arrive()

    # With a BackwardSchedule

    def drop(self) -> None:
        """What was sent so far counts for nothing."""
        self.error = None

    def drain(self) -> None:
        """Have nothing on its way any more."""
        self._peers.wait_until_sent()

    # Weights

    def open_weights(self) -> None:
        self._peers.open()

    def halfway(self, b: int) -> tuple[int, int, Callable[[], None]] | None:
        if self._halfway[b] is None:
            return None
        position, row, sent = self._halfway[b]

        def send() -> None:
            self._sent_halfway[b] = sent
            self._peers.start_sending(self.buckets[b].weights, sent)

        return position, row, send

    def gather(self, b: int) -> torch.cuda.Event:
        bucket = self.buckets[b]
        if bucket.scales is not None:
            self._peers.start_sending(bucket.scales.view(-1), bucket.scales.shape[1])
        return self._peers.start_gather(bucket.weights, self._sent_halfway.pop(b, 0))


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
