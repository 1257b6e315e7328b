"""Transport through memory that the GPUs of one host share."""

from collections.abc import Callable, Mapping, Sequence

import torch

from zerofp4 import ops
from zerofp4.distributed import error_text
from zerofp4.engine.collective import Turns, check_gradients
from zerofp4.engine.flat import FlatBuffer
from zerofp4.engine.gradient_memory import GradientMemory
from zerofp4.engine.peers import Copies, PeerGather, Peers, halves
from zerofp4.engine.transport import Arrived, Gradients
from zerofp4.engine.wire import Wire
from zerofp4.ops import PeerRows, RankGradients


def shared_gradients(
    buckets: Sequence[FlatBuffer], dtypes: Sequence[torch.dtype], wire: Wire, peers: Peers
) -> list[GradientMemory]:
    """By bucket, memory for this rank's own gradients that the other ranks read. Collective."""
    storages: set[int] = set()
    found = []
    for bucket, dtype in zip(buckets, dtypes, strict=True):
        flat = peers.zeros((bucket.world_size, bucket.slice_numel), dtype)
        found.append(GradientMemory(bucket, flat, storages if wire.keeps(bucket.parameters) else None))
    return found


class PeerTransport:
    """The owner of a slice reads the gradients of all ranks where they lie, as it adds them up in FP32, in
    rank order. The copy engines write its codes into the weights of every rank.

    Nothing of gradients is sent, so all of them lie in shared memory. begin() waits on the device until every
    rank has come, and they stay as they are until end() or, without one, the first gather of weights is over.

    buckets: of all ranks of peers.
    wire: the dtype in which gradients are read.
    peers: the ranks.
    """

    def __init__(self, buckets: Sequence[FlatBuffer], wire: Wire, peers: Peers):
        self.buckets, self._wire, self._peers = buckets, wire, peers
        self.dtypes = [wire.dtype_of(bucket.parameters) for bucket in buckets]
        self._own = shared_gradients(buckets, self.dtypes, wire, peers)
        self._rows = [peers.rows_like(own.flat[peers.rank]) for own in self._own]
        self._own_views = [own.own_views(peers.rank) for own in self._own]
        self._weights = PeerWeights(buckets, peers)
        self.open_weights, self.gather = self._weights.open, self._weights.gather
        self.halfway = self._weights.halfway

    def is_local(self, b: int) -> bool:
        return False

    def check(self, b: int, gradients: Gradients, names: Sequence[str]) -> None:
        check_gradients(self.buckets[b], self.dtypes[b], self._own[b], gradients, names, self._wire)

    def prepare(self, gradients: Gradients) -> Gradients:
        for own in self._own:
            own.take(gradients)
        return gradients

    def begin(self) -> None:
        self._peers.arrive()

    def send_gradients(self, b: int, gradients: Gradients | None) -> None:
        """Nothing: they are read where they are."""

    def discard(self, b: int) -> None:
        """Nothing: this rank's rows lie where the others read them."""

    def can_add_in_update(self, b: int) -> bool:
        return True

    def arrived(self, b: int, gradients: Gradients) -> Arrived:
        # Reads and copies that share NVLink make each other slower.
        self._peers.wait_until_sent()
        rank = self._peers.rank
        rows = RankGradients(self._rows[b], self.buckets[b].masters, rank)
        return Arrived(self._own_views[b], rows)

    def average(
        self,
        b: int,
        gradients: Gradients,
        squares: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> None:
        self._peers.wait_until_sent()
        ops.average_rows(self._rows[b], self.buckets[b].gradients if out is None else out, squares)

    def end(self) -> None:
        self._peers.arrive()

    def nbytes_sent(self, b: int) -> int:
        """Of what other ranks read here."""
        return (self._peers.size - 1) * self.buckets[b].slice_numel * self.dtypes[b].itemsize


class PushTransport:
    """As PeerTransport, for gradients that leave in backward passes: send_gradients() has the copy engines
    write to every owner what it owns of a bucket, into memory of the owner's.

    Besides p.grad it needs memory for what the other ranks have of this rank's slices, all buckets at once,
    in the dtype in which gradients are sent.

    [Note: writing into another rank's memory without asking]
    - A row has one writer, whose copies are queued in one order. A bucket that is sent again lands behind
      what was sent before, whatever became of that (zero_grad(), an agreement that ended in an error, a
      skipped step).
    - Rows are read only behind begin(), which all ranks call or none, since they have agreed before. Nobody
      sends anything before all ranks have read their rows: behind average() comes end(), which is a barrier,
      and behind arrived() the gather of weights, which has a barrier on the streams that copies are queued
      on.
    - Gradients are sent from flat memory, which lives as long as this object. Where a backward pass writes
      there while copies are queued, these are of gradients that were dropped: what a step uses has left
      before anything behind begin(). Memory that buckets share in turns waits until its copies have left.
    """

    def __init__(self, buckets: Sequence[FlatBuffer], wire: Wire, peers: Peers):
        self.buckets, self._wire, self._peers = buckets, wire, peers
        self.dtypes = [wire.dtype_of(bucket.parameters) for bucket in buckets]
        self._own = self._make_memory()
        self.error: str | None = None
        """Why what this rank has sent since drop() must not be used."""
        self._left: dict[int, torch.cuda.Event] = {}
        """By the address of own memory, the last copies that were queued from there."""
        self._copies: list[tuple[Copies, Copies]] = []
        self._rows: list[PeerRows] = []
        self._own_views: list[list[torch.Tensor | None]] = []
        self._received: list[torch.Tensor] = []
        for bucket, own in zip(buckets, self._own, strict=True):
            self._connect(bucket, own)
        self._weights = PeerWeights(buckets, peers)
        self.open_weights, self.gather = self._weights.open, self._weights.gather
        self.halfway = self._weights.halfway

    def _make_memory(self) -> list[GradientMemory]:
        keeps = [self._wire.keeps(bucket.parameters) for bucket in self.buckets]
        layouts = [
            ((b.world_size, b.slice_numel), dtype) for b, dtype in zip(self.buckets, self.dtypes, strict=True)
        ]
        copied = [layout for layout, stays in zip(layouts, keeps, strict=True) if not stays]
        turns, storages, found = Turns(copied, self._peers.device), set(), []
        for bucket, (shape, dtype), stays in zip(self.buckets, layouts, keeps, strict=True):
            if stays:
                flat = torch.zeros(shape, dtype=dtype, device=self._peers.device)
                found.append(GradientMemory(bucket, flat, storages))
            else:
                found.append(GradientMemory(bucket, turns.next(shape, dtype)))
        return found

    def _connect(self, bucket: FlatBuffer, own: GradientMemory) -> None:
        """Rows for what the other ranks send, and one for this rank's own where its memory is shared in
        turns.
        """
        peers, stays = self._peers, own.aliased
        received = peers.zeros((peers.size - stays, bucket.slice_numel), own.flat.dtype)

        def row(sender: int, receiver: int) -> int:
            return sender - (stays and sender > receiver)

        copies = [(peers.at(r, received[row(peers.rank, r)]), own.flat[r]) for r in peers.others]
        mine = own.flat[peers.rank]
        if not stays:
            copies.append((received[peers.rank], mine))
            mine = received[peers.rank]
        rows = {r: received[row(r, peers.rank)] for r in peers.others} | {peers.rank: mine}
        addresses = tuple(rows[r].data_ptr() for r in range(peers.size))
        self._rows.append(PeerRows(addresses, bucket.slice_numel, received.dtype))
        self._copies.append(halves(copies))
        self._received.append(received)
        self._own_views.append(bucket.own_views(mine))

    def is_local(self, b: int) -> bool:
        return False

    def check(self, b: int, gradients: Gradients, names: Sequence[str]) -> None:
        check_gradients(self.buckets[b], self.dtypes[b], self._own[b], gradients, names, self._wire)

    def prepare(self, gradients: Gradients) -> Gradients:
        return gradients  # they have been sent

    def start(self, b: int, gradients: Mapping[int, torch.Tensor | None] | None) -> None:
        """Send bucket b in a backward pass. Waits for no other rank, and is not collective."""
        if gradients is None:
            return
        own, place = self._own[b], self._own[b].flat.data_ptr()
        if place in self._left and not own.aliased:
            self._left[place].wait()
        try:
            own.take(gradients)
        except Exception as error:  # the agreement tells the others
            self.error = self.error or error_text(error)
            return
        self._left[place] = self._peers.start_copies(*self._copies[b])

    def drop(self) -> None:
        self.error = None

    def clear(self) -> None:
        """Nothing: no sums are kept."""

    def drain(self) -> None:
        self._peers.wait_until_sent()

    def begin(self) -> None:
        self._peers.wait_until_sent()
        self._peers.arrive()

    def send_gradients(self, b: int, gradients: Gradients | None) -> None:
        """Nothing: start() did."""

    def discard(self, b: int) -> None:
        """Nothing: this rank's rows lie where the others read them."""

    def can_add_in_update(self, b: int) -> bool:
        return True

    def arrived(self, b: int, gradients: Gradients) -> Arrived:
        self._raise_error()
        rank = self._peers.rank
        rows = RankGradients(self._rows[b], self.buckets[b].masters, rank)
        return Arrived(self._own_views[b], rows)

    def average(
        self,
        b: int,
        gradients: Gradients,
        squares: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> None:
        self._raise_error()
        ops.average_rows(self._rows[b], self.buckets[b].gradients if out is None else out, squares)

    def _raise_error(self) -> None:
        if self.error is not None:
            raise RuntimeError(self.error)

    def end(self) -> None:
        self._peers.arrive()

    def nbytes_sent(self, b: int) -> int:
        return (self._peers.size - 1) * self.buckets[b].slice_numel * self.dtypes[b].itemsize


class PeerWeights:
    """Weights in memory of all ranks: copy engines write each rank's slice to the others."""

    def __init__(self, buckets: Sequence[FlatBuffer], peers: Peers):
        self._buckets, self._peers = buckets, peers
        self._sent: dict[int, int] = {}
        """By bucket, how many elements of the slice left halfway through its cast."""

    def open(self) -> None:
        self._peers.open()

    def halfway(self, b: int) -> tuple[int, int, Callable[[], None]] | None:
        place = self._buckets[b].halfway
        return None if place is None else (place.position, place.row, lambda: self._start_sending(b))

    def _start_sending(self, b: int) -> None:
        self._sent[b] = self._buckets[b].halfway.sent
        self._peers.start_sending(self._buckets[b].weights, self._sent[b])

    def gather(self, b: int) -> PeerGather:
        return self._peers.start_gather(self._buckets[b].weights, self._sent.pop(b, 0))
