"""Gradients that other ranks get as soon as they are there, where ranks share memory."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from zerofp4.distributed import error_text
from zerofp4.engine.flat import FlatBuffer
from zerofp4.engine.gradients import FlatGradients, GradientViews
from zerofp4.engine.peer_reducer import RowReducer
from zerofp4.engine.peers import Copies, Peers, halves
from zerofp4.engine.wire import Wire
from zerofp4.ops import PeerRows


class EarlyPeerReducer(RowReducer):
    """RowReducer whose buckets are begun with one by one, in a backward pass, as soon as it has made the
    gradients of each: the copy engines of a rank's GPU write to every owner what it owns of them, into memory
    of the owner's. No matrix product has fewer multiprocessors for it, and no rank waits for another before
    begin(), which waits on the device until what all ranks have begun with is there. So ranks need not begin
    with the same buckets, nor equally often; they step together with what each has begun with last.

    Memory beyond that of a GradientReducer: what the others have of this rank's slice, for every bucket, in
    the dtype in which it travels and in shared memory. No FP32 slices, unless something reads them.

    Three rules make it safe that nobody asks before writing into another rank's memory.

    - A row has one writer, whose copies are queued in one order. So what is begun with again, whatever became
      of the first time (zero_grad(), a vote that ended in an error, a step that was left out for a NaN, a
      pass that broke off), lands behind what that has sent.
    - Rows are read only behind begin(), which all ranks do or none: they have agreed before. Behind it no
      rank begins with anything before all have read their rows. reduce() ends in a barrier. A publication,
      which follows bring() and finish() whatever goes wrong in between, has one behind the update of each
      bucket, on the stream that copies to other ranks are queued on: those of the next round come behind it.
      What is dropped without begin() was not read, so nothing waits for that either.
    - Gradients are sent from flat memory, which lives as long as this object. p.grad that lie elsewhere, and
      zeros for those that there are not, are copied there on the stream that made them, which is where
      their owners free and write over them. Where a backward pass writes into flat memory from which copies
      are still queued, these are of gradients that were dropped, or that Rounds finds changed: what a step
      uses has left before anything behind begin(). Only memory that buckets have in turns waits until what
      it was sent from for has left.
    """

    def __init__(
        self, buffers: Sequence[FlatBuffer], group: dist.ProcessGroup | None, wire: Wire, peers: Peers
    ):
        super().__init__(buffers, group, wire, peers)
        self._left: dict[int, torch.cuda.Event] = {}  # by the address of a source, its last copies
        self.error: str | None = None
        """Why what this rank has sent since drop() is of no use."""

    def _make_rows(self) -> list[PeerRows]:
        self._received: list[torch.Tensor] = []
        self._copies: list[tuple[Copies, Copies]] = []
        return [self._connect(b, source) for b, source in enumerate(self._sources)]

    def _connect(self, b: int, source: FlatGradients) -> PeerRows:
        """Rows for what the others have of bucket b, and for this rank's own only where its source is memory
        that other buckets have in turns.
        """
        buffer, stays = self.buffers[b], isinstance(source, GradientViews)
        received = self._peers.zeros((self.world_size - stays, buffer.slice_numel), source.flat.dtype)
        copies = [
            (self._peers.at(r, received[_row(self.rank, r, stays)]), source.flat[r])
            for r in self._peers.others
        ]
        own = source.flat[self.rank]
        if not stays:
            copies.append((received[self.rank], own))
            own = received[self.rank]
            views = zip(buffer.indices, buffer.own_views(own), strict=True)
            self._own[b] = {i: view for i, view in views if view is not None}
        self._received.append(received)
        self._copies.append(halves(copies))
        rows = {r: received[_row(r, self.rank, stays)] for r in self._peers.others} | {self.rank: own}
        addresses = tuple(rows[r].data_ptr() for r in range(self.world_size))
        return PeerRows(addresses, buffer.slice_numel, received.dtype)

    def start(self, b: int, gradients: Mapping[int, torch.Tensor | None] | None) -> None:
        """Begin with bucket b, as an EarlyReducer does; gradients of None, of which the others have no use,
        are not sent. Waits for no other rank.
        """
        if gradients is None:
            return
        source = self._sources[b]
        place = source.flat.data_ptr()
        if place in self._left and not isinstance(source, GradientViews):
            self._left[place].wait()
        try:
            source.take(gradients)
        except Exception as error:  # told in the vote
            self.error = self.error or error_text(error)
            return
        self._left[place] = self._peers.start_copies(*self._copies[b])

    def drop(self) -> None:
        """What was begun with so far counts for nothing."""
        self.error = None

    def drain(self) -> None:
        """Have nothing on its way any more, for what is queued next on the current stream."""
        self._peers.wait_until_sent()

    def begin(self, gradients: Sequence[torch.Tensor | None], prepared: bool = False) -> None:
        """All ranks have what they have begun with, of each other."""
        self._peers.wait_until_sent()
        self._peers.arrive()

    def _before_reading(self, b: int) -> None:
        if self.error is not None:
            raise RuntimeError(self.error)


def _row(sender: int, receiver: int, stays: bool) -> int:
    """Which of the receiver's rows has what the sender sends; there is none for the receiver where its own
    stays.
    """
    return sender - (stays and sender > receiver)
