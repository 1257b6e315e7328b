"""What scripts/bench.py measures and how it counts bytes: pure arithmetic, held against brute force."""

from __future__ import annotations

import pytest
import torch
from benchmarking import rules
from benchmarking.targets import KINDS, TARGETS
from benchmarking.workloads import (
    TE_SHAPES,
    Piece,
    Tensors,
    Workload,
    groups,
    large,
    llama,
    small,
    square,
    te_shapes,
)
from helpers import assert_bytes_equal

import zerofp4
from zerofp4.format import BLOCK, SCALE_LAYOUTS
from zerofp4.shard import Shard

CPU = torch.device("cpu")
TINY = Workload("tiny", (Piece((32, 40), Shard(5, 100)), Piece((16, 16), Shard(0, 256))))
"""The first piece owns columns 5..39 of row 0, all of row 1 and columns 0..24 of row 2: 3 tiles of 6."""


# Workloads


def test_the_llama_list_is_rank_1_of_4():
    workload = llama()
    assert workload.part_name == "llama3-8b/rank1of4"
    assert len(workload.pieces) == 224
    assert workload.elements == 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096) == 6_979_321_856
    # A quarter of the model, less the norms in it: two of each of nine layers, and half of the next one.
    assert workload.owned == 8_030_261_248 // 4 - 18 * 4096 - 2048 == 2_007_489_536
    owned = [i for i, piece in enumerate(workload.pieces) if piece.shard.numel]
    assert owned == list(range(owned[0], owned[0] + 64)) and owned[0] == 7 * 6 + 6
    shape, shard = workload.pieces[owned[0]]
    assert shape == (4096, 14336) and divmod(shard.start, 14336) == (988, 1024), "cut inside a row of down"
    assert shard.end == 4096 * 14336
    assert workload.tiles * 256 == workload.elements


SINGLE = [square(64), te_shapes(), te_shapes(200), large(), large(200), groups(), groups(200)]


@pytest.mark.parametrize("workload", [llama(), llama(64), llama(200), small(), small(7), *SINGLE])
def test_owned_ranges_are_inside_their_weights(workload):
    for (rows, cols), shard in workload.pieces:
        assert cols % 2 == 0 and rows % 2 == 0
        assert 0 <= shard.start <= shard.end <= rows * cols
    assert 0 < workload.owned <= workload.elements
    assert workload.owned_tiles <= workload.tiles


def test_a_scaled_list_says_so_and_keeps_its_structure():
    workload = llama(64)
    assert workload.part_name == "llama3-8b-scale64/rank1of4"
    assert len(workload.pieces) == 224 and workload.pieces[0].shape == (64, 64)
    assert small(200).name == "10-small"


def test_what_single_tensors_are_measured_on():
    assert [piece.shape for piece in te_shapes().pieces] == list(TE_SHAPES)
    assert te_shapes(200).name == "te-3011-scale200"
    ((shape, shard),) = large().pieces
    assert large().name == "131072x32768" and shard.numel // 16 == shape[0] * shape[1] // 16 == 1 << 28
    assert groups().name == "64x4096x2048" and len(groups().pieces) == 64
    assert groups(64).name == "64x64x32"
    for scale in (1, 16, 200):
        shapes = [piece.shape for piece in te_shapes(scale).pieces]
        assert len(set(shapes)) == len(shapes), "a row is named by its shape"


def test_the_small_list_is_cut_at_odd_elements():
    workload = small()
    assert workload.name == "2000-small" and len(workload.pieces) == 2000
    assert [piece.shape for piece in workload.pieces[:4]] == [
        (768, 768),
        (256, 2880),
        (256, 2872),
        (768, 768),
    ]
    assert all(shard.start % 2 and shard.end % 2 for _, shard in workload.pieces)
    assert len({shard.start for _, shard in workload.pieces}) == 50


@pytest.mark.parametrize("shape", [(32, 40), (48, 16), (34, 130)])
@pytest.mark.parametrize(
    ("start", "numel"), [(0, 1), (5, 100), (17, 640), (0, 1280), (700, 0), (613, 2), (30, 25)]
)
def test_owned_tiles(shape, start, numel):
    numel = min(numel, shape[0] * shape[1] - start)
    owned = torch.zeros(shape, dtype=torch.bool)
    owned.view(-1)[start : start + numel] = True
    tiles = {(int(row) // BLOCK, int(col) // BLOCK) for row, col in owned.nonzero()}
    assert Piece(shape, Shard(start, numel)).owned_tiles == len(tiles)


def test_tensors_are_what_the_workload_says():
    workload = Workload("two", (*TINY.pieces, Piece((16, 32), Shard(0, 0))), scale_layouts=SCALE_LAYOUTS)
    tensors = Tensors(workload, CPU)
    assert tensors.starts == [5, 0, None] and tensors.masters[2] is None
    assert tensors.masters[1].data_ptr() == tensors.flat.data_ptr() + 4 * 100
    buffers = [
        buffer for weight in tensors.weights for name, buffer in weight.record.buffers() if "scale" in name
    ]
    assert workload.scale_bytes == sum(buffer.nbytes for buffer in buffers)
    before = [weight.rowwise_data.clone() for weight in tensors.weights]
    tensors.plan().step()
    assert_bytes_equal(tensors.weights[2].rowwise_data, before[2], "codes that nobody owns")
    assert_bytes_equal(tensors.weights[0].rowwise_data[3:], before[0][3:], "codes below the owned ones")
    expected = zerofp4.quantize(tensors.masters[1].view(16, 16).bfloat16())
    assert_bytes_equal(tensors.weights[1].rowwise_data, expected.rowwise_data, "codes of an owned weight")


# Rules


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (rules.begin, 4 * 7),
        (rules.amax, 4 * 356 + 4 * 4),
        (rules.scale, 6 * 7),
        (rules.cast, 4.5 * 356 + 4 * 4),
        (rules.local_step, 8.5 * 356 + 6 * 7),
        (rules.transpose, 32 * 40 + 256),
        (rules.adamw, 28 * 356),
        (rules.adamw_then_cast, 32.5 * 356 + 6 * 7),
        (rules.bf16_copy, 6 * 356),
    ],
)
def test_bytes_of_a_tiny_list(rule, expected):
    assert (TINY.owned, TINY.tiles, TINY.owned_tiles) == (356, 7, 4)
    moved = rule(TINY)
    assert moved.bytes == expected
    assert moved.rule


def test_bytes_of_padded_scales():
    workload = Workload("one", (Piece((32, 40), Shard(0, 1280)),), scale_layouts=("compact", "swizzled"))
    assert workload.scale_bytes == 2 * 6 + 2 * 128 * 4
    assert rules.scale(workload).bytes == 4 * 6 + 2 * 6 + 2 * 128 * 4


def test_targets_are_those_that_were_set():
    assert TARGETS["local_step/llama3-8b/rank1of4"] == ("percent_of_copy", 92)
    assert TARGETS["local_step/16384"] == ("percent_of_copy", 95)
    assert TARGETS["local_step/2000-small"] == ("percent_of_copy", 70)
    assert TARGETS["transpose/llama3-8b"] == ("percent_of_copy", 88)
    assert TARGETS["adamw/llama3-8b"] == ("percent_of_copy", 90)
    assert TARGETS["adamw_then_cast/llama3-8b"] == ("speedup", 1.08)
    assert TARGETS["quantize_1d/16384"] == ("percent_of_copy", 75)
    assert TARGETS["rht_swizzled_over_compact/16384"] == ("ratio", 1.03)
    assert TARGETS["rht_one_pass_over_two/16384"] == ("speedup", 1.2)
    assert TARGETS[f"swizzle_over_clone/{large().name}"] == ("ratio", 1.25)
    assert TARGETS[f"grouped_over_one/{groups().name}"] == ("ratio", 1.1)
    assert TARGETS["dequantize_mxfp8/16384"] == ("percent_of_copy", 95)
    names = {f"local_step/{workload.part_name}" for workload in (llama(), square(16384), small())}
    assert names == {name for name in TARGETS if name.startswith("local_step/")}
    assert {kind for kind, _ in TARGETS.values()} <= KINDS.keys()
