"""Casts into weights in blocks of 1x16, whose scales each rank writes and post() pads, and of all kinds."""

from __future__ import annotations

import weakref

import pytest
import torch
from cases.cast import (
    ROWS,
    TILES,
    check_kinds,
    check_plan_and_functions,
    check_replays,
    make_kinds,
    run,
)
from cases.quantize import CHOICES
from helpers import assert_bytes_equal, at_an_odd_address, needs_gpu

import zerofp4
from zerofp4.optim import FusedAdamW

BF16, F32 = torch.bfloat16, torch.float32
BLOCKS = {"rows": [ROWS], "tiles": [TILES], "both": [ROWS, TILES]}
SHAPES = {
    (ROWS,): None,
    (TILES,): [(34, 288), (3, 34, 50), (1, 16, 16), (130, 1000), (2, 2), (5, 2, 18), (2, 130, 66)],
    (ROWS, TILES): [(34, 288), (3, 34, 50), (130, 1000), (64, 64)],
}
"""Ragged matrices, and stacks of them."""


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("choice", [None, *CHOICES], ids=str)
def test_plan_and_functions(device, choice, dtype, blocks):
    weights, masters, starts = make_kinds(device, SHAPES[tuple(blocks)], blocks, [choice], dtype)
    for weight in weights:
        for _, buffer in weight.record.buffers():
            buffer.view(torch.uint8).fill_(0xA5)
    assert all((weight.columnwise_data is None) == (weight.block == ROWS) for weight in weights)
    check_plan_and_functions(weights, masters, starts)


@pytest.mark.parametrize(
    "dtypes", [[torch.float32], [torch.bfloat16], [torch.bfloat16, torch.float32]], ids=str
)
@pytest.mark.parametrize("choice", [None, CHOICES[0]], ids=str)
def test_masters_at_any_address(device, choice, dtypes):
    for offset in (0, 1, 2, *["odd"] * (device.type == "cpu")):
        shapes = [(34, 288), (16, 16), (130, 1000), (34, 50), (48, 64)]
        weights, masters, starts = make_kinds(device, shapes, [ROWS, TILES], [choice])
        masters = [master.to(dtypes[i % len(dtypes)]) for i, master in enumerate(masters)]
        if offset == "odd":
            masters = [at_an_odd_address(master) for master in masters]
        else:
            masters = [torch.cat([m.new_zeros(offset), m])[offset:] for m in masters]
        run(zerofp4.CastPlan(weights, masters, starts))
        check_kinds(weights, masters)


@pytest.mark.parametrize("choice", [None, CHOICES[0]], ids=str)
@pytest.mark.parametrize("blocks", [[ROWS], [ROWS, TILES]], ids=["rows", "both"])
def test_what_is_not_finite_is_skipped(device, blocks, choice):
    shapes = [(34, 288), (34, 50), (1, 2), (4, 16), (130, 1000)]
    weights, masters, starts = make_kinds(device, shapes, blocks, [choice])
    found_inf = torch.zeros(1, device=device)
    plan = zerofp4.CastPlan(weights, masters, starts, found_inf=found_inf)
    run(plan)
    assert plan.found_inf is found_inf and found_inf.item() == 0
    before = [buffer.clone() for _, buffer in weights[1].record.buffers()]
    old, masters[1][7] = masters[1].clone(), torch.nan
    for i in (0, 2, 3, 4):
        masters[i].mul_(2)
    run(plan)
    assert found_inf.item() == 1
    for (name, buffer), kept in zip(weights[1].record.buffers(), before, strict=True):
        assert_bytes_equal(buffer, kept, name)
    check_kinds([weights[i] for i in (0, 2, 3, 4)], [masters[i] for i in (0, 2, 3, 4)])
    masters[1].copy_(old)
    run(plan)
    check_kinds(weights, masters)
    assert found_inf.item() == 1, "who made it clears it"


def test_buffers_that_moved(device):
    """Codes, and scales that a Module.to() replaces with the record."""
    weights, masters, starts = make_kinds(device)
    plan = zerofp4.CastPlan(weights, masters, starts)
    run(plan)
    weights[0].data = weights[0].data.clone()
    weights[1].rowwise_data = weights[1].rowwise_data.clone()
    with pytest.raises(RuntimeError, match=r"model_weights\[0\]: rowwise_data has moved"):
        plan.step()
    plan.refresh()
    for master in masters:
        master.mul_(-1.5)
    run(plan)
    check_kinds(weights, masters)


@pytest.mark.parametrize(("position", "row"), [(0, 16), (1, 0), (2, 0), (2, 32), (3, 0)])
def test_codes_and_scales_in_two_parts(device, position, row):
    shapes = [(64, 256), (48, 512), (96, 128)]
    weights, masters, starts = make_kinds(device, shapes, [ROWS, TILES, ROWS])
    plan = zerofp4.CastPlan(weights, masters, starts)
    found = []
    plan.start_step()
    plan.finish_step(
        (position, row, lambda: found.extend((w.rowwise_data + 0, w.rowwise_scale.clone()) for w in weights))
    )
    plan.post()
    check_kinds(weights, masters)
    for i, (codes, scale) in enumerate(found[: position + 1]):
        rows = shapes[i][0] if i < position else row
        assert_bytes_equal(codes[:rows], weights[i].rowwise_data[:rows], f"codes {i} halfway")
        if weights[i].block == ROWS:
            assert_bytes_equal(scale[:rows], weights[i].rowwise_scale[:rows], f"scale {i} halfway")


def test_more_padded_scales_than_travel_in_arguments(device):
    weights, masters, starts = make_kinds(device, [(2, 16 * (i % 5 + 1)) for i in range(70)])
    run(zerofp4.CastPlan(weights, masters, starts))
    check_kinds(weights, masters)


@pytest.mark.parametrize("captured", [False, True])
def test_a_captured_post_keeps_scales(monkeypatch, captured):
    """On the CPU a capture is pretended."""
    weights, masters, starts = make_kinds("cpu", [(34, 288)])
    owner = weights[0].rowwise_scale.view(torch.uint8).numpy().copy()
    alive = weakref.ref(owner)
    weights[0].record.rowwise.scales["compact"] = torch.from_numpy(owner).view(torch.float8_e4m3fn)
    del owner
    plan = zerofp4.CastPlan(weights, masters, starts)
    run(plan)
    monkeypatch.setattr(zerofp4.ops.device, "is_capturing", lambda device: captured)
    plan.post()
    monkeypatch.undo()
    weights[0].data = weights[0].data.clone()
    plan.refresh()
    assert (alive() is not None) == captured


@needs_gpu
@pytest.mark.parametrize("blocks", [[ROWS], [ROWS, TILES]], ids=["rows", "both"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("choice", [None, CHOICES[0]], ids=str)
def test_replays_of_a_captured_step(choice, count, blocks):
    shapes = [(34, 288), (130, 1000), (33, 50)][:count]
    check_replays(*make_kinds("cuda", shapes, blocks, [choice]))


# What is refused


def test_no_columnwise_copy():
    quantized = zerofp4.quantize(torch.zeros(16, 16), block=ROWS, columnwise=True)
    for call in (
        lambda: zerofp4.CastPlan([quantized], [torch.zeros(256)], [0]),
        lambda: zerofp4.all_gather_nvfp4([quantized], [0], [256]),
        lambda: zerofp4.post_all_gather_processing([quantized]),
    ):
        with pytest.raises(ValueError, match=r"has block \(1, 16\) and a columnwise copy"):
            call()


@pytest.mark.parametrize(("start", "numel"), [(8, 24), (16, 20), (19, 2)])
def test_no_optimizer_leaves_amaxes_of_blocks_that_are_cut(start, numel):
    weight, master = zerofp4.empty((2, 40), block=ROWS), torch.zeros(numel)
    plan = zerofp4.CastPlan([weight], [master], [start])
    with pytest.raises(ValueError, match=r"model_weights\[0\] has [12] blocks of 1x16 that shards cut"):
        FusedAdamW([master], lr=0.1).offer_amaxes(plan)
