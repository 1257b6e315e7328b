"""weights: a rank's parts of the tensors of an export, for an engine that takes new weights live."""

from collections.abc import Iterator

import torch
from torch import nn

from zerofp4.serving.plan import Part, Plan
from zerofp4.serving.sources import find_sources


class ServedWeights:
    """The tensors of an export. Iterating gives (name, tensor, part) for this rank's pieces.

    served: name, dtype and shape of each whole tensor, in order; the same on every rank.
    """

    def __init__(self, plan: Plan):
        self._plan, self.served = plan, plan.served

    @property
    def names(self) -> list[str]:
        return [served.name for served in self.served]

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor, Part]]:
        for part in self._plan.parts:
            yield from part.pieces()

    @torch.no_grad()
    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) on every rank. Collective if ranks have pieces: one gather per weight."""
        for part in self._plan.parts:
            yield from part.tensors()


def weights(
    model: nn.Module, format: str = "compressed-tensors", *, dtype: torch.dtype | None = None
) -> ServedWeights:
    """The tensors of an export of the model, under the same names, where each rank has them: codes and scales
    as they are, nothing gathered and nothing quantized again.

    After a step of ZeroFP4Optimizer every rank has all codes; with fully_shard its rows of them. An
    unquantized parameter that checkpoints cut into several tensors is gathered. Call it again after each
    step, since it reads amaxes.

    model, format, dtype, and errors: as for save_pretrained.
    """
    return ServedWeights(Plan(model, find_sources(model), format, dtype))
