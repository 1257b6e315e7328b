"""Gradients from the model's parameters to the ranks' FP32 slices, through a bounded staging buffer.

What travels are the gradients' own values; the rank that owns an element adds them up in FP32, in rank order.
So no bit is lost that the gradients had, no sum depends on a library's algorithm, and bfloat16 gradients take
half the bytes of FP32 sums.
"""

import bisect
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerofp4 import ops
from zerofp4.distributed import GroupReference, Pending, rank_and_size, start_exchange
from zerofp4.engine.failures import Failures
from zerofp4.engine.flat import ALIGNMENT, FlatBuffer
from zerofp4.engine.wire import Wire
from zerofp4.shard import intersect
from zerofp4.storage import dispatches

DIRECT_BYTES = 1 << 20
"""A piece of a gradient that is this long is sent from where it is, as a message of its own; what is shorter
is packed first, with what lies between, since every message costs the network's startup.
"""


class Piece(NamedTuple):
    """Elements [first, last) of the gradient of a parameter, and where they go.

    whole: these are all of its elements; then the destination has the parameter's shape, else it is 1D.
    """

    parameter: int
    first: int
    last: int
    destination: torch.Tensor
    whole: bool


class Message(NamedTuple):
    """Elements [first, last) of a stretch, which travel alone. piece: what they are, if it is sent from where
    it is; None for what is packed.
    """

    first: int
    last: int
    piece: Piece | None


class Stretch(NamedTuple):
    """The same part of every rank's slice.

    sent: [world_size, n] of the dtype that travels, rank r's part in row r. received: this rank's part from
    every rank; its own is packed there. buffer, first: whose slices, and where it begins. own: this rank's
    part. pieces: of the others', what is packed in any case. gaps: what is packed and belongs to no
    parameter. messages: by rank, what it is sent. In a world of one where nothing is rounded, sent and
    received are where the gradients go.
    """

    sent: torch.Tensor
    received: torch.Tensor
    buffer: FlatBuffer
    first: int
    own: list[Piece]
    pieces: list[Piece]
    gaps: list[torch.Tensor]
    messages: list[list[Message]]

    def staged(self, rank: int) -> list[list[torch.Tensor]]:
        """What is sent to each rank by message where all of it is packed."""
        return [
            [row[m.first : m.last] for m in messages if to != rank]
            for to, (row, messages) in enumerate(zip(self.sent, self.messages, strict=True))
        ]


class Brought(NamedTuple):
    """Gradients of a buffer that are here, and not added up yet.

    received: [world_size, slice_numel], of every other rank. own: this rank's, 1D, by the position of the
    parameter; their memory is that of the parameter's gradient where that is as it travels.
    """

    received: torch.Tensor
    own: dict[int, torch.Tensor]


class Flight(NamedTuple):
    """A stretch that travels. failures: what went wrong on this rank before it did; what the others get of
    it then is of no use, and nobody waits for it.
    """

    stretch: Stretch
    works: list[Pending]
    failures: Failures


class GradientReducer:
    """Averages gradients over the group, in FP32, into the `gradients` of flat buffers.

    begin(), and then finish() or bring() for each buffer, in order; while the gradients of one are added up,
    the next ones travel. In a world of one they are packed where they belong. Collective: what goes wrong on
    this rank alone is raised once its part of a buffer has travelled, and the next buffers can follow.
    """

    def __init__(self, buffers: Sequence[FlatBuffer], group: dist.ProcessGroup | None, wire: Wire):
        self.buffers, self.group, self._wire = buffers, GroupReference(group), wire
        self.rank, self.world_size = rank_and_size(group)
        self.dtypes = [wire.dtype_of(buffer.parameters) for buffer in buffers]
        self.bucket_mb = wire.bucket_mb
        self._travels_as = {
            i: dtype
            for buffer, dtype in zip(buffers, self.dtypes, strict=True)
            for i in buffer.indices
            if dtype != torch.float32
        }
        self._stretches: list[Stretch] = []
        self._ends: list[int] = []  # by buffer, the number of the first stretch behind it
        if self.world_size == 1 and wire.dtype in (None, torch.float32):
            self._make_in_place()
        else:
            self._make_staged()
        self._gradients: Sequence[torch.Tensor | None] = ()
        self._unpacked: frozenset[int] = frozenset()
        self._flight: list[Flight] = []

    def _make_in_place(self) -> None:
        for buffer in self.buffers:
            whole = buffer.gradients.view(1, -1)
            self._stretches.append(make_stretch(buffer, 0, buffer.slice_numel, whole, whole))
            self._ends.append(len(self._stretches))

    def _make_staged(self) -> None:
        """Of what is larger than a bucket several stretches, so that the staging is bounded."""
        chunks = []
        for buffer, dtype in zip(self.buffers, self.dtypes, strict=True):
            part = self._wire.bucket_bytes // (dtype.itemsize * self.world_size)
            chunks.append(min(buffer.slice_numel, max(part // ALIGNMENT * ALIGNMENT, ALIGNMENT)))
        longest = max(c * d.itemsize for c, d in zip(chunks, self.dtypes, strict=True))
        # Two are packed and sent, two received and added up, in turns.
        device = self.buffers[0].device
        staging = torch.empty(4, self.world_size * longest, dtype=torch.uint8, device=device)
        for buffer, chunk, dtype in zip(self.buffers, chunks, self.dtypes, strict=True):
            for start in range(0, buffer.slice_numel, chunk):
                size = min(chunk, buffer.slice_numel - start)
                turn = 2 * (len(self._stretches) % 2)
                nbytes = self.world_size * size * dtype.itemsize
                shape = self.world_size, size
                sent, received = (row[:nbytes].view(dtype).view(shape) for row in staging[turn : turn + 2])
                self._stretches.append(make_stretch(buffer, start, size, sent, received))
            self._ends.append(len(self._stretches))

    def check(self, gradients: Sequence[torch.Tensor | None], names: Sequence[str]) -> None:
        """Raises TypeError for a gradient that would lose values on its way which nobody asked to lose."""
        if self._wire.dtype is not None:
            return
        for i, dtype in self._travels_as.items():
            gradient = gradients[i]
            if gradient is not None and gradient.dtype != dtype:
                raise TypeError(
                    f"{names[i]} has a gradient of {gradient.dtype}, which would be rounded to {dtype} to be "
                    "added to those of other ranks: build the optimizer with gradient_wire=torch.float32, or "
                    f"{dtype} if that is meant"
                )

    def reduce(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Average the gradients of all trainable parameters; None counts as zeros."""
        failures = Failures()
        self.begin(gradients)
        for b in range(len(self.buffers)):
            with failures:
                self.finish(b)
        failures.raise_first()

    def begin(self, gradients: Sequence[torch.Tensor | None], brought: Collection[int] = ()) -> None:
        """Of all trainable parameters: those of the first buffer are on their way.

        brought: buffers for which bring() will be called, which can_bring().
        """
        while self._flight:  # of a step that was left in the middle: its messages would arrive in this one's
            for work in self._flight.pop().works:
                work.wait()
        self._gradients = gradients
        self._unpacked = frozenset(self._ends[b] - 1 for b in brought)
        self._start(0)

    def finish(self, b: int) -> None:
        """Average those of buffer b, while the next ones travel."""
        failures = Failures()
        for number in self._numbers(b):
            with failures:
                stretch = self._arrive(number)
                if stretch.received is not stretch.sent:
                    last = stretch.first + stretch.received.shape[1]
                    ops.average(stretch.received, stretch.buffer.gradients[stretch.first : last])
        failures.raise_first()

    def can_bring(self, b: int) -> bool:
        """Whether the gradients of buffer b travel all at once."""
        return self.world_size > 1 and len(self._numbers(b)) == 1

    def bring(self, b: int) -> Brought:
        """Those of buffer b as they were sent, for an update that adds them up as it reads them. They are
        here until the next but one buffer is begun with.
        """
        gradients = self._gradients
        stretch = self._arrive(self._numbers(b)[0])
        own = {}
        for piece in stretch.own:
            gradient = gradients[piece.parameter]
            if gradient is not None and is_sendable(gradient, stretch.received.dtype):
                own[piece.parameter] = gradient.view(-1)[piece.first : piece.last]
            else:
                own[piece.parameter] = piece.destination.view(-1)
        return Brought(stretch.received, own)

    def _numbers(self, b: int) -> range:
        """Of the stretches of buffer b."""
        return range(self._ends[b - 1] if b else 0, self._ends[b])

    def _arrive(self, number: int) -> Stretch:
        """A stretch, of which all is here for what is queued next on the current stream."""
        # Before this one is used: what is queued after that waits for it, the network too.
        self._start(number + 1)
        stretch, works, failures = self._flight.pop(0)
        if number + 1 == len(self._stretches):
            self._gradients = ()
        for work in works:
            work.wait()
        failures.raise_first()
        return stretch

    def _start(self, number: int) -> None:
        if number == len(self._stretches):
            return
        stretch, failures = self._stretches[number], Failures()
        sent = stretch.staged(self.rank)
        with failures:
            sent = pack(stretch, self._gradients, self.rank, keep_own=number in self._unpacked)
        works = [] if self.world_size == 1 else self._send(stretch, sent)
        self._flight.append(Flight(stretch, works, failures))

    def _send(self, stretch: Stretch, sent: Sequence[Sequence[torch.Tensor]]) -> list[Pending]:
        own = stretch.messages[self.rank]
        received = [[row[m.first : m.last] for m in own] for row in stretch.received]
        return start_exchange(received, sent, self.group(), "averaging gradients")


def make_stretch(
    buffer: FlatBuffer, start: int, size: int, sent: torch.Tensor, received: torch.Tensor
) -> Stretch:
    """Elements [start, start + size) of every slice: this rank's are packed into `received`, the others'
    into `sent`.
    """
    own: list[Piece] = []
    packed: list[Piece] = []
    gaps: list[torch.Tensor] = []
    messages: list[list[Message]] = []
    for rank in range(buffer.world_size):
        row = (received if rank == buffer.rank else sent)[rank]
        pieces, filled = [], 0
        for at, piece in _pieces(buffer, rank * buffer.slice_numel + start, row):
            if at > filled:
                gaps.append(row[filled:at])
            filled = at + piece.last - piece.first
            pieces.append((at, piece))
        if filled < size:
            gaps.append(row[filled:])
        messages.append(make_messages(pieces, size, row.itemsize))
        if rank == buffer.rank:
            own = [piece for _, piece in pieces]
        else:
            direct = {id(m.piece) for m in messages[-1]}
            packed += [piece for _, piece in pieces if id(piece) not in direct]
    return Stretch(sent, received, buffer, start, own, packed, gaps, messages)


def _pieces(buffer: FlatBuffer, begin: int, row: torch.Tensor) -> Iterator[tuple[int, Piece]]:
    """What lies in a row that stands for elements [begin, begin + len(row)) of a flat buffer, and where."""
    end = begin + row.numel()
    i = max(bisect.bisect_right(buffer.offsets, begin) - 1, 0)
    while i < len(buffer.offsets) and buffer.offsets[i] < end:
        parameter = buffer.parameters[i]
        part = intersect(buffer.offsets[i], parameter.numel(), begin, end)
        if part.numel:
            at = buffer.offsets[i] + part.start - begin
            whole = part.numel == parameter.numel()
            destination = row[at : at + part.numel].view(parameter.shape if whole else -1)
            yield at, Piece(buffer.indices[i], part.start, part.end, destination, whole)
        i += 1


def make_messages(pieces: Sequence[tuple[int, Piece]], size: int, itemsize: int) -> list[Message]:
    """A stretch of `size` elements cut into messages, the same on the rank that sends it and on that which
    receives it, whatever gradients they have.
    """
    messages, end = [], 0
    for at, piece in pieces:
        numel = piece.last - piece.first
        if numel * itemsize >= DIRECT_BYTES:
            if at > end:
                messages.append(Message(end, at, None))
            end = at + numel
            messages.append(Message(at, end, piece))
    if end < size:
        messages.append(Message(end, size, None))
    return messages


def pack(
    stretch: Stretch, gradients: Sequence[torch.Tensor | None], rank: int, *, keep_own: bool
) -> list[list[torch.Tensor]]:
    """What this rank sends to each rank, by message; its own part is packed into `received`, with keep_own
    only what is not already as it travels. Gradients have any floating dtype and the shapes of their
    parameters.
    """
    dtype, pieces, sent = stretch.sent.dtype, list(stretch.pieces), []
    for piece in stretch.own:
        gradient = gradients[piece.parameter]
        if not (keep_own and gradient is not None and is_sendable(gradient, dtype)):
            pieces.append(piece)
    for to, messages in enumerate(stretch.messages):
        sent.append([])
        for m in messages if to != rank else ():
            gradient = None if m.piece is None else gradients[m.piece.parameter]
            if gradient is not None and is_sendable(gradient, dtype):
                sent[to].append(gradient.view(-1)[m.piece.first : m.piece.last])
                continue
            if m.piece is not None:
                pieces.append(m.piece)
            sent[to].append(stretch.sent[to, m.first : m.last])
    fill(pieces, stretch.gaps, gradients)
    return sent


def is_sendable(gradient: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether its memory holds its elements one after the other, as they travel."""
    return (
        gradient.dtype == dtype
        and not dispatches(gradient)
        and gradient.is_contiguous()
        and not gradient.is_neg()
        and not gradient._is_zerotensor()
    )


def fill(
    pieces: Sequence[Piece], gaps: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> None:
    """Copy pieces of gradients where they go, rounding them; zeros for None and into gaps."""
    zeros, destinations, sources = list(gaps), [], []
    for piece in pieces:
        gradient = gradients[piece.parameter]
        if gradient is None:
            zeros.append(piece.destination)
        else:
            destinations.append(piece.destination)
            # A view costs more than all else here, and most pieces are whole.
            part = gradient if piece.whole else gradient.reshape(-1)[piece.first : piece.last]
            sources.append(part)
    if zeros:
        torch._foreach_zero_(zeros)
    if sources:
        torch._foreach_copy_(destinations, sources)
