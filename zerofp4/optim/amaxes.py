"""The way of amaxes from an update of masters to their cast: who leaves them, and until when they hold."""

from collections.abc import Iterable

import torch

from zerofp4.cast import CastPlan
from zerofp4.ops import MasterPiece


class AmaxRoute:
    """From an optimizer of a plan's masters to the plan: the optimizer's update calls begin(), leaves the
    amax of every piece in `reduced`, and calls end().

    pieces: what the plan has of each parameter that is one of its masters, by parameter: one piece, or, of a
    weight that is a stack of matrices, those of the matrices, one behind the other.

    Raises ValueError if a master of the plan is not one of the parameters.
    """

    def __init__(self, plan: CastPlan, parameters: Iterable[torch.Tensor]):
        by_place = {(p.data_ptr(), p.numel()): p for p in parameters}
        self._plan = plan
        self.pieces: dict[torch.Tensor, tuple[MasterPiece, ...]] = {}
        found: list[MasterPiece] = []  # of a master, the first ones
        for i, piece in enumerate(plan.master_pieces()):
            if piece.master.dtype != torch.float32 or (found and _end(found[-1]) != piece.master.data_ptr()):
                raise _missing_master(i - len(found), (found or [piece])[0])
            found.append(piece)
            numel = sum(part.master.numel() for part in found)
            p = by_place.get((found[0].master.data_ptr(), numel))
            if p is not None:
                self.pieces[p] = tuple(found)
                found = []
        if found:
            raise _missing_master(len(plan.master_pieces()) - len(found), found[0])
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


def _end(piece: MasterPiece) -> int:
    """The address behind its master."""
    return piece.master.data_ptr() + piece.master.nbytes


def _missing_master(i: int, piece: MasterPiece) -> ValueError:
    first, last = piece.shard.start, piece.shard.end
    return ValueError(
        f"plan.master_pieces()[{i}].master ({piece.master.dtype}, elements {first} to {last} of a weight "
        f"{list(piece.matrix)}) is not one of the optimizer's parameters: it must have the address and "
        "length of one, and be float32"
    )
