"""The vector that a step reduces over the ranks: where amaxes lie in it, and whose they are."""

import enum
from collections.abc import Sequence

import torch

from zerofp4.format import BLOCK
from zerofp4.layout import ceil_div, round_up
from zerofp4.ops import ERROR_WORD, HASH_WORD, HEADER_WORDS
from zerofp4.storage import NVFP4Storage

_VECTOR_WORDS = 4
"""A weight's tile amaxes begin at a multiple of it in the reduced vector, so that kernels read vectors."""


_DECLINED = 1.0
"""In the error word: not an error, which is +inf, but a rank that asks for another plan. No rank writes."""

_NO_HASH = -1.0
"""In a hash word of such a rank: below what any rank has there that takes part or has an error."""


class Amaxes(enum.Enum):
    """Whether the vector holds the amaxes of the next step: CastPlan.begin_update() to end_update(). CAPTURED
    are those that replays of a CUDA graph will leave: for a step in the graph, not for one outside.
    """

    NONE, BEGUN, LEFT, CAPTURED = range(4)


class ReducedVector:
    """Header words, one amax per amax group, then the tile amaxes of each weight. A stack of E matrices is E
    weights here, and an amax group of stacks E groups.

    words: float32, zeros at first. amax_groups: by weight, as in CastRequest. travels: whether there are
    ranks to reduce it with.
    wire: what they reduce, between pack() and unpack(): bfloat16 where all weights are. Masters are rounded
    to the weight's dtype before anything else, so an amax is one of its values, or +inf; and the header is
    of bytes. So nothing is rounded on the way. `words` itself of any other weights.
    """

    def __init__(
        self,
        records: Sequence[NVFP4Storage],
        amax_groups: Sequence[int],
        device: torch.device,
        travels: bool,
    ):
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
        self.words = self.wire = torch.zeros(total, dtype=torch.float32, device=device)
        if travels and {record.dtype for record in records} == {torch.bfloat16}:
            self.wire = torch.zeros(total, dtype=torch.bfloat16, device=device)

    def offsets(self, i: int) -> list[tuple[int, int]]:
        """Of each matrix of weight i the words of the amax of its tile (0, 0) and of that of its group."""
        return self._offsets[i]

    def pack(self) -> None:
        """Before a reduction. Queued on the current stream, as is unpack() behind it."""
        if self.wire is not self.words:
            self.wire.copy_(self.words)

    def unpack(self) -> None:
        if self.wire is not self.words:
            self.words.copy_(self.wire)

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
        self.words[HASH_WORD] = _NO_HASH

    def declined(self) -> bool | None:
        """After a reduction in which this rank declined: whether all did; None where a rank has an error.
        Waits for the device.
        """
        error_word, hash_word = self.words[[ERROR_WORD, HASH_WORD]].tolist()
        return hash_word == _NO_HASH if error_word == _DECLINED else None
