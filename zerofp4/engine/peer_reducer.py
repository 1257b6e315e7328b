"""Gradients that do not travel: every rank reads the others' where they are."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from zerofp4 import ops
from zerofp4.engine.exchange import Brought, GradientReducer
from zerofp4.engine.failures import Failures
from zerofp4.engine.flat import FlatBuffer
from zerofp4.engine.gradients import FlatGradients, GradientViews
from zerofp4.engine.peers import Peers
from zerofp4.engine.wire import Wire


class PeerReducer(GradientReducer):
    """GradientReducer of ranks that share memory: the gradients of all buffers lie there, each rank's own
    whole, and the owner of a slice reads that of every rank as it adds them up, in FP32 and in rank order.

    Behind begin() the device waits until all ranks have come; from then on nothing is written there before
    every rank has read it, which reduce() waits for, and a publication after finish() or bring(). What reads
    it waits until codes of other buckets have left: copies and reads that share NVLink make each other
    slower.
    """

    def __init__(
        self, buffers: Sequence[FlatBuffer], group: dist.ProcessGroup | None, wire: Wire, peers: Peers
    ):
        self._peers = peers
        super().__init__(buffers, group, wire)
        self._rows = [peers.peer_rows(source.flat, self.rank) for source in self._sources]
        self._failures = [Failures() for _ in buffers]

    def _make_sources(self) -> list[FlatGradients]:
        sources = []
        for buffer, dtype in zip(self.buffers, self.dtypes, strict=True):
            flat = self._peers.zeros((buffer.world_size, buffer.slice_numel), dtype)
            stays = self._wire.keeps(buffer.parameters)
            sources.append(
                GradientViews(buffer, flat, self._places) if stays else FlatGradients(buffer, flat)
            )
        return sources

    def _make_stretches(self) -> None:
        """There are none: nothing travels."""

    def reduce(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        try:
            return super().reduce(gradients)
        finally:
            self._peers.arrive()  # all have read them: p.grad may be written to again

    def prepare(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for source in self._sources:
            source.take(gradients)

    def begin(self, gradients: Sequence[torch.Tensor | None], prepared: bool = False) -> None:
        self._failures = [Failures() for _ in self.buffers]
        for source, failures in zip(self._sources, self._failures, strict=True):
            if not prepared:
                with failures:
                    source.take(gradients)
        self._peers.arrive()

    def finish(self, b: int, squares: torch.Tensor | None = None) -> None:
        self._failures[b].raise_first()
        self._peers.wait_until_sent()
        ops.average_rows(self._rows[b], self.buffers[b].gradients, squares)

    def can_bring(self, b: int) -> bool:
        return True

    def bring(self, b: int) -> Brought:
        self._failures[b].raise_first()
        self._peers.wait_until_sent()
        return Brought(self._rows[b], self._own[b])
