"""The way of amaxes from an update of masters to their cast: who leaves them, and until when they hold."""

from collections.abc import Iterable

import torch

from zerofp4.cast import CastPlan
from zerofp4.ops import MasterPiece


class AmaxRoute:
    """From an optimizer of a plan's masters to the plan: the optimizer's update calls begin(), leaves the
    amax of every piece in `reduced`, and calls end().

    pieces: what the plan has of each parameter that is one of its masters; they are kept by parameter.

    Raises ValueError if a master of the plan is not one of the parameters.
    """

    def __init__(self, plan: CastPlan, parameters: Iterable[torch.Tensor]):
        by_place = {(p.data_ptr(), p.numel()): p for p in parameters}
        self._plan = plan
        self.pieces: dict[torch.Tensor, MasterPiece] = {}
        for i, piece in enumerate(plan.master_pieces()):
            p = by_place.get((piece.master.data_ptr(), piece.master.numel()))
            if p is None or piece.master.dtype != torch.float32:
                raise _missing_master(i, piece)
            self.pieces[p] = piece
        # A tensor and its views have one version counter: masters in one buffer are asked once.
        bases = [p if p._base is None else p._base for p in self.pieces]
        self.counted = tuple({id(base): base for base in bases}.values())
        self._versions = self._counts()

    @property
    def reduced(self) -> torch.Tensor:
        return self._plan.reduced

    def begin(self) -> None:
        self._plan.begin_update()

    def end(self) -> None:
        self._plan.end_update()
        self._versions = self._counts()

    def is_outdated(self) -> bool:
        """Whether anybody has written to a master since end(). Noticed as autograd notices it: not through
        .data.
        """
        return self._versions != self._counts()

    def _counts(self) -> tuple[int, ...]:
        return tuple(tensor._version for tensor in self.counted)


def _missing_master(i: int, piece: MasterPiece) -> ValueError:
    first, last = piece.shard.start, piece.shard.end
    return ValueError(
        f"plan.master_pieces()[{i}].master ({piece.master.dtype}, elements {first} to {last} of a weight "
        f"{list(piece.matrix)}) is not one of the optimizer's parameters: it must have the address and "
        "length of one, and be float32"
    )
