"""The specification against outputs of another implementation of the same arithmetic, and against itself."""

import itertools

import pytest
import torch
from cases.golden import GOLDEN, MODES, cases_of, check_golden, golden_input
from helpers import assert_bytes_equal
from hypothesis import given
from hypothesis import strategies as st

from zerofp4 import reference
from zerofp4.format import E2M1_VALUES, FLOAT32_MAX
from zerofp4.shard import Shard, byte_range, cut_blocks, owned_blocks


@pytest.mark.parametrize(("case", "mode"), [(case, mode) for mode in MODES for case in cases_of(mode)])
def test_reference_equals_golden_file(device, case, mode):
    x, options = golden_input(case).to(device), MODES[mode]
    q = reference.quantize(x, **options)
    block_rows = options["block_rows"]
    fields = {
        "data": q.rowwise_data,
        "scale": q.rowwise_scale,
        "data_t": q.columnwise_data,
        "scale_t": q.columnwise_scale,
        "amax": q.amax,
        "amax_t": q.columnwise_amax,
        "dequant_f32": reference.dequantize(q.rowwise_data, q.rowwise_scale, q.amax, block_rows),
        "scale_swizzled": reference.swizzle_scale(
            reference.expand_scale(q.rowwise_scale, *x.shape, block_rows)
        ),
    }
    check_golden(case, mode, {name: value.cpu() for name, value in fields.items()})


def test_golden_file_holds_nothing_that_is_not_compared():
    modes = {key.split("/")[1] for key in GOLDEN} - {"x_bf16"}
    assert modes == MODES.keys()
    assert all(cases_of(mode) for mode in MODES)


def test_e2m1_rounds_ties_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert reference.float_to_e2m1(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert reference.float_to_e2m1(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]


def test_e2m1_special_values():
    x = torch.tensor([0.0, -0.0, torch.nan, -torch.nan, torch.inf, -torch.inf, 7.0, -1e30, 1e-45])
    assert reference.float_to_e2m1(x).tolist() == [0, 8, 7, 7, 7, 15, 7, 15, 0]


def test_e2m1_codes_round_trip():
    codes = torch.arange(16, dtype=torch.uint8)
    values = reference.e2m1_to_float(codes)
    assert values[:8].tolist() == list(E2M1_VALUES)
    assert torch.equal(reference.float_to_e2m1(values), codes)


def test_pack_puts_the_even_column_low():
    codes = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    assert reference.pack(codes).tolist() == [[0x21, 0x43]]
    assert torch.equal(reference.unpack(reference.pack(codes)), codes)


def test_zero_and_underflowing_blocks_store_scale_zero():
    x = torch.zeros(16, 32)
    x[0, 16], x[1, 0] = 1.0, 1e-9
    q = reference.quantize(x)
    assert q.rowwise_scale.float().tolist() == [[0.0, 448.0]]
    assert reference.unpack(q.rowwise_data)[1, 0] == 7, "1e-9 * FLT_MAX saturates"


def test_nonfinite_tensor_has_amax_inf_and_unit_tensor_scale():
    x = torch.ones(16, 32)
    x[3, 20] = torch.nan
    q = reference.quantize(x)
    assert q.amax.item() == torch.inf
    assert reference.encode_scale(q.amax).item() == 1.0
    assert q.rowwise_scale[0, 1].float() == 448
    assert reference.unpack(q.rowwise_data)[3, 20] == 7


def test_amax_of_smallest_denormal_saturates_the_encode_scale():
    assert reference.encode_scale(torch.tensor([1e-45])).item() == FLOAT32_MAX


def test_columnwise_copy_takes_the_amax_given_for_it():
    x, amax, columnwise_amax = torch.randn(34, 46), torch.tensor([5.0]), torch.tensor([7.0])
    q = reference.quantize(x, 1, amax, columnwise_amax)
    assert_bytes_equal(q.rowwise_data, reference.quantize(x, 1, amax).rowwise_data, "rowwise")
    transposed = reference.quantize(x.t(), 1, columnwise_amax)
    assert_bytes_equal(q.columnwise_data, transposed.rowwise_data, "columnwise data")
    assert_bytes_equal(q.columnwise_scale, transposed.rowwise_scale, "columnwise scale")
    assert (q.amax.item(), q.columnwise_amax.item()) == (5.0, 7.0)


@pytest.mark.parametrize("block_rows", [1, 16])
def test_copies_share_an_amax_and_odd_rows_have_no_columnwise_copy(block_rows):
    q = reference.quantize(torch.randn(6, 8), block_rows)
    assert q.columnwise_amax is q.amax
    assert reference.quantize(torch.randn(5, 8), block_rows)[2:4] == (None, None)


@pytest.mark.parametrize("block_rows", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dequantize_rounds_the_float32_product_once(block_rows, dtype):
    q = reference.quantize(torch.randn(34, 46), block_rows)
    args = q.rowwise_data, q.rowwise_scale, q.amax, block_rows
    assert_bytes_equal(reference.dequantize(*args, dtype), reference.dequantize(*args).to(dtype), "values")


@pytest.mark.parametrize("shape", [(1, 2), (17, 30), (128, 64), (130, 288), (300, 1040)])
@pytest.mark.parametrize("block_rows", [1, 16])
def test_scale_layouts_round_trip(shape, block_rows):
    rows, cols = shape
    compact = reference.quantize(torch.randn(shape), block_rows).rowwise_scale
    expanded = reference.expand_scale(compact, rows, cols, block_rows)
    assert expanded.shape[0] % 128 == 0 and expanded.shape[1] % 4 == 0
    raw = expanded.view(torch.uint8)
    assert not raw[rows:].any() and not raw[:, compact.shape[1] :].any(), "padding is zero"
    swizzled = reference.swizzle_scale(expanded)
    assert_bytes_equal(reference.unswizzle_scale(swizzled), expanded, "unswizzle")
    assert_bytes_equal(reference.compact_scale(expanded, rows, cols, block_rows), compact, "compact")


def test_swizzled_scales_are_a_permutation_of_the_padded_matrix():
    rows, columns = 256, 12
    expanded = torch.arange(rows * columns, dtype=torch.int16).view(rows, columns)
    low, high = (
        reference.swizzle_scale(part.to(torch.uint8)).flatten() for part in (expanded & 0xFF, expanded >> 8)
    )
    places = (low.int() + high.int() * 256).argsort().view(rows, columns)
    assert sorted(places.flatten().tolist()) == list(range(rows * columns))
    # The corners of an atom: 4 bytes of a row together, rows 32 apart in one 16-byte group.
    corners = [(0, 3), (32, 0), (1, 0), (0, 4), (128, 0)]
    assert [places[corner].item() for corner in corners] == [3, 4, 16, 512, 1536]


@pytest.mark.parametrize("shape", [(2, 2), (18, 30), (48, 272)])
def test_shards_together_equal_the_whole(shape):
    """Amaxes by maximum, codes into one buffer: three ranks, odd boundaries, the bytes of quantize()."""
    master = torch.randn(shape).flatten()
    whole = reference.quantize(master.view(shape).bfloat16())
    bounds = [0, master.numel() // 3 | 1, master.numel() * 2 // 3 | 1, master.numel()]
    spans = [(a, b) for a, b in itertools.pairwise(bounds) if b > a]
    parts = [reference.partial_amax(master[a:b], a, shape, torch.bfloat16) for a, b in spans]
    tile_amax = torch.stack([tiles for tiles, _ in parts]).amax(0)
    amax = torch.stack([amax for _, amax in parts]).amax(0)
    data = torch.full_like(whole.rowwise_data, 0xA5)
    for a, b in spans:
        codes = data.view(-1)[a // 2 : (b + 1) // 2]
        reference.partial_cast(master[a:b], a, shape, torch.bfloat16, tile_amax, amax, codes)
    assert_bytes_equal(data, whole.rowwise_data, "codes")
    assert_bytes_equal(reference.block_scale(tile_amax, amax), whole.rowwise_scale, "scales")


@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 40).map(lambda half: 2 * half)),
    cuts=st.lists(st.integers(0, 10**4), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_shards_of_1x16_blocks_together_equal_the_whole(shape, cuts, dtype, seed):
    """1 to 4 ranks, any cut, empty shards. Ranks tell each other the amax and those of blocks that a cut goes
    through, nothing else; the scale of a block is that of the rank with its first element.
    """
    numel, cols = shape[0] * shape[1], shape[1]
    master = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    whole = reference.quantize(master.view(shape).to(dtype), 1)
    bounds = [0, *sorted(cut % (numel + 1) for cut in cuts), numel]
    shards = [Shard(a, b - a) for a, b in itertools.pairwise(bounds)]
    parts = [reference.partial_amax(master[s.start : s.end], s.start, shape, dtype, 1) for s in shards]
    amax = torch.stack([amax for _, amax in parts]).amax(0)
    words = {block: 0.0 for shard in shards for block in cut_blocks(shard, cols) if block is not None}
    for blocks, _ in parts:
        words = {block: max(word, blocks.flatten()[block].item()) for block, word in words.items()}
    data, scale = torch.full_like(whole.rowwise_data, 0xA5), torch.zeros_like(whole.rowwise_scale)
    for shard, (blocks, _) in zip(shards, parts, strict=True):
        for block in cut_blocks(shard, cols):
            if block is not None:
                blocks.flatten()[block] = words[block]
        codes = data.view(-1)[slice(*byte_range(shard))]
        own = master[shard.start : shard.end]
        scales = reference.partial_cast(own, shard.start, shape, dtype, blocks, amax, codes, 1)
        first, last = owned_blocks(shard, cols)
        scale.view(torch.uint8).flatten()[first:last] = scales.view(torch.uint8).flatten()[first:last]
    assert_bytes_equal(data, whole.rowwise_data, "codes")
    assert_bytes_equal(scale, whole.rowwise_scale, "scales")


# Matrices whose products are known


@pytest.mark.parametrize("shape", [(2, 2), (18, 50), (34, 80), (128, 128), (256, 512)], ids=str)
@pytest.mark.parametrize("block_rows", [1, 16])
def test_a_pattern_is_what_it_is_quantized_to(shape, block_rows):
    matrix = reference.pattern(*shape)
    amax = torch.full((1,), 2688.0)
    q = reference.quantize(matrix, block_rows, amax)
    assert torch.equal(reference.nvfp4_operand(q.rowwise_data, q.rowwise_scale, block_rows), matrix.double())
    scales = q.rowwise_scale.float()
    assert len(scales.unique()) == 11 or scales[::16].numel() < 32


def test_a_pattern_differs_from_itself_elsewhere():
    """A product with a one-hot matrix finds each element that is in the place of another: all rows differ,
    and all columns.
    """
    matrix = reference.pattern(128, 256)
    assert matrix.unique(dim=0).shape == matrix.unique(dim=1).shape == matrix.shape


def test_one_hot():
    matrix = reference.one_hot(100)
    assert torch.equal((matrix != 0).int(), torch.eye(100, dtype=torch.int32))
    q = reference.quantize(matrix, 1, torch.full((1,), 2688.0))
    assert torch.equal(reference.nvfp4_operand(q.rowwise_data, q.rowwise_scale, 1), matrix.double())
