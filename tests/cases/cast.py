"""Weights and whole masters for casts in a world of one, and what they must become."""

from __future__ import annotations

import torch
from helpers import assert_bytes_equal

import zerofp4
from zerofp4 import reference
from zerofp4.format import BLOCK, SCALE_LAYOUTS
from zerofp4.layout import ceil_div


def make(device, shapes=((34, 288), (16, 16)), dtype=torch.bfloat16):
    """(weights with every buffer, float32 masters of all their elements, start offsets)"""
    weights = [zerofp4.empty(s, dtype=dtype, device=device, scale_layouts=SCALE_LAYOUTS) for s in shapes]
    masters = [torch.randn(s[0] * s[1], device=device) for s in shapes]
    return weights, masters, [0] * len(shapes)


def check(weights, masters):
    """Codes, scales and amaxes are those of quantizing the masters."""
    for i, (weight, master) in enumerate(zip(weights, masters, strict=True)):
        expected = reference.quantize(master.float().view(weight.shape).to(weight.dtype))
        assert_bytes_equal(weight.rowwise_data, expected.rowwise_data, f"codes {i}")
        assert_bytes_equal(weight.rowwise_scale, expected.rowwise_scale, f"scale {i}")
        assert_bytes_equal(weight.columnwise_scale, expected.columnwise_scale, f"columnwise scale {i}")
        assert_bytes_equal(weight.amax, expected.amax, f"amax {i}")


def check_transposes(weights, masters):
    for i, (weight, master) in enumerate(zip(weights, masters, strict=True)):
        expected = reference.quantize(master.float().view(weight.shape).to(weight.dtype))
        assert_bytes_equal(weight.columnwise_data, expected.columnwise_data, f"columnwise codes {i}")


def leave_amaxes(plan, pieces) -> None:
    """What a fused optimizer does, by hand."""
    plan.staged.begin_update()
    for piece in pieces:
        tiles, amax = reference.partial_amax(
            piece.master.float(), piece.shard.start, piece.matrix, piece.dtype
        )
        count = ceil_div(piece.matrix[0], BLOCK) * ceil_div(piece.matrix[1], BLOCK)
        for offset, values in ((piece.tile_offset, tiles.view(count)), (piece.amax_offset, amax)):
            words = plan.staged.reduced[offset : offset + values.numel()]
            words.copy_(words.maximum(values))
    plan.staged.end_update()
