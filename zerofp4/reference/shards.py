"""Shards of FP32 masters."""

import math

import torch

from zerofp4.format import BLOCK
from zerofp4.reference.elements import pack, unpack
from zerofp4.reference.scales import block_amax, block_scale, encode, magnitude


def place_shard(master: torch.Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The shard's elements, rounded to the weight's dtype, in their places of [M, K] zeros (float32)."""
    flat = torch.zeros(math.prod(shape), dtype=torch.float32, device=master.device)
    flat[start : start + master.numel()] = master.to(dtype).float()
    return flat.view(-1, shape[-1])


def partial_amax(
    master: torch.Tensor, start: int, shape: torch.Size, dtype: torch.dtype, block_rows: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block amaxes [ceil(M/block_rows), ceil(K/16)] and amax [1] of a 1D shard, the rest as 0."""
    placed = place_shard(master, start, shape, dtype)
    return block_amax(placed, block_rows), magnitude(placed).amax().reshape(1)


def partial_cast(
    master: torch.Tensor,
    start: int,
    shape: torch.Size,
    dtype: torch.dtype,
    amax_of_blocks: torch.Tensor,
    amax: torch.Tensor,
    shard_data: torch.Tensor,
    block_rows: int = BLOCK,
) -> torch.Tensor:
    """Write the codes of a 1D shard into shard_data, the uint8 bytes of the packed weight that hold them.
    Returns the scales of all blocks.

    amax is that of the whole weight, and so are the amaxes of the blocks that the shard has elements of. A
    nibble of the first or last byte that belongs to another shard keeps its value.
    """
    placed = place_shard(master, start, shape, dtype)
    scale = block_scale(amax_of_blocks, amax)
    codes = encode(placed, scale, amax, block_rows).flatten()
    nibbles = unpack(shard_data)
    nibbles[start % 2 :][: master.numel()] = codes[start : start + master.numel()]
    shard_data.copy_(pack(nibbles))
    return scale
