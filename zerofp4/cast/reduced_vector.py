"""The vector that a step reduces over the ranks: where amaxes lie in it, and whose they are."""

import enum
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zerofp4.format import BLOCK
from zerofp4.layout import ceil_div, round_up
from zerofp4.ops import HEADER_WORDS
from zerofp4.shard import Shard
from zerofp4.storage import NVFP4Storage

_VECTOR_WORDS = 4
"""A weight's tile amaxes begin at a multiple of it in the reduced vector, so that kernels read vectors."""


class MasterPiece(NamedTuple):
    """What this rank owns of a weight, and where its amaxes belong in CastPlan.reduced.

    matrix, dtype: the weight's [rows, cols] and dtype. The amax of its tile (0, 0) is word tile_offset, those
    of the others follow, row-major [ceil(rows/16), ceil(cols/16)]; the amax of its group is word amax_offset.
    An amax is the largest magnitude of the owned elements rounded to `dtype`, +inf where one of them is NaN
    or Inf. Tile words, which were cleared, are written: on a rank every tile belongs to one piece. A group's
    word is raised by maximum with what is there.
    """

    master: torch.Tensor
    shard: Shard
    matrix: tuple[int, int]
    dtype: torch.dtype
    tile_offset: int
    amax_offset: int


class Amaxes(enum.Enum):
    """Whether the vector holds the amaxes of the next step: CastPlan.begin_update() to end_update(). CAPTURED
    are those that replays of a CUDA graph will leave: for a step in the graph, not for one outside.
    """

    NONE, BEGUN, LEFT, CAPTURED = range(4)


class ReducedVector:
    """Header words, one amax per amax group, then the tile amaxes of each weight.

    words: float32, zeros at first. amax_groups: by weight, as in CastRequest.
    """

    def __init__(self, records: Sequence[NVFP4Storage], amax_groups: Sequence[int], device: torch.device):
        self._amax_offsets = [HEADER_WORDS + group for group in amax_groups]
        self._groups_end = HEADER_WORDS + len(set(amax_groups))
        self._tile_offsets, total = [], round_up(self._groups_end, _VECTOR_WORDS)
        for record in records:
            rows, cols = record.matrix
            self._tile_offsets.append(total)
            total += round_up(ceil_div(rows, BLOCK) * ceil_div(cols, BLOCK), _VECTOR_WORDS)
        self.words = torch.zeros(total, dtype=torch.float32, device=device)

    def offsets(self, i: int) -> tuple[int, int]:
        """The words of the amax of weight i's tile (0, 0) and of that of its group."""
        return self._tile_offsets[i], self._amax_offsets[i]

    def has_nonfinite(self) -> bool:
        """After a reduction, whether any rank has a NaN or Inf. Waits for the device."""
        return bool(self.words[HEADER_WORDS : self._groups_end].isinf().any())

    def nonfinite_weights(self) -> list[int]:
        """The weights with a NaN or Inf on any rank."""
        ends = [*self._tile_offsets[1:], self.words.numel()]
        spans = enumerate(zip(self._tile_offsets, ends, strict=True))
        return [i for i, (first, last) in spans if self.words[first:last].isinf().any()]
