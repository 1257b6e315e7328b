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
        for name in ("rowwise_data", "rowwise_scale", "columnwise_scale", "amax"):
            assert_bytes_equal(getattr(weight, name), getattr(expected, name), f"{name} {i}")


TILES, ROWS = (16, 16), (1, 16)
KIND_SHAPES = [(34, 288), (33, 50), (1, 2), (3, 16), (130, 1000)]


def make_kinds(device, shapes=None, blocks=(ROWS,), choices=(None,), dtype=torch.bfloat16):
    """As make, of weights in these blocks and with these choices of four over six, by turns."""
    shapes = KIND_SHAPES if shapes is None else shapes
    options = {"dtype": dtype, "device": device, "scale_layouts": SCALE_LAYOUTS}
    weights = []
    for i, shape in enumerate(shapes):
        kind = {"block": blocks[i % len(blocks)], "four_over_six": choices[i % len(choices)]}
        weights.append(zerofp4.empty(shape, **kind, **options))
    masters = [torch.randn(weight.numel(), device=device) for weight in weights]
    return weights, masters, [0] * len(weights)


def check_kinds(weights, masters, amax=None):
    """Every buffer is that of quantizing the master."""
    for i, (weight, master) in enumerate(zip(weights, masters, strict=True)):
        values = master.float().view(weight.shape).to(weight.dtype)
        choice = {"four_over_six": weight.four_over_six}
        if values.dim() == 2:
            specified = reference.quantize(values, weight.block[0], amax, **choice)
        else:
            specified = reference.quantize_experts(values, amax, **choice)
        assert_bytes_equal(weight.rowwise_data, specified.rowwise_data, f"codes {i}")
        assert_bytes_equal(weight.rowwise_scale, specified.rowwise_scale, f"scale {i}")
        options = {"columnwise": weight.columnwise_data is not None, "scale_layouts": SCALE_LAYOUTS}
        expected = zerofp4.quantize(values, block=weight.block, amax=amax, **options, **choice).record
        for name, buffer in weight.record.buffers():
            assert_bytes_equal(buffer, expected.buffer(name), f"weight {i}: {name}")


def run(plan):
    plan.step()
    plan.all_gather()
    plan.post()


def check_replays(weights, masters, starts, update=lambda plan: None) -> None:
    """Of a captured step behind update(plan), on a GPU."""
    plan = zerofp4.CastPlan(weights, masters, starts)
    run(plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update(plan)
        plan.step()
        plan.post()
    for _ in range(2):
        for master in masters:
            master.mul_(-2).add_(0.5)
        graph.replay()
        torch.cuda.synchronize()
        check_kinds(weights, masters)


def check_plan_and_functions(weights, masters, starts):
    """Two steps of a plan, then the functions, from masters that change in between."""
    plan = zerofp4.CastPlan(weights, masters, starts)
    for _ in range(2):
        run(plan)
        check_kinds(weights, masters)
        for master in masters:
            master.mul_(-2).add_(0.5)
    zerofp4.cast_master_weights_to_nvfp4(weights, masters, starts)
    zerofp4.all_gather_nvfp4(weights, starts, [m.numel() for m in masters])
    zerofp4.post_all_gather_processing(weights)
    check_kinds(weights, masters)


def leave_amaxes(plan, pieces) -> None:
    """What a fused optimizer does, by hand."""
    plan.begin_update()
    for piece in pieces:
        tiles, amax = reference.partial_amax(
            piece.master.float(), piece.shard.start, piece.matrix, piece.dtype
        )
        count = ceil_div(piece.matrix[0], BLOCK) * ceil_div(piece.matrix[1], BLOCK)
        for offset, values in ((piece.tile_offset, tiles.view(count)), (piece.amax_offset, amax)):
            words = plan.reduced[offset : offset + values.numel()]
            words.copy_(words.maximum(values))
    plan.end_update()
