"""An exponential moving average of the masters of a ZeroFP4Optimizer."""

import hashlib
from typing import Any

import torch

from zerofp4.distributed import OwnError, exchange
from zerofp4.optim.initial import HeldMaster
from zerofp4.optim.load import find_saves, load_error, pieces_of
from zerofp4.optim.piece import Piece, make_piece
from zerofp4.optim.seal import check_one_save, draw_token, make_id
from zerofp4.optim.zero import ZeroFP4Optimizer


class AveragedMasters:
    """An exponential moving average (EMA) of the FP32 masters of a ZeroFP4Optimizer, sharded as they are.

    optimizer: of the masters; the average begins with what they are now. decay: the share of the average that
    an update keeps, from 0 to 1.

    Call update() after each step. It takes no part in collectives. The average takes 4 bytes for each element
    of this rank's slice, and update() as many once more for the largest bucket while it runs. No value of it
    is ever quantized. master_state_dict(model, averages), save_safetensors(model, averages, folder) and
    unconvert_model(model, averages) give it in the model's own keys; state_dict() and load_state_dict() are
    for torch.distributed.checkpoint, in a world of any size.

    Raises TypeError for what is no ZeroFP4Optimizer, ValueError for a decay out of range.
    """

    def __init__(self, optimizer: ZeroFP4Optimizer, decay: float = 0.999):
        if not isinstance(optimizer, ZeroFP4Optimizer):
            raise TypeError(f"optimizer must be a ZeroFP4Optimizer, got {type(optimizer).__name__}")
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be from 0 to 1, got {decay}")
        optimizer._shards.check_not_taken_over()
        self.optimizer, self.decay = optimizer, decay
        # Of the ids of saves: the same on every rank, another after each load.
        self._token = hashlib.sha256(f"{optimizer._saved.save_id} {decay}".encode()).hexdigest()[:16]
        self._updates = 0
        self._slices = [buffer.masters.clone() for buffer in optimizer._shards.buffers]

    @torch.no_grad()
    def update(self) -> None:
        """average = decay * average + (1 - decay) * master: three operations, each rounded to FP32, so that
        the bits do not depend on the number of ranks.

        A step that was skipped has left the masters as they were. Raises RuntimeError where another
        ZeroFP4Optimizer was built over the parameters.
        """
        self.optimizer._shards.check_not_taken_over()
        self.optimizer._raise_if_broken()
        self._updates += 1
        for average, buffer in zip(self._slices, self.optimizer._shards.buffers, strict=True):
            average.mul_(self.decay).add_(buffer.masters * (1 - self.decay))

    @property
    def _save_id(self) -> str:
        return make_id(self._token, self._updates)

    def held_masters(self) -> dict[int, HeldMaster]:
        """This rank's pieces of the averages, by the identity of the parameter."""
        shards, pieces = self.optimizer._shards, {}
        for buffer, average in zip(shards.buffers, self._slices, strict=True):
            pieces |= zip(map(id, buffer.parameters), buffer.own_views(average), strict=True)
        return {key: held._replace(piece=pieces[key]) for key, held in shards.held_masters().items()}

    def state_dict(self) -> dict[str, Any]:
        """Pieces in the parameters' shapes, as those of the optimizer's state_dict(), and no copies. For
        torch.distributed.checkpoint the optimizer needs names (named_parameters()).
        """
        optimizer, held, state = self.optimizer, self.held_masters(), {}
        saved = optimizer._saved
        for parameter, refusal in zip(optimizer._shards.parameters, saved.names.refusals, strict=True):
            own, number = held[id(parameter)], saved.number_of(parameter)
            values = self._slices[0][:0] if own.piece is None else own.piece
            piece = make_piece(values, parameter.shape, own.shard.start, saved.home_of(parameter))
            piece.label = None if number.name is None else f"{number.name}.average"
            piece.refusal, piece.written_by = refusal, (self._save_id,)
            state[number] = {"average": piece}
        return {"state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state dict of averages. Collective: where one rank's does not fit, or two saves wrote
        what the ranks bring, all of them raise TypeError or ValueError, and nothing changes.
        """
        found, saves, error = [], None, OwnError()
        try:
            found, saves = self._read(state_dict), find_saves(state_dict, self._save_id)
        except Exception as failure:  # whatever it is, the other ranks must hear of it
            error = OwnError(load_error(failure))
        group = self.optimizer.process_group()
        told = exchange((saves, draw_token()), error, group, "load_state_dict() of averages")
        by_rank, (token, *_) = zip(*told, strict=True)
        check_one_save(by_rank)
        self._token, self._updates = token, 0
        for own, values in found:
            own.copy_(values)
        for piece in pieces_of(state_dict):
            piece.settle()

    def _read(self, state_dict: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each parameter this rank's piece of the average, and what it is to be."""
        state, found = state_dict["state"], []
        for number, entries in self.state_dict()["state"].items():
            own, given = entries["average"], state.get(number, {}).get("average")
            what = own.label or f"the average of parameter {int(number)}"
            if not isinstance(given, Piece) or (given.shape, given.shard) != (own.shape, own.shard):
                raise ValueError(f"state_dict: {what} must be {own}, got {given}")
            if given.has_unread():
                raise ValueError(f"state_dict: {what} is not whole in the checkpoint")
            found.append((own.values, given.present()))
        return found
