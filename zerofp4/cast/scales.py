"""Scales that travel (1x16 blocks, four over six): only the owner of a block knows its scale."""

from collections.abc import Sequence

import torch

from zerofp4.format import BLOCK
from zerofp4.layout import ceil_div
from zerofp4.shard import Shard, cut_blocks, intersect, owned_blocks
from zerofp4.storage import NVFP4Storage


def gathered_buffers(records: Sequence[NVFP4Storage]) -> list[torch.Tensor]:
    """The buffers that a gather completes: codes of all weights, then scales that travel, as bytes."""
    return [*(record.rowwise.data for record in records), *travelling_scales(records)]


def gathered_shards(records: Sequence[NVFP4Storage], shards: Sequence[Shard]) -> list[Shard]:
    """A rank's part of each of gathered_buffers(), counted in codes."""
    return [*shards, *travelling_shards(records, shards)]


def travelling_scales(records: Sequence[NVFP4Storage]) -> list[torch.Tensor]:
    """The compact scales that travel, as bytes."""
    return [r.rowwise.scale_places["compact"].view(torch.uint8) for r in records if r.scales_travel]


def travelling_shards(records: Sequence[NVFP4Storage], shards: Sequence[Shard]) -> list[Shard]:
    """A rank's part of each of travelling_scales(), counted in codes: two per byte, so two per scale."""
    return [_scale_shard(r, s) for r, s in zip(records, shards, strict=True) if r.scales_travel]


def _scale_shard(record: NVFP4Storage, shard: Shard) -> Shard:
    rows, cols = record.matrix
    if record.block[0] == 1:
        first, last = owned_blocks(shard, cols)
    else:
        # Whole rows of tiles (check_whole_blocks); each matrix of a stack has its own tiles.
        first, last = (
            (row // rows * ceil_div(rows, BLOCK) + row % rows // BLOCK) * ceil_div(cols, BLOCK)
            for row in (shard.start // cols, shard.end // cols)
        )
    return Shard(2 * first, 2 * (last - first))


def block_unit(record: NVFP4Storage) -> int:
    """Number of elements: cuts of the weight at multiples of it split no block. Its scales travel."""
    rows, cols = record.matrix
    if record.block[0] == 1:
        return cols if cols % BLOCK else BLOCK
    # The tiles of each matrix of a stack begin with it.
    whole_tiles = record.experts is None or rows % BLOCK == 0
    return BLOCK * cols if whole_tiles else rows * cols


def check_whole_blocks(what: str, name: str, record: NVFP4Storage, shard: Shard) -> None:
    """Raises ValueError for a shard with a part of a block, or tile, whose scale four over six chooses."""
    if record.four_over_six is None or not shard.numel:
        return
    rows, cols = record.matrix
    for e in range(record.experts or 1):
        own = intersect(e * rows * cols, rows * cols, shard.start, shard.end)
        if record.block[0] == 1:
            unit, is_whole = f"blocks of 16 along its rows of {cols}", cut_blocks(own, cols) == (None, None)
        else:
            tiles = BLOCK * cols
            unit = f"rows of tiles, {tiles} elements"
            is_whole = own.start % tiles == 0 and (own.end % tiles == 0 or own.end == rows * cols)
        if not is_whole:
            raise ValueError(
                f"{what}: elements {shard.start} to {shard.end - 1} are not whole {unit}, of {name}, whose "
                f"scales {record.four_over_six} chooses: cut it between these"
            )
