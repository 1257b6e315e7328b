"""The vector that a step reduces over the ranks: which words of it are the amaxes of which weight."""

from collections.abc import Sequence

import torch

from zerofp4.cast.request import CastRequest
from zerofp4.format import BLOCK
from zerofp4.layout import ceil_div, round_up
from zerofp4.ops import ERROR_WORD, HASH_WORD, HEADER_WORDS, CastItem, MasterPiece
from zerofp4.shard import Shard, byte_range, intersect
from zerofp4.storage import NVFP4Storage

_VECTOR_WORDS = 4
"""A weight's tile amaxes begin at a multiple of it in the reduced vector, so that kernels read vectors."""

_DECLINED = 1.0
"""In the error word: not an error, which is +inf, but a rank that asks for another plan. No rank writes."""

_NO_HASH = -1.0
"""In a hash word of such a rank: below what any rank has there that takes part or has an error."""


class ReducedVector:
    """Header words, one amax per amax group, then the tile amaxes of each weight. A stack of E matrices is E
    weights here, and an amax group of stacks E groups.

    records, amax_groups: by weight, as in CastRequest.
    words: float32, zeros at first.
    """

    def __init__(self, records: Sequence[NVFP4Storage], amax_groups: Sequence[int], device: torch.device):
        self._offsets: list[list[tuple[int, int]]] = [[] for _ in records]
        """By weight, for each of its matrices: the words of its first tile's amax, and of its group's."""
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

    def items(self, request: CastRequest) -> list[CastItem]:
        """What this rank owns of each matrix, and the matrix's words, for the stages of a plan."""
        items = []
        for i, (record, offsets) in enumerate(zip(request.records, self._offsets, strict=True)):
            shard, master, codes = request.shards[i], request.masters[i], request.codes(i)
            if record.experts is not None:
                items += _expert_items(record, shard, master, codes, offsets)
            else:
                piece = MasterPiece(master, shard, record.matrix, record.dtype, *offsets[0])
                items.append(CastItem(record, piece, codes))
        return items

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


def _expert_items(
    record: NVFP4Storage,
    shard: Shard,
    master: torch.Tensor | None,
    codes: torch.Tensor | None,
    offsets: list[tuple[int, int]],
) -> list[CastItem]:
    """An item for each matrix of a stack, with what the shard has of it. The matrices have even sizes: no
    byte of codes belongs to two of them.
    """
    rows, cols = record.matrix
    items = []
    for e, matrix in enumerate(record.matrices()):
        first = e * rows * cols
        own = intersect(first, rows * cols, shard.start, shard.end)
        own_master = own_codes = None
        if own.numel:
            begin = first + own.start
            if master is not None:
                own_master = master[begin - shard.start :][: own.numel]
            first_byte, last_byte = byte_range(Shard(begin, own.numel))
            behind = byte_range(shard)[0]
            own_codes = codes[first_byte - behind : last_byte - behind]
        piece = MasterPiece(own_master, own, (rows, cols), record.dtype, *offsets[e])
        items.append(CastItem(matrix, piece, own_codes))
    return items
