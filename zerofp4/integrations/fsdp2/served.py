"""How serving finds the codes of a sharded model, whose ranks each have some rows of every weight."""

import math
from collections.abc import Iterator

import torch
from torch import nn

from zerofp4.distributed import all_gather_slices, rank_and_size
from zerofp4.format import SCALE_DTYPE
from zerofp4.integrations.fsdp2.state import prepared_weights
from zerofp4.integrations.fsdp2.weight import NOT_ATTACHED, Weight
from zerofp4.storage import NVFP4Storage, Side


class ShardedCodes:
    """The codes of a prepared weight (a serving.Source)."""

    is_collective = True

    def __init__(self, weight: Weight):
        if weight.placement is None:
            raise RuntimeError(f"{weight.name!r} {NOT_ATTACHED}")
        self.record, self._weight = weight.record, weight

    @property
    def first_row(self) -> int:
        placement = self._weight.placement
        return placement.first_row * math.prod(placement.shape[1:-1])

    def amax(self) -> torch.Tensor:
        return self.record.amax

    def check(self) -> None:
        """Raises RuntimeError for codes of masters that were written to since."""
        if self._weight.placement.param.is_dtensor:
            raise ValueError("under tensor parallelism each slice of it has an amax of its own")
        self._padded()

    def _padded(self) -> tuple[torch.Tensor, ...]:
        """This rank's rows of what is gathered, and as many more as FSDP2 pads them with."""
        return self._weight.all_gather_input(self._weight.master())[0]

    def whole(self) -> NVFP4Storage:
        """Collective over the ranks that the weight is sharded over."""
        placement, wholes = self._weight.placement, []
        rank, size = rank_and_size(placement.group)
        for own in self._padded():
            rows = own.new_empty(size * own.shape[0], *own.shape[1:])
            rows.chunk(size)[rank].copy_(own)
            all_gather_slices(rows, placement.group, stage="gathering codes for serving")
            wholes.append(rows[: placement.shape[0]])
        codes, *scales = wholes
        scale = scales[0].flatten(0, -2).view(SCALE_DTYPE) if scales else self.record.rowwise_scale
        record = NVFP4Storage.from_context(self.record.shape, self.record.context())
        places = {"compact": scale.to(codes.device)}
        codes = codes.view(record.data_shape("rowwise"))
        record.rowwise = Side(codes, places, self.record.amax.to(codes.device))
        return record

    def local(self) -> torch.Tensor:
        return self._padded()[0][: self._weight.placement.rows].flatten(0, -2)


def find_codes(model: nn.Module) -> Iterator[tuple[nn.Module, str, ShardedCodes]]:
    """(module, the parameter's name in it, its codes) of all prepared weights of a model."""
    for module, name, weight in prepared_weights(model):
        yield module, name, ShardedCodes(weight)
