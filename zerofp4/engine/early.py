"""Gradients that begin to travel before all of them are there."""

import collections
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerofp4 import ops
from zerofp4.distributed import OwnError, Pending, error_text
from zerofp4.engine.exchange import GradientReducer
from zerofp4.engine.flat import FlatBuffer
from zerofp4.engine.gradients import FlatGradients, GradientViews
from zerofp4.engine.stretches import Stretch
from zerofp4.engine.wire import Wire


class Underway(NamedTuple):
    """A stretch of bucket b that travels. age: of the sums that it is for, see drop(). is_first: whether they
    begin with it.
    """

    b: int
    stretch: Stretch
    works: list[Pending]
    age: int
    is_first: bool


class EarlyReducer(GradientReducer):
    """A GradientReducer whose buckets are begun with one by one, in their order: in a backward pass, as soon
    as it has made the gradients of each. Every rank begins with every bucket as often as the others do, in
    the same order; one turn through all of them is a round. Building it is collective.

    adds: rounds add to the FP32 slices until drop(); their sums are those of the means. Then gradients are
    copied away when they begin to travel, and nothing of them is needed where they were.

    Memory beyond that of a GradientReducer: the FP32 slices, 4 bytes for each element of this rank's share,
    since each bucket is averaged into them when the next but one begins. On a GPU what is received still
    takes turns of two: a stream of its own waits for it and averages, and neither the host nor the backward
    pass waits. On the CPU only the host could wait, so what is received has a place for every bucket, as much
    as all gradients in the dtype in which they travel. With `adds`, the places that gradients are copied to
    are as many, two or all, in place of memory for the gradients of a whole model, and as much as a bucket
    holds in FP32 is for sums.

    turns: how many places there are for what is received; None as said.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        group: dist.ProcessGroup | None,
        wire: Wire,
        *,
        adds: bool = False,
        turns: int | None = None,
    ):
        on_gpu = buffers[0].device.type == "cuda"
        super().__init__(buffers, group, wire, turns=2 if on_gpu else turns, stays=not adds)
        self._adds = adds
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None
        self._underway: collections.deque[Underway] = collections.deque()
        self._age = self._rounds = 0
        self.error: str | None = None
        """Why what this rank has sent since drop() is of no use; then the others' is not added up either."""
        for buffer in buffers:
            buffer.gradients.zero_()
        most = max(stretch.received.shape[1] for stretch in self._stretches) if adds else 0
        self._means = torch.empty(most, dtype=torch.float32, device=self.device)
        self._connect()

    def _connect(self) -> None:
        """Have all ranks send each other one element. NCCL connects two ranks in their first messages, for
        which the host of each waits: in a backward pass that would be for ever, were it for a rank whose own
        pass broke off, and which waits elsewhere.
        """
        stretch = self._stretches[0]
        if stretch.buffer.world_size > 1:
            sides = [
                [[m[:1] for m in of_rank] for of_rank in side] for side in (stretch.sent, stretch.arrivals)
            ]
            for work in self._send(stretch._replace(sent=sides[0], arrivals=sides[1])):
                work.wait()

    def start(self, b: int, gradients: Mapping[int, torch.Tensor | None] | None) -> None:
        """Begin with bucket b, the next one in order. gradients: by the position of the parameter; None for a
        round that is only to end, whatever it brings. Waits for the other ranks only where memory is still
        in use.
        """
        source = self._sources[b]
        # Where gradients stay nothing is written but on the stream of backward passes: the next of them may
        # be there, after zero_grad(), before the other stream is.
        stays = isinstance(source, GradientViews)
        if gradients is not None and stays:
            self._take(source, gradients)
        with self._aside():
            for number in self._numbers(b):
                stretch = self._stretches[number]
                if stretch.first == 0 and b == 0:
                    if not self._adds:  # what an earlier round, which no step has used, still brings
                        self._age += 1
                    self._squares.zero_()
                self._make_room(stretch)
                if stretch.first == 0 and gradients is not None and not stays:
                    self._take_aside(source, gradients, self.buffers[b].indices)
                works = [] if stretch.buffer.world_size == 1 else self._send(stretch)
                self._underway.append(Underway(b, stretch, works, self._age, self._rounds == 0))
        if b + 1 == len(self.buffers):
            self._rounds += 1

    def drop(self) -> None:
        """What was begun with so far will arrive, and counts for nothing; the next round begins new sums."""
        self._age += 1
        self._rounds, self.error = 0, None

    def clear(self) -> None:
        """The sums of no round: zeros. Does nothing where there was a round since drop()."""
        if self._rounds == 0:
            with self._aside():  # behind averages of rounds before drop()
                for buffer in self.buffers:
                    buffer.gradients.zero_()

    def drain(self) -> None:
        """Have nothing on its way any more."""
        with self._aside():
            while self._underway:
                self._land()

    def begin(self, gradients: Sequence[torch.Tensor | None], prepared: bool = False) -> None:
        """Nothing: they have been begun with."""

    def can_bring(self, b: int) -> bool:
        return False

    def finish(self, b: int, squares: torch.Tensor | None = None) -> None:
        """Have the averages of bucket b in its slice, for what is queued next on the current stream."""
        with self._aside():
            while any(underway.b <= b for underway in self._underway):
                self._land()
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        if self.error is not None:
            raise RuntimeError(self.error)

    def reduce(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Have all averages. Returns the sums of their squares as a GradientReducer does; None with `adds`,
        where they are those of sums.
        """
        error = OwnError()
        for b in range(len(self.buffers)):
            with error:
                self.finish(b)
        error.raise_if_any()
        return None if self._adds else self._squares

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """On the stream where what travels is waited for, behind all that is queued on the current one."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def _take(self, source: FlatGradients, gradients: Mapping[int, torch.Tensor | None]) -> None:
        try:
            source.take(gradients)
        except Exception as error:  # the others wait for this rank's part, whatever it is
            self.error = self.error or error_text(error)

    def _take_aside(
        self,
        source: FlatGradients,
        gradients: Mapping[int, torch.Tensor | None],
        indices: Sequence[int],
    ) -> None:
        self._take(source, gradients)
        if self._stream is not None:
            for i in indices:
                if gradients[i] is not None:  # their owners may free them before they are copied
                    gradients[i].record_stream(self._stream)

    def _make_room(self, stretch: Stretch) -> None:
        """Have nothing on its way that uses the memory of a stretch."""
        places = {stretch.received.data_ptr()}
        if stretch.first == 0:  # else the source has been filled, for all stretches of the bucket
            places.add(stretch.source.flat.data_ptr())
        while any(
            not places.isdisjoint((old.stretch.received.data_ptr(), old.stretch.source.flat.data_ptr()))
            for old in self._underway
        ):
            self._land()

    def _land(self) -> None:
        """Wait for the oldest that is on its way, and have the averages of what arrived."""
        underway = self._underway.popleft()
        for work in underway.works:
            work.wait()
        if underway.age != self._age or self.error is not None:
            return
        stretch = underway.stretch
        arrived, rank = stretch.received, stretch.buffer.rank
        own = stretch.here[rank]
        averages = stretch.buffer.gradients[stretch.first : stretch.first + arrived.shape[1]]
        if not self._adds:
            squares = self._squares if stretch.buffer.is_counted else None
            ops.average(arrived, averages, own, rank, squares)
        elif underway.is_first:
            ops.average(arrived, averages, own, rank)
        else:
            means = self._means[: arrived.shape[1]]
            ops.average(arrived, means, own, rank)
            averages.add_(means)
