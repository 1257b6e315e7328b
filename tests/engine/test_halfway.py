"""Where codes begin to leave while others are made, and that these are what the whole cast makes."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers import assert_bytes_equal

import zerofp4
from zerofp4.engine import buckets
from zerofp4.engine.peer import find_halfway

LISTS = {
    "large": [(400, 512), (320, 640)],
    "tiles cut off": [(78, 300), (402, 514), (334, 260)],
    "long rows": [(2, 40000), (800, 512)],
    "a stack": [(5, 72, 512), (96, 512)],
    "small ones": [(16, 16), (640, 384), (2, 8), (48, 640), (0, 32), (300, 512)],
}
POISON = 0xA5


def own_codes(buffer: buckets.Bucket, i: int, bytes_sent: int) -> slice:
    """Of weight i, the bytes of this rank that are among the first of its slice."""
    shard, before = buffer.shards[i], buffer.offsets[i] - buffer.begin
    last = min(shard.start + shard.numel, 2 * bytes_sent - before)
    return slice(shard.start // 2, max(shard.start, last) // 2)


def keep(weights: list[zerofp4.NVFP4Tensor], found: list[torch.Tensor]) -> None:
    found += [weight.rowwise_data.clone() for weight in weights]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("what", LISTS)
def test_codes_that_leave_are_there(device, monkeypatch, what, ranks):
    """Of every rank: those before halfway, whichever row of whichever weight it owns in part that is; and
    where there is enough to do, not all the others.
    """
    parted = 0
    for rank in range(ranks):
        monkeypatch.setattr(buckets, "rank_and_size", lambda group, rank=rank: (rank, ranks))
        weights = [zerofp4.empty(shape, dtype=torch.float32, device=device) for shape in LISTS[what]]
        buffer = buckets.Bucket(range(len(weights)), weights)
        halfway = find_halfway(buffer)
        if halfway is None:
            assert what == "long rows" and rank == 0  # whose middle is in its first row of tiles
            continue
        position, row, sent = halfway
        assert 0.2 < 2 * sent / buffer.slice_numel <= 0.5
        masters, starts = [], []
        for weight, shard in zip(weights, buffer.shards, strict=True):
            masters.append(torch.randn(shard.numel, device=device) if shard.numel else None)
            starts.append(shard.start if shard.numel else None)
            weight.rowwise_data.fill_(POISON)
        plan, found = zerofp4.CastPlan(weights, masters, starts), []
        plan.start_step()
        plan.finish_step((position, row, functools.partial(keep, weights, found)))
        plan.post()
        for i, (weight, half) in enumerate(zip(weights, found, strict=True)):
            done = own_codes(buffer, i, sent)
            assert_bytes_equal(half.view(-1)[done], weight.rowwise_data.view(-1)[done], f"{rank}: {i}")
        parted += any(not torch.equal(x.rowwise_data, half) for x, half in zip(weights, found, strict=True))
    assert parted >= min(ranks, 2)
