"""The stages of a plan on every backend against the specification, byte for byte."""

import numpy as np
import pytest
import torch
from cases.ops import DTYPES, KINDS, POISON, draw_values, poisoned_like
from helpers import assert_bytes_equal
from hypothesis import example, given
from hypothesis import strategies as st

from zerofp4 import ops, reference
from zerofp4.format import BLOCK, SCALE_LAYOUTS
from zerofp4.layout import ceil_div
from zerofp4.shard import Shard, byte_range, cut_blocks, row_block


class ShardCase:
    """One weight and a shard of it, with the tensors that the stages work on, all poisoned. After the header
    the reduced vector has the amax of the weight, then those of its tiles; of blocks of 1x16 its own amax and
    those of the blocks in which the shard begins and ends, whether it has all of them or not.
    """

    def __init__(
        self, device, shape, start, numel, dtype, kind, seed, master_dtype=torch.float32, block_rows=BLOCK
    ):
        self.block_rows = block_rows
        self.shape, self.dtype, self.shard = shape, dtype, Shard(start, numel)
        self.whole = draw_values(seed, shape[0] * shape[1], kind)
        if master_dtype == torch.bfloat16:
            self.whole = self.whole.bfloat16().float()
        # A view at an element offset: masters are aligned to no more than one element.
        owned = torch.cat([torch.zeros(seed % 4), self.whole[start : start + numel]])
        self.master = owned.to(device, master_dtype)[seed % 4 :]
        options = {"block": (block_rows, BLOCK), "columnwise": block_rows == BLOCK and shape[0] % 2 == 0}
        self.record = poisoned_like(shape, dtype, device, scale_layouts=SCALE_LAYOUTS, **options)
        first, last = byte_range(self.shard)
        self.codes = torch.full((last - first,), POISON, dtype=torch.uint8, device=device)
        self.words = ceil_div(shape[0], BLOCK) * ceil_div(shape[1], BLOCK) if block_rows == BLOCK else 3
        self.reduced = torch.full((ops.HEADER_WORDS + 1 + self.words,), torch.nan, device=device)
        self.found_inf = torch.zeros(1, device=device)
        self.status = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        item = self.item(ops.HEADER_WORDS + 1, ops.HEADER_WORDS)
        self.stages = ops.NativePlan(device)
        words = {"hash": 77, "found_inf": self.found_inf, "status": self.status}
        ops.load_cast(self.stages, [item], self.reduced, **words)

    def item(self, offset: int, amax_offset: int) -> ops.CastItem:
        """offset: of the words behind the amax."""
        places = (self.record.matrix, self.record.dtype, offset, amax_offset)
        piece = ops.MasterPiece(self.master, self.shard, *places)
        if self.block_rows == 1:
            cut = [-1 if b is None else offset + 1 + i for i, b in enumerate(self.cut)]
            piece = piece._replace(tile_offset=-1, own_offset=offset, cut_offsets=tuple(cut))
        return ops.CastItem(self.record, piece, self.codes)

    @property
    def cut(self) -> tuple[int | None, int | None]:
        return cut_blocks(self.shard, self.shape[1])

    def words_of(self, block_amax: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        """What belongs behind the header."""
        if self.block_rows == BLOCK:
            return torch.cat([amax, block_amax.flatten()])
        blocks = block_amax.flatten()
        cut = [amax.new_zeros(1) if b is None else blocks[b : b + 1] for b in self.cut]
        return torch.cat([amax, amax, *cut])

    def written_scales(self, scale: torch.Tensor) -> torch.Tensor:
        """Of the compact scales, with the others as they were: those of all blocks that the shard has an
        element of.
        """
        if self.block_rows == BLOCK:
            return scale
        expected = torch.full_like(scale.view(torch.uint8), POISON)
        if self.shard.numel:
            first, last = (row_block(e, self.shape[1])[0] for e in (self.shard.start, self.shard.end - 1))
            expected.flatten()[first : last + 1] = scale.view(torch.uint8).flatten()[first : last + 1]
        return expected.view(scale.dtype)


@st.composite
def shard_cases(draw):
    rows, cols = draw(st.integers(1, 100)), 2 * draw(st.integers(1, 200))
    start = draw(st.integers(0, rows * cols))
    numel = draw(st.integers(0, rows * cols - start))
    return (rows, cols), start, numel, draw(st.sampled_from(DTYPES)), draw(st.sampled_from(KINDS))


PADDED = [f"rowwise_scale_{layout}" for layout in SCALE_LAYOUTS[1:]]
MASTER_DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.threads
@pytest.mark.parametrize("block_rows", [BLOCK, 1])
@given(case=shard_cases(), seed=st.integers(0, 2**32 - 1), master_dtype=st.sampled_from(MASTER_DTYPES))
@example(case=((16, 16), 17, 3, torch.bfloat16, "normal"), seed=0, master_dtype=torch.float32)
@example(case=((16, 400), 131, 1, torch.bfloat16, "normal"), seed=1, master_dtype=torch.float32)
@example(case=((33, 288), 4095, 1026, torch.bfloat16, "normal"), seed=2, master_dtype=torch.bfloat16)
@example(case=((64, 128), 0, 64 * 128, torch.float16, "spread"), seed=0, master_dtype=torch.float32)
@example(case=((80, 1030), 1031, 70001, torch.bfloat16, "normal"), seed=3, master_dtype=torch.bfloat16)
@example(case=((80, 1028), 1027, 70003, torch.bfloat16, "normal"), seed=2, master_dtype=torch.float32)
@example(case=((600, 2200), 5001, 1300000, torch.bfloat16, "normal"), seed=1, master_dtype=torch.float32)
@example(case=((2200, 600), 5002, 1300001, torch.bfloat16, "normal"), seed=0, master_dtype=torch.float32)
def test_stages_on_a_shard(device, block_rows, case, seed, master_dtype):
    shape, start, numel, dtype, kind = case
    c = ShardCase(device, shape, start, numel, dtype, kind, seed, master_dtype, block_rows)
    c.stages.run("begin_amax")
    own = reference.partial_amax(c.master.float(), start, shape, dtype, block_rows)
    assert c.reduced[: ops.HEADER_WORDS].tolist() == [0, 77, 0, 0, -77, 0, 0, 0]
    assert_bytes_equal(c.reduced[ops.HEADER_WORDS :], c.words_of(*own), "amaxes")
    # What an all-reduce would do: the other ranks' parts of the weight.
    whole = c.whole.to(device)
    block_amax, amax = reference.partial_amax(whole, 0, shape, dtype, block_rows)
    c.reduced[ops.HEADER_WORDS :] = c.words_of(block_amax, amax)
    c.stages.run("scale_cast")
    assert c.status.item() == 0
    if amax.isinf():
        assert c.found_inf.item() == 1
        assert (c.codes == POISON).all(), "codes of a weight that is not finite were touched"
        assert all((b.view(torch.uint8) == POISON).all() for _, b in c.record.buffers())
        return
    assert c.found_inf.item() == 0
    expected_codes = torch.full_like(c.codes, POISON)
    blocks = block_amax, amax, expected_codes, block_rows
    reference.partial_cast(c.master.float(), start, shape, dtype, *blocks)
    assert_bytes_equal(c.codes, expected_codes, "codes")
    quantized = reference.quantize(whole.view(shape).to(dtype), block_rows)
    expected = quantized.buffers(shape, block_rows)
    expected["rowwise_scale"] = c.written_scales(quantized.rowwise_scale)
    for name, buffer in c.record.buffers():
        if block_rows == 1 and name in PADDED:
            assert (buffer.view(torch.uint8) == POISON).all(), "padded before all scales are there"
        elif not name.endswith("_data"):
            assert_bytes_equal(buffer, expected[name], name)


@pytest.mark.parametrize(
    ("word", "value", "status"),
    [(0, torch.inf, ops.PEER_ERROR), (1, 78.0, ops.PLAN_MISMATCH), (2, -76.0, ops.PLAN_MISMATCH)],
)
def test_nobody_writes_when_the_header_says_no(device, word, value, status):
    c = ShardCase(device, (40, 64), 5, 1000, torch.bfloat16, "normal", 0)
    c.stages.run("begin_amax")
    c.reduced[word] = value
    c.stages.run("scale_cast")
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert c.status.item() == status
    assert (c.codes == POISON).all()
    assert all((b.view(torch.uint8) == POISON).all() for _, b in c.record.buffers())


def test_begin_with_an_error_flags_the_vector(device):
    c = ShardCase(device, (40, 64), 5, 1000, torch.bfloat16, "normal", 0)
    c.stages.run("begin", True)
    assert c.reduced[0].item() == torch.inf and not c.reduced[ops.HEADER_WORDS :].any()


@pytest.mark.threads
@pytest.mark.cpu_kernel
def test_many_weights_in_one_plan(device):
    """Sizes from one tile to many, both kinds of blocks, empty shards, shared amax words: each weight as if
    it were alone.
    """
    shapes = [(2, 2), (130, 66), (16, 16), (64, 1000), (48, 48), (256, 256), (34, 30)] * 20
    rng = np.random.default_rng(0)
    cases, items, total = [], [], ops.HEADER_WORDS + len(shapes)
    for i, shape in enumerate(shapes):
        numel = shape[0] * shape[1]
        start, end = sorted(rng.integers(0, numel + 1, 2).tolist()) if i % 4 else (0, 0)
        block_rows = 1 if i % 5 in (1, 3) else BLOCK
        c = ShardCase(device, shape, start, end - start, DTYPES[i % 3], "normal", i, block_rows=block_rows)
        cases.append(c)
        items.append(c.item(total, ops.HEADER_WORDS + i // 2))
        total += c.words
    reduced = torch.full((total,), torch.nan, device=device)
    stages = ops.NativePlan(device)
    ops.load_cast(stages, items, reduced)
    stages.run("begin_amax")
    total = ops.HEADER_WORDS + len(shapes)
    for i, c in enumerate(cases):
        own = reference.partial_amax(c.master, c.shard.start, c.shape, c.dtype, c.block_rows)
        assert_bytes_equal(reduced[total : total + c.words], c.words_of(*own)[1:], f"amaxes {i}")
        total += c.words
    for g in range((len(shapes) + 1) // 2):
        members = cases[2 * g : 2 * g + 2]
        amaxes = [reference.partial_amax(c.master, c.shard.start, c.shape, c.dtype)[1] for c in members]
        assert reduced[ops.HEADER_WORDS + g] == torch.stack(amaxes).max()
    stages.run("scale_cast")
    for i, (c, item) in enumerate(zip(cases, items, strict=True)):
        block_amax, _ = reference.partial_amax(c.master, c.shard.start, c.shape, c.dtype, c.block_rows)
        amax = reduced[item.piece.amax_offset].reshape(1)
        expected = torch.full_like(c.codes, POISON)
        blocks = block_amax, amax, expected, c.block_rows
        scale = reference.partial_cast(c.master, c.shard.start, c.shape, c.dtype, *blocks)
        assert_bytes_equal(c.codes, expected, f"codes {i}")
        assert_bytes_equal(c.record.buffer("rowwise_scale"), c.written_scales(scale), f"scale {i}")


def test_transposes_of_memory_that_moves_and_comes_back(device):
    """As FSDP2 frees and takes it: what is bound last is what is read and written."""
    generator = torch.Generator().manual_seed(0)
    kept = [[poisoned_like(shape, torch.bfloat16, device) for shape in ((34, 48), (16, 130))] for _ in "ab"]
    for record in kept[0] + kept[1]:
        codes = torch.randint(256, record.rowwise.data.shape, dtype=torch.uint8, generator=generator)
        record.rowwise.data.copy_(codes)
    stage = ops.PostStage(device)
    for records in (kept[0], kept[1], kept[1], [kept[0][0], kept[1][1]], kept[0]):
        stage.bind(records)
        for record in records:
            record.rowwise.data.add_(1)
            record.columnwise.data.fill_(POISON)
        stage.run()
        for i, record in enumerate(records):
            expected = torch.ops.zerofp4.transpose_packed(record.rowwise.data)
            assert_bytes_equal(record.columnwise.data, expected, f"record {i}")
