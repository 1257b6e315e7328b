"""What python -m benchmarks measures and how it counts bytes: pure arithmetic, held against brute force."""

from __future__ import annotations

import json
import re

import pytest
import torch
from helpers import assert_bytes_equal

import zerofp4
from benchmarks import rules
from benchmarks.rules import KINDS, TARGETS, target_of
from benchmarks.session import RESULTS
from benchmarks.workloads import Piece, Tensors, Workload, groups, large, llama, small, square
from zerofp4.shard import Shard

CPU = torch.device("cpu")
TINY = Workload("tiny", (Piece((32, 40), Shard(5, 100)), Piece((16, 16), Shard(0, 256))))


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


SINGLE = [square(64), large(), large(200), groups(), groups(200)]


@pytest.mark.parametrize("workload", [llama(), llama(64), llama(200), small(), small(7), *SINGLE])
def test_owned_ranges_are_inside_their_weights(workload):
    for (rows, cols), shard in workload.pieces:
        assert cols % 2 == 0 and rows % 2 == 0
        assert 0 <= shard.start <= shard.end <= rows * cols
    assert 0 < workload.owned <= workload.elements


@pytest.mark.parametrize(
    ("workload", "name", "count", "shapes"),
    [
        (llama(64), "llama3-8b-scale64", 224, [(64, 64)]),
        (small(), "2000-small", 2000, [(768, 768), (256, 2880), (256, 2872), (768, 768)]),
        (small(200), "10-small", 10, [(768, 768)]),
        (large(), "131072x32768", 1, [(131072, 32768)]),
        (groups(), "64x4096x2048", 64, [(4096, 2048)]),
        (groups(64), "64x64x32", 64, [(64, 32)]),
    ],
)
def test_names_say_what_a_workload_has(workload, name, count, shapes):
    """shapes: of the first weights."""
    assert workload.name == name and len(workload.pieces) == count
    assert [piece.shape for piece in workload.pieces[: len(shapes)]] == shapes


def test_the_small_list_is_cut_at_odd_elements():
    shards = [shard for _, shard in small().pieces]
    assert all(shard.start % 2 and shard.end % 2 for shard in shards)
    assert len({shard.start for shard in shards}) == 50


def test_tensors_are_what_the_workload_says():
    workload = Workload("two", (*TINY.pieces, Piece((16, 32), Shard(0, 0))))
    tensors = Tensors(workload, CPU)
    assert tensors.starts == [5, 0, None] and tensors.masters[2] is None
    assert tensors.masters[1].data_ptr() == tensors.flat.data_ptr() + 4 * 100
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
        (rules.amax, 4 * 356 + 356 / 64),
        (rules.scale, 6 * 7),
        (rules.cast, 4.5 * 356 + 356 / 64),
        (rules.local_step, 8.5 * 356 + 6 * 7),
        (rules.transpose, 32 * 40 + 256),
        (rules.adamw, 28 * 356),
        (rules.adamw_then_cast, 32.5 * 356 + 6 * 7),
    ],
)
def test_bytes_of_a_tiny_list(rule, expected):
    assert (TINY.owned, TINY.tiles) == (356, 7)
    moved = rule(TINY)
    assert moved.bytes == expected
    assert moved.rule


NO_LONGER = re.compile(
    r"(peer_)?exposed/|.*_rht_swizzled|rht_swizzled_|(peer_)?memory_above|zerofp4_(save_host|load_gpu)/"
)
"""Rows of result files that are measured no more, or whose targets depend on what is measured."""


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*_cuda.json")), ids=lambda path: path.stem)
def test_targets_are_those_of_the_result_files(path):
    result = json.loads(path.read_text())
    for row in result["rows"]:
        if not NO_LONGER.match(row["name"]):
            expected = {"kind": row["kind"], "target": row["target"]}
            assert target_of(result["benchmark"], row["name"], row["kind"]) == expected, row["name"]


def test_targets_are_of_rows_that_there_are():
    names = {f"local_step/{workload.part_name}" for workload in (llama(), square(16384), small())}
    assert names == {name for name in TARGETS if name.startswith("local_step/")}
    assert {f"swizzle_over_clone/{large().name}", f"grouped_over_one/{groups().name}"} <= TARGETS.keys()
    assert {kind for kind, _ in TARGETS.values()} <= KINDS.keys()
    assert target_of("megatron_4_ranks", "publish_over_bf16/4xcuda", "ratio")["target"] == 0.6
    assert target_of("step_4_ranks", "peer_publish_over_bf16/4xcuda", "ratio")["target"] == 0.32
    assert target_of("step_4_ranks", "publish_over_bf16/4xcuda", "ratio")["target"] is None
