"""An exponential moving average of the masters of a ZeroFP4Optimizer."""

from typing import Any

import torch

from zerofp4.distributed import OwnError
from zerofp4.engine import joined
from zerofp4.optim.piece import Piece
from zerofp4.optim.seal import agree_on_save
from zerofp4.optim.state_dict import MASTER, find_saves, load_error
from zerofp4.optim.zero import ZeroFP4Optimizer


class AveragedMasters:
    """An exponential moving average (EMA) of the FP32 masters of a ZeroFP4Optimizer, sharded as they are.

    optimizer: of the masters; the average begins with what they are now, or with the values of weights that
    somebody has written to since the last step. decay: the share of the average that an update keeps, from 0
    to 1.

    Call update() after each step. It adds masters, so an average and its exports do not change if somebody
    writes to the weights later. It takes no part in collectives. The average takes 4 bytes for each element
    of this rank's slice, and update() as many once more for the largest bucket while it runs, or with masters
    of 24 bits twice more. master_state_dict(model, averages), save_safetensors(model, folder, averages) and
    unconvert_model(model, averages) give it in the model's own keys; state_dict() and load_state_dict() are
    for torch.distributed.checkpoint, in a world of any size.
    """

    def __init__(self, optimizer: ZeroFP4Optimizer, decay: float = 0.999):
        if not isinstance(optimizer, ZeroFP4Optimizer):
            raise TypeError(f"optimizer must be a ZeroFP4Optimizer, got {type(optimizer).__name__}")
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be from 0 to 1, got {decay}")
        optimizer._shards.check_not_taken_over()
        self.optimizer, self.decay = optimizer, decay
        shards = optimizer._shards
        self._slices = [torch.zeros_like(b.masters, dtype=torch.float32) for b in shards.buckets]
        slices = iter(self._slices)
        self._views = shards.by_parameter(lambda bucket: bucket.own_views(next(slices)))
        for i, view in enumerate(self._views):
            if view is not None:
                view.copy_(joined(*shards.saved_planes(i)))

    @torch.no_grad()
    def update(self) -> None:
        """average = decay * average + (1 - decay) * master: three operations, each rounded to FP32, so that
        the bits do not depend on the number of ranks.
        """
        self.optimizer._shards.check_not_taken_over()
        self.optimizer._check_sound(waits=False)  # once in every step
        for average, bucket in zip(self._slices, self.optimizer._shards.buckets, strict=True):
            average.mul_(self.decay).add_(joined(bucket.masters, bucket.low) * (1 - self.decay))

    def _master(self, parameter: torch.Tensor) -> Piece | None:
        """As SavedState.master(), a piece of the average."""
        saved = self.optimizer._saved
        i = saved.indices.get(id(parameter))
        return None if i is None else saved.piece(i, "average", self._views[i])

    def state_dict(self) -> dict[str, Any]:
        """Pieces in the parameters' shapes, as those of the optimizer's state_dict(), and no copies."""
        saved = self.optimizer._saved
        own = zip(saved.parameters, map(self._master, saved), strict=True)
        return {"state": {one.number: {"average": piece} for one, piece in own}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state dict of averages. Collective: where one rank's does not fit, or two saves wrote
        what the ranks bring, all of them raise TypeError or ValueError, and nothing changes.
        """
        found, saves, error = [], set(), OwnError()
        try:
            for one in self.optimizer._saved.parameters:
                entries = state_dict["state"].get(one.number, {})
                one.check_complete(["average"], entries)
                found.append(one.read("average", entries["average"], MASTER))
            _, saves = find_saves(state_dict)
        except Exception as failure:  # whatever it is, the other ranks must hear of it
            error = OwnError(load_error(failure))
        agree_on_save(saves, error, self.optimizer.process_group(), "load_state_dict() of averages")
        for own, values in zip(self._views, found, strict=True):
            if own is not None:
                own.copy_(values)
