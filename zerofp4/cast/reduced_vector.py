"""The vector that a step reduces over the ranks: where amaxes lie in it, and whose they are."""

import enum
from collections.abc import Sequence

import torch

from zerofp4.format import BLOCK, FLOAT32_MAX
from zerofp4.layout import ceil_div, round_up
from zerofp4.ops import ERROR_WORD, HASH_WORD, HEADER_WORDS
from zerofp4.storage import NVFP4Storage

_VECTOR_WORDS = 4
"""A weight's tile amaxes begin at a multiple of it in the reduced vector, so that kernels read vectors."""


_DECLINED = 1.0
"""In the error word: not an error, which is +inf, but a rank that asks for another plan. No rank writes."""


class Amaxes(enum.Enum):
    """Whether the vector holds the amaxes of the next step: CastPlan.begin_update() to end_update(). CAPTURED
    are those that replays of a CUDA graph will leave: for a step in the graph, not for one outside.
    """

    NONE, BEGUN, LEFT, CAPTURED = range(4)


class ReducedVector:
    """Header words, one amax per amax group, then the tile amaxes of each weight. A stack of E matrices is E
    weights here, and an amax group of stacks E groups.

    words: float32, zeros at first. amax_groups: by weight, as in CastRequest.
    """

    def __init__(self, records: Sequence[NVFP4Storage], amax_groups: Sequence[int], device: torch.device):
        self._offsets: list[list[tuple[int, int]]] = [[] for _ in records]
        first, self._groups_end = {}, HEADER_WORDS
        for record, group in zip(records, amax_groups, strict=True):
            if group not in first:
                first[group], self._groups_end = self._groups_end, self._groups_end + record.amax_shape[0]
        total = round_up(self._groups_end, _VECTOR_WORDS)
        for record, group, offsets in zip(records, amax_groups, self._offsets, strict=True):
            rows, cols = record.matrix
            tiles = round_up(ceil_div(rows, BLOCK) * ceil_div(cols, BLOCK), _VECTOR_WORDS)
            for e in range(record.amax_shape[0]):
                offsets.append((total, first[group] + e))
                total += tiles
        self.words = torch.zeros(total, dtype=torch.float32, device=device)

    def offsets(self, i: int) -> list[tuple[int, int]]:
        """Of each matrix of weight i the words of the amax of its tile (0, 0) and of that of its group."""
        return self._offsets[i]

    def has_nonfinite(self) -> bool:
        """After a reduction, whether any rank has a NaN or Inf. Waits for the device."""
        return bool(self.words[HEADER_WORDS : self._groups_end].isinf().any())

    def nonfinite_matrices(self) -> list[tuple[int, int]]:
        """(weight, matrix of it) of those with a NaN or Inf on any rank."""
        places = [(i, e) for i, offsets in enumerate(self._offsets) for e in range(len(offsets))]
        begins = [tile_offset for offsets in self._offsets for tile_offset, _ in offsets]
        spans = zip(places, begins, [*begins[1:], self.words.numel()], strict=True)
        return [place for place, first, last in spans if self.words[first:last].isinf().any()]

    def decline(self) -> None:
        """Of a vector with an error in its header, make one that asks for another plan."""
        self.words[ERROR_WORD] = _DECLINED
        self.words[HASH_WORD] = -FLOAT32_MAX  # below the hash of any rank that takes part or has an error

    def declined(self) -> bool | None:
        """After a reduction in which this rank declined: whether all did; None where a rank has an error.
        Waits for the device.
        """
        error_word, hash_word = self.words[[ERROR_WORD, HASH_WORD]].tolist()
        return hash_word == -FLOAT32_MAX if error_word == _DECLINED else None
