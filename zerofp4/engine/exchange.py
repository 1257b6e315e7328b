"""Gradients from the ranks that have them to the FP32 slices of their owners.

What travels are the gradients' own values; the rank that owns an element adds them up in FP32, in rank order.
So no bit is lost that the gradients had, no sum depends on a library's algorithm, and bfloat16 gradients take
half the bytes of FP32 sums.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from zerofp4 import ops
from zerofp4.distributed import GroupReference, OwnError, Pending, rank_and_size, start_exchange
from zerofp4.engine.flat import ALIGNMENT, FlatBuffer
from zerofp4.engine.gradients import FlatGradients, GradientViews
from zerofp4.engine.places import GradientPlaces
from zerofp4.engine.replicas import ReplicaMean
from zerofp4.engine.stretches import Brought, Flight, Stretch, Turns
from zerofp4.engine.wire import Wire


class GradientReducer:
    """Averages gradients over the group of each flat buffer, in FP32, into its `gradients`.

    group: of all ranks that step together, of which those of a buffer are some or all.

    begin(), and then finish() or bring() for each buffer, in order; while the gradients of one are added up,
    the next ones travel. Those of another group begin to travel only when their turn is there: how many
    buffers a rank has in a group must not change the order of what it does in others. Where gradients travel
    as autograd makes them, they lie in flat memory from the backward pass on (GradientViews), and nothing is
    copied; where they are rounded, they are copied to memory that two buffers have in turns. Collective: what
    goes wrong on this rank alone is raised once its part of a buffer has travelled, and the next buffers can
    follow.

    gradients_are_means: whether nothing need be reduced: bring(), finish() and means() have the gradients as
    they are, before reduce() and behind it.
    turns: of how many buffers what is received, or copied to be sent, has memory at a time; None for all.
    stays: whether gradients may lie where they travel from.
    """

    gradients_are_means = False

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        group: dist.ProcessGroup | None,
        wire: Wire,
        *,
        turns: int | None = 2,
        stays: bool = True,
    ):
        self._turns, self._stays = turns, stays
        self.buffers, self.group, self._wire = buffers, GroupReference(group), wire
        self.rank, self.world_size = rank_and_size(group)
        self.device = buffers[0].device
        self.dtypes = [wire.dtype_of(buffer.parameters) for buffer in buffers]
        self.bucket_mb = wire.bucket_mb
        self._travels_as = {
            i: dtype
            for buffer, dtype in zip(buffers, self.dtypes, strict=True)
            for i in buffer.indices
            if dtype != torch.float32
        }
        self._places = GradientPlaces()
        self._sources = self._make_sources()
        self._stretches: list[Stretch] = []
        self._ends: list[int] = []  # by buffer, the number of the first stretch behind it
        self._make_stretches()
        self._own = self._own_views()
        self._gradients: Sequence[torch.Tensor | None] = ()
        self._flight: list[Flight] = []
        self._replicas = ReplicaMean(buffers, self.device)
        self._squares = torch.zeros(ops.SQUARES, dtype=torch.int64, device=self.device)

    def _make_sources(self) -> list[FlatGradients]:
        """By buffer, where this rank's own gradients are when they travel."""
        several = self._stays and self.world_size > 1
        stay = [several and self._wire.keeps(buffer.parameters) for buffer in self.buffers]
        shapes = [(buffer.world_size, buffer.slice_numel) for buffer in self.buffers]
        layouts = list(zip(shapes, self.dtypes, strict=True))
        copied = [layout for layout, stays in zip(layouts, stay, strict=True) if not stays]
        turns = Turns(copied, self.device, self._turns)
        return [
            GradientViews(buffer, torch.zeros(shape, dtype=dtype, device=self.device), self._places)
            if stays
            else FlatGradients(buffer, turns.next(shape, dtype))
            for buffer, (shape, dtype), stays in zip(self.buffers, layouts, stay, strict=True)
        ]

    def _own_views(self) -> list[dict[int, torch.Tensor]]:
        """By buffer, what it brings of this rank's own gradients, by the position of the parameter."""
        pairs = zip(self._sources, self.buffers, strict=True)
        return [source.own_views(buffer.rank) for source, buffer in pairs]

    def _make_stretches(self) -> None:
        """Of what is larger than a bucket several, so that the memory for what is received is bounded."""
        parts = self._parts()
        travel = [p for b, own in zip(self.buffers, parts, strict=True) if b.world_size > 1 for p in own]
        turns = Turns([(part.shape, part.dtype) for part in travel], self.device, self._turns)
        for source, buffer, own in zip(self._sources, self.buffers, parts, strict=True):
            for number, part in enumerate(own):
                received = part if buffer.world_size == 1 else turns.next(part.shape, part.dtype)
                first = number * own[0].shape[1]
                messages = [[[row] for row in rows] for rows in (part, received)]
                self._stretches.append(Stretch(source, buffer, first, part, received, *messages))
            self._ends.append(len(self._stretches))

    def _parts(self) -> list[Sequence[torch.Tensor]]:
        """By buffer, of its source [world_size, n], for each stretch."""
        return [
            source.flat.split(self._chunk(buffer, source.flat), dim=1)
            for buffer, source in zip(self.buffers, self._sources, strict=True)
        ]

    def _chunk(self, buffer: FlatBuffer, flat: torch.Tensor) -> int:
        """How much of every slice travels at once."""
        if buffer.world_size == 1:
            return flat.shape[1]
        parts = max(self._wire.bucket_bytes // flat[:, :1].nbytes // ALIGNMENT * ALIGNMENT, ALIGNMENT)
        # What lies between the parameters of a bucket does not make it too large.
        fits = (
            sum(parameter.numel() for parameter in buffer.parameters) * flat.itemsize
            <= self._wire.bucket_bytes
        )
        return flat.shape[1] if fits else parts

    def means(self, gradients: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor]:
        """This rank's part of the means of the gradients that were reduced last, 1D; what is equal on several
        ranks one of them has. gradients: those that were given to be reduced, and have not changed.
        """
        return (buffer.gradients[buffer.part] for buffer in self.buffers if buffer.is_counted)

    def check(self, gradients: Sequence[torch.Tensor | None], names: Sequence[str]) -> None:
        """Raises TypeError for a gradient that would lose values on its way which nobody asked to lose, and
        RuntimeError for one that a backward pass has not finished.
        """
        for source in self._sources:
            source.check(gradients, names)
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

    def keep_apart(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """p.grad of all trainable parameters, each of which can be moved to where it travels from without a
        change of another: p.grad that were not are clones now. What may fail here comes before a vote.
        """
        return self._places.keep_apart(parameters, gradients)

    def nbytes_sent(self, b: int) -> int:
        """By this rank, of the gradients of buffer b in a step."""
        buffer = self.buffers[b]
        return (buffer.world_size - 1) * buffer.slice_numel * self.dtypes[b].itemsize

    def reduce(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Average the gradients of all trainable parameters; None counts as zeros. Returns the sums of the
        squares of this rank's slices that are counted, int64 ops.SQUARES, until the next call; None where
        none were added up.
        """
        error = OwnError()
        self.begin(gradients)
        self._squares.zero_()
        for b in range(len(self.buffers)):
            with error:
                self.finish(b, self._squares)
        self.forget()
        error.raise_if_any()
        return self._squares

    def prepare(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Before a vote, what begin(prepared=True) need not do then: what may fail on this rank alone.
        Returns the gradients that are to begin.
        """
        return gradients

    def begin(self, gradients: Sequence[torch.Tensor | None], prepared: bool = False) -> None:
        """Of all trainable parameters: those of the first buffer are on their way. prepared: prepare() was
        called, this is what it returned, and nothing has happened to the gradients since.
        """
        while self._flight:  # of a step that was left in the middle: its messages would arrive in this one's
            for work in self._flight.pop().works:
                work.wait()
        self._gradients = gradients
        self._start(0)

    def finish(self, b: int, squares: torch.Tensor | None = None) -> None:
        """Average those of buffer b, while the next ones travel. squares: those of the means are added to it,
        as ops.average does, where they are counted.
        """
        error, buffer = OwnError(), self.buffers[b]
        squares = squares if buffer.is_counted else None
        of_stretches = None if buffer.replica_count > 1 else squares
        for number in self._numbers(b):
            with error:
                stretch = self._arrive(number)
                last = stretch.first + stretch.received.shape[1]
                means, row = buffer.gradients[stretch.first : last], self._row(buffer)
                ops.average(stretch.received, means, stretch.here[row], row, of_stretches)
        if buffer.replica_count > 1:
            with error:
                self._replicas.take(buffer, squares)
        error.raise_if_any()

    def forget(self) -> None:
        """Nothing more of what was begun with is asked for: whoever has the gradients may free them."""
        self._gradients = ()

    def can_bring(self, b: int) -> bool:
        """Whether the gradients of buffer b travel all at once, or need not where others do."""
        return self.world_size > 1 and len(self._numbers(b)) == 1 and self.buffers[b].replica_count == 1

    def bring(self, b: int) -> Brought:
        """Those of buffer b as they were sent, for an update that adds them up as it reads them. They are
        here until the next but one buffer is begun with.
        """
        row = self._row(self.buffers[b])
        return Brought(self._arrive(self._numbers(b)[0]).received, self._own[b], row)

    def _numbers(self, b: int) -> range:
        """Of the stretches of buffer b."""
        return range(self._ends[b - 1] if b else 0, self._ends[b])

    def _arrive(self, number: int) -> Stretch:
        """A stretch, of which all is here for what is queued next on the current stream."""
        if not self._flight:
            self._start(number)
        if self._follows_in_its_group(number + 1):
            # Before this one is used: what is queued after that waits for it, the network too.
            self._start(number + 1)
        stretch, works, error = self._flight.pop(0)
        for work in works:
            work.wait()
        error.raise_if_any()
        return stretch

    def _follows_in_its_group(self, number: int) -> bool:
        """Whether there is such a stretch, in the group of the one before."""
        if number == len(self._stretches):
            return False
        return self._stretches[number].buffer.is_sharded_like(self._stretches[number - 1].buffer)

    def _start(self, number: int) -> None:
        stretch, error = self._stretches[number], OwnError()
        with error:
            self._fill(number)
        works = [] if stretch.buffer.world_size == 1 else self._send(stretch)
        self._flight.append(Flight(stretch, works, error))

    def _fill(self, number: int) -> None:
        """Have there what a stretch sends."""
        stretch = self._stretches[number]
        if stretch.first == 0:
            stretch.source.take(self._gradients)

    def _row(self, buffer: FlatBuffer) -> int:
        """Which row of what travels is this rank's own."""
        return buffer.rank

    def _send(self, stretch: Stretch) -> list[Pending]:
        return start_exchange(stretch.arrivals, stretch.sent, stretch.buffer.group(), "averaging gradients")
