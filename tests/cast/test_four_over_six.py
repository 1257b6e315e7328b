"""Casts into weights with four over six, in a world of one."""

from __future__ import annotations

import pytest
import torch
from cases.cast import ROWS, TILES, check_kinds, make_kinds, run
from cases.quantize import CHOICES
from helpers import assert_bytes_equal

import zerofp4


def test_all_kinds_in_one_plan(device):
    """With an amax in common; and stacks of experts, each of which chooses for itself."""
    shapes = [(34, 288), (64, 64), (130, 1000), (3, 18, 50), (2, 32, 32)]
    weights, masters, starts = make_kinds(
        device, shapes, [TILES, ROWS, ROWS, TILES, TILES], [None, *CHOICES[1:]]
    )
    run(zerofp4.CastPlan(weights, masters, starts))
    check_kinds(weights, masters)
    run(zerofp4.CastPlan(weights[:3], masters[:3], starts[:3], amax_groups=[weights[:3]]))
    amax = torch.stack([weight.amax for weight in weights[:3]]).amax(0)
    check_kinds(weights[:3], masters[:3], amax)


def test_a_shard_of_whole_blocks_touches_nothing_else(device):
    """Of tiles the second row of them, of 1x16 blocks all but the first and the last."""
    whole = torch.randn(40, 40, device=device)
    for block, start, end in ((TILES, 16 * 40, 32 * 40), (ROWS, 16, 40 * 40 - 8)):
        weight = zerofp4.empty((40, 40), block=block, four_over_six=CHOICES[0], device=device)
        for buffer in (weight.rowwise_data, weight.rowwise_scale.view(torch.uint8)):
            buffer.fill_(0xA5)
        master = whole.flatten()[start:end].clone()
        zerofp4.cast_master_weights_to_nvfp4([weight], [master], [start])
        values = torch.zeros_like(whole).flatten()
        values[start:end] = master
        values = values.view(40, 40).to(weight.dtype)
        expected = zerofp4.quantize(values, block=block, four_over_six=CHOICES[0])
        codes, scale = expected.rowwise_data.flatten(), expected.rowwise_scale.view(torch.uint8).flatten()
        first, last = (3, 6) if block == TILES else (1, len(scale) - 1)
        codes[: start // 2] = codes[end // 2 :] = scale[:first] = scale[last:] = 0xA5
        assert_bytes_equal(weight.rowwise_data.flatten(), codes, "codes")
        assert_bytes_equal(weight.rowwise_scale.view(torch.uint8).flatten(), scale, "scales")


# What is refused


@pytest.mark.parametrize(
    ("block", "shape", "start", "numel", "unit"),
    [
        (TILES, (40, 32), 0, 256, "rows of tiles, 512 elements"),
        (TILES, (40, 32), 256, 1024, "rows of tiles, 512 elements"),
        (TILES, (2, 40, 32), 512, 1024, "rows of tiles, 512 elements"),
        (ROWS, (4, 40), 0, 8, "blocks of 16 along its rows of 40"),
        (ROWS, (4, 40), 24, 56, "blocks of 16 along its rows of 40"),
    ],
)
def test_a_shard_of_a_part_of_a_block(block, shape, start, numel, unit):
    weight = zerofp4.empty(shape, block=block, four_over_six=CHOICES[0])
    weight.record.name = "mlp.fc1"
    what = f"elements {start} to {start + numel - 1} are not whole {unit}, of model_weights.0. 'mlp.fc1'"
    for call, arguments in (
        (zerofp4.CastPlan, ([torch.zeros(numel)], [start])),
        (zerofp4.cast_master_weights_to_nvfp4, ([torch.zeros(numel)], [start])),
        (zerofp4.all_gather_nvfp4, ([start], [numel])),
    ):
        with pytest.raises(ValueError, match=what):
            call([weight], *arguments)


@pytest.mark.parametrize(
    ("block", "shape", "start", "numel"),
    [
        (TILES, (40, 32), 512, 768),
        (TILES, (2, 40, 32), 512, 768 + 512),
        (ROWS, (4, 40), 32, 8 + 16),
        (ROWS, (4, 40), 40, 120),
    ],
)
def test_a_shard_of_whole_blocks_is_taken(block, shape, start, numel):
    """Also up to the end of a matrix, or of a row, where tiles and blocks are cut off."""
    weight = zerofp4.empty(shape, block=block, four_over_six=CHOICES[0])
    zerofp4.CastPlan([weight], [torch.zeros(numel)], [start]).step()
