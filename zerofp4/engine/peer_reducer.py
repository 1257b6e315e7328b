"""Gradients that do not travel: every rank reads the others' where they are."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from zerofp4 import ops
from zerofp4.distributed import OwnError
from zerofp4.engine.exchange import GradientReducer
from zerofp4.engine.flat import FlatBuffer
from zerofp4.engine.gradients import FlatGradients, GradientViews
from zerofp4.engine.peers import Peers
from zerofp4.engine.places import GradientPlaces
from zerofp4.engine.stretches import Brought
from zerofp4.engine.wire import Wire
from zerofp4.ops import PeerRows


def shared_sources(
    buffers: Sequence[FlatBuffer],
    dtypes: Sequence[torch.dtype],
    wire: Wire,
    places: GradientPlaces,
    peers: Peers,
) -> list[FlatGradients]:
    """Collective: by buffer, where this rank's own gradients are when others read them."""
    sources = []
    for buffer, dtype in zip(buffers, dtypes, strict=True):
        flat = peers.zeros((buffer.world_size, buffer.slice_numel), dtype)
        stays = wire.keeps(buffer.parameters)
        sources.append(GradientViews(buffer, flat, places) if stays else FlatGradients(buffer, flat))
    return sources


def take_all(
    sources: Sequence[FlatGradients], gradients: Sequence[torch.Tensor | None] | None
) -> list[OwnError]:
    """Have the gradients in all sources; None where they are. Returns, by source, what went wrong."""
    found = [OwnError() for _ in sources]
    if gradients is None:
        return found
    for source, error in zip(sources, found, strict=True):
        with error:
            source.take(gradients)
    return found


class RowReducer(GradientReducer):
    """GradientReducer of ranks that share memory, whose gradients of a slice are, of every rank, a row that
    this one can read where it is: nothing of them travels in messages.

    Behind begin() the device waits until all ranks have come. From then on the rows stay as they are until
    every rank has read its own: reduce() waits for that, and behind bring() and finish() a publication.
    """

    def __init__(
        self, buffers: Sequence[FlatBuffer], group: dist.ProcessGroup | None, wire: Wire, peers: Peers
    ):
        self._peers = peers
        super().__init__(buffers, group, wire)
        self._rows = self._make_rows()

    def _make_rows(self) -> list[PeerRows]:
        """By buffer. Collective."""
        raise NotImplementedError

    def _before_reading(self, b: int) -> None:
        """What the rows of buffer b wait for; raises what went wrong on this rank with its own."""
        raise NotImplementedError

    def _make_stretches(self) -> None:
        """There are none."""

    def reduce(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        try:
            return super().reduce(gradients)
        finally:
            self._peers.arrive()  # all have read them, which may be written to again

    def finish(self, b: int, squares: torch.Tensor | None = None) -> None:
        self._before_reading(b)
        ops.average_rows(self._rows[b], self.buffers[b].gradients, squares)

    def can_bring(self, b: int) -> bool:
        return True

    def bring(self, b: int) -> Brought:
        self._before_reading(b)
        return Brought(self._rows[b], self._own[b], self._row(self.buffers[b]))


class PeerReducer(RowReducer):
    """RowReducer of ranks that have the gradients of all buffers in shared memory, each its own whole: the
    owner of a slice reads it in the memory of every rank as it adds them up, in FP32 and in rank order.

    What reads there waits until codes of other buckets have left: copies and reads that share NVLink make
    each other slower.
    """

    def __init__(
        self, buffers: Sequence[FlatBuffer], group: dist.ProcessGroup | None, wire: Wire, peers: Peers
    ):
        super().__init__(buffers, group, wire, peers)
        self._errors = [OwnError() for _ in buffers]

    def _make_sources(self) -> list[FlatGradients]:
        return shared_sources(self.buffers, self.dtypes, self._wire, self._places, self._peers)

    def _make_rows(self) -> list[PeerRows]:
        return [self._peers.rows_like(source.flat[self.rank]) for source in self._sources]

    def prepare(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        for source in self._sources:
            source.take(gradients)
        return gradients

    def begin(self, gradients: Sequence[torch.Tensor | None], prepared: bool = False) -> None:
        self._errors = take_all(self._sources, None if prepared else gradients)
        self._peers.arrive()

    def _before_reading(self, b: int) -> None:
        self._errors[b].raise_if_any()
        self._peers.wait_until_sent()
