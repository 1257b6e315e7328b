"""Scales that travel: in blocks of 1x16 a scale is known to the rank that owns its elements alone, so that
its byte is gathered with the codes.
"""

from collections.abc import Sequence

import torch

from zerofp4.shard import Shard, owned_blocks
from zerofp4.storage import NVFP4Storage


def scales_travel(record: NVFP4Storage) -> bool:
    """Whether the compact scales of a weight are gathered, and not computed by every rank."""
    return record.block[0] == 1


def gathered_buffers(records: Sequence[NVFP4Storage]) -> list[torch.Tensor]:
    """What a gather completes: the codes of all weights, then the scales that travel, as bytes."""
    scales = [r.rowwise.scales["compact"].view(torch.uint8) for r in records if scales_travel(r)]
    return [*(record.rowwise.data for record in records), *scales]


def gathered_shards(records: Sequence[NVFP4Storage], shards: Sequence[Shard]) -> list[Shard]:
    """A rank's part of each of gathered_buffers(), from its shards of the weights: in codes, of which a byte
    holds two, and so does that of a scale here.
    """
    scales = [_scale_shard(r, s) for r, s in zip(records, shards, strict=True) if scales_travel(r)]
    return [*shards, *scales]


def _scale_shard(record: NVFP4Storage, shard: Shard) -> Shard:
    first, last = owned_blocks(shard, record.matrix[1])
    return Shard(2 * first, 2 * (last - first))
