"""Drawn casts by 1 to 4 ranks, which are simulated: each has its own stages, masters and buffers, a maximum
of their vectors stands for the all-reduce, and the codes and scales that they own are put together.
"""

from __future__ import annotations

import itertools

import torch
from cases.ops import DTYPES, KINDS, POISON, draw_values, poisoned_like
from helpers import assert_bytes_equal
from hypothesis import given
from hypothesis import strategies as st

from zerofp4 import ops, reference
from zerofp4.cast.reduced_vector import ReducedVector
from zerofp4.cast.request import CastRequest
from zerofp4.cast.scales import gathered_buffers, gathered_shards
from zerofp4.format import BLOCK, SCALE_LAYOUTS, FourOverSix
from zerofp4.shard import Shard, byte_range

LARGEST_WORLD = 4
CHOICES = [None, None, FourOverSix(), FourOverSix(448, "mse")]


@st.composite
def weights(draw):
    """(shape, dtype, kind of values, bounds of the ranks' shards, block, four over six, the amax group)"""
    rows, cols = draw(st.integers(1, 50)), 2 * draw(st.integers(1, 80))
    cuts = draw(st.lists(st.integers(0, rows * cols), min_size=3, max_size=3))
    dtype, kind = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(KINDS))
    block_rows, choice = draw(st.sampled_from([BLOCK, 1])), draw(st.sampled_from(CHOICES))
    if choice is not None and block_rows == BLOCK:  # whoever chooses has whole tiles, or blocks
        cuts = [cut // (BLOCK * cols) * BLOCK * cols for cut in cuts]
    elif choice is not None:
        cuts = [cut // cols * cols + cut % cols // BLOCK * BLOCK for cut in cuts]
    return (rows, cols), dtype, kind, cuts, block_rows, choice, draw(st.integers(0, 2))


class Rank:
    """What one rank owns of all weights, in an order of ranks that each weight may have another of."""

    def __init__(self, device, drawn, whole, rank_shards, rank, master_dtype):
        shards = rank_shards[rank]
        self.found_inf = torch.zeros(1, device=device)
        records, masters, self.codes = [], [], []
        for i, (shape, dtype, _, _, block_rows, choice, _) in enumerate(drawn):
            options = {} if block_rows == BLOCK else {"block": (1, BLOCK), "columnwise": False}
            options["four_over_six"] = choice
            records.append(poisoned_like(shape, dtype, device, scale_layouts=SCALE_LAYOUTS, **options))
            begin, end = byte_range(shards[i])
            self.codes.append(torch.full((end - begin,), POISON, dtype=torch.uint8, device=device))
            masters.append(whole[i].flatten()[shards[i].start : shards[i].end].to(device, master_dtype))
        groups = [group for *_, group in drawn]
        request = CastRequest(records, records, masters, shards, self.codes, groups, "skip", self.found_inf)
        vector = ReducedVector(records, groups, rank_shards, device)
        self.reduced = vector.words.fill_(torch.nan)
        self.items = vector.items(request)
        self.stages, self.post = ops.NativePlan(device), ops.PostStage(device)
        ops.load_cast(self.stages, self.items, self.reduced, hash=5, found_inf=self.found_inf)
        self.post.bind(records)


def shards_of(cuts: list[int], world_size: int, numel: int, turn: int) -> list[Shard]:
    bounds = [0, *sorted(cuts[: world_size - 1]), numel]
    shards = [Shard(begin, end - begin) for begin, end in itertools.pairwise(bounds)]
    return shards[turn % world_size :] + shards[: turn % world_size]


def put_together(ranks: list[Rank], index: int, shape) -> torch.Tensor:
    """The packed codes of a weight: of each rank only the nibbles that it owns."""
    nibbles = torch.full((shape[0] * shape[1],), 0xFF, dtype=torch.uint8)
    for rank in ranks:
        shard, codes = rank.items[index].piece.shard, rank.codes[index].cpu()
        mine = torch.stack([codes & 15, codes >> 4], 1).flatten()
        skipped = shard.start % 2
        nibbles[shard.start : shard.end] = mine[skipped : skipped + shard.numel]
        beside = torch.cat([mine[:skipped], mine[skipped + shard.numel :]])
        both = torch.tensor([POISON & 15, POISON >> 4], dtype=torch.uint8)
        assert torch.isin(beside, both).all(), "another rank's nibble was written"
    low, high = nibbles.view(-1, 2).unbind(1)
    return (low | high << 4).view(shape[0], shape[1] // 2)


def gather_scales(ranks: list[Rank]) -> None:
    """Every rank gets the scales that travel from the ranks that own their blocks."""
    for rank in ranks:
        records = [item.record for item in rank.items]
        parts = gathered_shards(records, [item.piece.shard for item in rank.items])[len(records) :]
        for i, (scale, part) in enumerate(zip(_travelling(rank), parts, strict=True)):
            for other in ranks:
                own = slice(part.start // 2, part.end // 2)
                _travelling(other)[i].view(-1)[own] = scale.view(-1)[own]


def _travelling(rank: Rank) -> list[torch.Tensor]:
    return gathered_buffers([item.record for item in rank.items])[len(rank.items) :]


@given(
    drawn=st.lists(weights(), min_size=1, max_size=4),
    world_size=st.integers(1, LARGEST_WORLD),
    master_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_rank_has_the_bytes_of_quantizing_the_whole(device, drawn, world_size, master_dtype, seed):
    whole = [
        draw_values(seed + i, shape[0] * shape[1], kind).to(master_dtype).float().view(shape)
        for i, (shape, _, kind, *_) in enumerate(drawn)
    ]
    shards = [
        shards_of(cuts, world_size, shape[0] * shape[1], seed + i)
        for i, (shape, _, _, cuts, *_) in enumerate(drawn)
    ]
    by_rank = list(map(list, zip(*shards, strict=True)))
    ranks = [Rank(device, drawn, whole, by_rank, r, master_dtype) for r in range(world_size)]
    for rank in ranks:
        rank.stages.run("begin_amax")
    largest = torch.stack([rank.reduced for rank in ranks]).amax(0)
    for rank in ranks:
        rank.reduced.copy_(largest)
        rank.stages.run("scale_cast")
    gather_scales(ranks)
    for rank in ranks:
        rank.post.run()
    rounded = [values.to(dtype) for values, (_, dtype, *_) in zip(whole, drawn, strict=True)]
    amaxes = [reference.magnitude(values).amax() for values in rounded]
    for i, (shape, *_, block_rows, choice, group) in enumerate(drawn):
        members = [amaxes[j] for j, other in enumerate(drawn) if other[-1] == group]
        amax = torch.stack(members).amax().reshape(1)
        what = f"weight {i} of {world_size} ranks"
        if not amax.isfinite():
            for rank in ranks:
                item = rank.items[i]
                assert rank.found_inf.item() == 1
                for untouched in (rank.codes[i], item.record.amax, item.record.rowwise_scale):
                    assert (untouched.view(torch.uint8) == POISON).all()
            continue
        q = reference.quantize(rounded[i], block_rows, amax, four_over_six=choice)
        assert_bytes_equal(put_together(ranks, i, shape), q.rowwise_data, f"{what}: codes")
        expected = q.buffers(shape, block_rows)
        for r, rank in enumerate(ranks):
            for name, buffer in rank.items[i].record.buffers():
                if not name.endswith("_data"):
                    assert_bytes_equal(buffer.cpu(), expected[name], f"{what}, rank {r}: {name}")
