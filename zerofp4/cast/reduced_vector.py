"""The vector that a step reduces over the ranks, and which of its words are whose amaxes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zerofp4.cast.request import CastRequest
from zerofp4.format import BLOCK
from zerofp4.layout import ceil_div, round_up
from zerofp4.ops import ERROR_WORD, HASH_WORD, HEADER_WORDS, CastItem, MasterPiece
from zerofp4.shard import Shard, byte_range, cut_blocks, intersect
from zerofp4.storage import NVFP4Storage

_VECTOR_WORDS = 4
"""A weight's tile amaxes begin at a multiple of it in the reduced vector, so that kernels read vectors."""

_DECLINED = 1.0
"""In the error word: not an error (+inf), but a rank that asks for another plan. No rank writes."""

_NO_HASH = -1.0
"""In the hash word of such a rank: below that of any rank that takes part or has an error."""


class _Words(NamedTuple):
    """Of one matrix: [first, last) are its own amaxes, of its tiles or, if scales travel, of the whole matrix
    and then of `cut`, the 1x16 blocks that shards cut. group: the word of its amax group.
    """

    first: int
    last: int
    group: int
    cut: list[int]


class ReducedVector:
    """Header words, one amax per amax group, then the amaxes of each weight. A stack of E matrices is E
    weights here. records, amax_groups: as in CastRequest. rank_shards: [rank][weight].
    """

    def __init__(
        self,
        records: Sequence[NVFP4Storage],
        amax_groups: Sequence[int],
        rank_shards: Sequence[Sequence[Shard]],
        device: torch.device,
    ):
        self._words: list[list[_Words]] = [[] for _ in records]
        """By weight, of each of its matrices."""
        first, total = {}, HEADER_WORDS
        for record, group in zip(records, amax_groups, strict=True):
            if group not in first:
                first[group], total = total, total + record.amax_shape[0]
        total = round_up(total, _VECTOR_WORDS)
        for i, (record, group) in enumerate(zip(records, amax_groups, strict=True)):
            rows, cols = record.matrix
            tiles = ceil_div(rows, BLOCK) * ceil_div(cols, BLOCK)
            for e in range(record.amax_shape[0]):
                cut: set[int | None] = set()
                if record.block[0] == 1:
                    owned = (_of_matrix(shards[i], e, rows * cols) for shards in rank_shards)
                    cut = {block for shard in owned for block in cut_blocks(shard, cols)} - {None}
                count = 1 + len(cut) if record.scales_travel else tiles
                self._words[i].append(_Words(total, total + count, first[group] + e, sorted(cut)))
                total += round_up(count, _VECTOR_WORDS)
        self.words = torch.zeros(total, dtype=torch.float32, device=device)

    def cut(self, i: int) -> int:
        """How many 1x16 blocks of weight i shards cut."""
        return sum(len(words.cut) for words in self._words[i])

    def items(self, request: CastRequest) -> list[CastItem]:
        """This rank's part of each matrix, with its words, for the stages of a plan."""
        items = []
        for i, (record, words) in enumerate(zip(request.records, self._words, strict=True)):
            shard, master, codes = request.shards[i], request.masters[i], request.codes(i)
            rows, cols = record.matrix
            for e, matrix in enumerate(record.matrices()):
                own = _of_matrix(shard, e, rows * cols)
                own_master = own_codes = None
                if own.numel:
                    begin = e * rows * cols + own.start
                    if master is not None:
                        own_master = master[begin - shard.start :][: own.numel]
                    # The matrices of a stack have even sizes: no byte of codes belongs to two of them.
                    first_byte, last_byte = byte_range(Shard(begin, own.numel))
                    before = byte_range(shard)[0]
                    own_codes = codes[first_byte - before : last_byte - before]
                tiles, total = (-1, words[e].first) if record.scales_travel else (words[e].first, -1)
                kind = record.matrix, record.dtype
                piece = MasterPiece(own_master, own, *kind, tiles, words[e].group, total)
                if record.block[0] == 1:
                    first, last = (
                        -1 if block is None else words[e].first + 1 + words[e].cut.index(block)
                        for block in cut_blocks(own, cols)
                    )
                    piece = piece._replace(cut_offsets=(first, last))
                items.append(CastItem(matrix, piece, own_codes))
        return items

    def nonfinite_matrices(self) -> list[tuple[int, int]]:
        """After a reduction, (weight, matrix) with a NaN or Inf on any rank. Waits for the device."""
        found = self.words.isinf().nonzero().flatten().tolist()
        return [
            (i, e)
            for i, matrices in enumerate(self._words)
            for e, words in enumerate(matrices)
            if any(words.first <= at < words.last for at in found)
        ]

    def decline(self) -> None:
        """Turn an error in the header into a request for another plan."""
        self.words[ERROR_WORD] = _DECLINED
        self.words[HASH_WORD] = _NO_HASH

    def declined(self) -> bool | None:
        """After a reduction in which this rank declined: whether all did; None if a rank has an error."""
        error_word, hash_word = self.words[[ERROR_WORD, HASH_WORD]].tolist()
        return hash_word == _NO_HASH if error_word == _DECLINED else None


def _of_matrix(shard: Shard, e: int, numel: int) -> Shard:
    """The part of a stack's shard that lies in matrix e."""
    return intersect(e * numel, numel, shard.start, shard.end)
