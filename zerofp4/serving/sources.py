"""The codes of a model's NVFP4 weights: whole on every rank, sharded over ranks, or made of averages."""

from typing import Protocol

import torch
from torch import nn

from zerofp4.optim import AveragedMasters, gather_masters
from zerofp4.storage import NVFP4Storage
from zerofp4.tensors import NVFP4Tensor, quantize


class Source(Protocol):
    """The codes of one weight.

    record: its shape, block and options. amax: float32 [1], or [E] of experts, the same on every rank.
    is_collective: whether whole() is.
    """

    record: NVFP4Storage
    amax: torch.Tensor
    is_collective: bool

    def check(self) -> None:
        """Raise if the codes are not those of the weight, or cannot be served."""

    def whole(self) -> NVFP4Storage:
        """A record with all codes and compact scales of the rowwise copy."""

    def local(self) -> tuple[torch.Tensor, int]:
        """This rank's codes, uint8 [rows, K/2], and their first row in the matrix. Averages have none."""


class Held:
    """A weight with all codes in this process."""

    is_collective = False

    def __init__(self, record: NVFP4Storage):
        self.record, self.amax = record, record.amax

    def check(self) -> None:
        if self.record.rowwise is None:
            raise ValueError("it has no rowwise copy")

    def whole(self) -> NVFP4Storage:
        return self.record

    def local(self) -> tuple[torch.Tensor, int]:
        return self.record.rowwise.data.flatten(0, -2), 0


class Averaged:
    """A weight whose codes are made of the average of its masters."""

    is_collective = True

    def __init__(self, parameter: NVFP4Tensor, averages: AveragedMasters):
        self.record, self._parameter, self._averages = parameter.record, parameter, averages
        self.amax = amaxes_of(self._values(), self.record)

    def _values(self) -> torch.Tensor:
        (average,) = gather_masters(self._averages, [self._parameter])
        return average.to(self.record.dtype)

    def check(self) -> None:
        pass

    def whole(self) -> NVFP4Storage:
        options = {name: getattr(self.record, name) for name in ("block", "four_over_six", "stacked")}
        return quantize(self._values(), amax=self.amax, **options).record


def amaxes_of(values: torch.Tensor, record: NVFP4Storage) -> torch.Tensor:
    """The amaxes that a cast of the values finds, float32 [1], or [E] of a stack."""
    return values.reshape(*record.amax_shape, -1).abs().amax(1).float()


def find_sources(model: nn.Module) -> dict[str, Source]:
    """By key of the state dict. A module has the sources of sharded weights by name in `zerofp4_weights`."""
    sources: dict[str, Source] = {}
    for prefix, module in model.named_modules():
        sharded = vars(module).get("zerofp4_weights", {})
        for name, parameter in module._parameters.items():
            key = f"{prefix}.{name}" if prefix else name
            if name in sharded:
                sources[key] = sharded[name].source()
            elif isinstance(parameter, NVFP4Tensor):
                sources[key] = Held(parameter.record)
    return sources
