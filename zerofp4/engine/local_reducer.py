"""Gradients of a world of one, which are their own means."""

from collections.abc import Iterator, Sequence

import torch

from zerofp4.engine.exchange import GradientReducer
from zerofp4.engine.gradients import FlatGradients
from zerofp4.engine.places import are_sendable, is_sendable
from zerofp4.engine.stretches import Brought
from zerofp4.format import WEIGHT_DTYPES


class LocalReducer(GradientReducer):
    """GradientReducer of a world of one in which nothing rounds gradients: an update reads them where they
    are. The FP32 slices have copies of them only where somebody asks for these, by reduce() or finish().
    """

    gradients_are_means = True

    def _make_sources(self) -> list[FlatGradients]:
        self._slices: dict[int, FlatGradients] = {}  # by bucket, made when they are first copied to
        self._can_bring = [self._wire.keeps(buffer.parameters) for buffer in self.buffers]
        return []

    def _make_stretches(self) -> None:
        """There are none."""

    def _own_views(self) -> list[dict[int, torch.Tensor]]:
        return []

    def reduce(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Returns None: no sums of squares were added up."""
        super().reduce(gradients)

    def means(self, gradients: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor]:
        for gradient in gradients:
            if gradient is not None:
                dtype = gradient.dtype if gradient.dtype in WEIGHT_DTYPES else torch.float32
                yield in_order(gradient, dtype).view(-1)

    def prepare(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Returns them with a copy of each that an update could not read where it is."""
        found = list(gradients)
        for b, (buffer, dtype) in enumerate(zip(self.buffers, self.dtypes, strict=True)):
            own = {i: gradients[i] for i in buffer.indices if gradients[i] is not None}
            if self.can_bring(b) and not are_sendable(list(own.values()), [dtype] * len(own)):
                for i, gradient in own.items():
                    found[i] = in_order(gradient, dtype)
        return found

    def begin(self, gradients: Sequence[torch.Tensor | None], prepared: bool = False) -> None:
        self._gradients = gradients

    def finish(self, b: int, squares: torch.Tensor | None = None) -> None:
        """Copy those of buffer b to its slice; squares stay as they are."""
        if b not in self._slices:
            self._slices[b] = FlatGradients(self.buffers[b], self.buffers[b].gradients.view(1, -1))
        self._slices[b].take(self._gradients)

    def can_bring(self, b: int) -> bool:
        return self._can_bring[b]

    def bring(self, b: int) -> Brought:
        gradients = {i: self._gradients[i] for i in self.buffers[b].indices}
        return Brought(None, {i: g for i, g in gradients.items() if g is not None and g.numel()}, 0)


def in_order(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of a dtype, its elements one after the other: itself where it lies so, else a copy."""
    if is_sendable(gradient, dtype):
        return gradient
    copied = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    return copied.copy_(gradient)
