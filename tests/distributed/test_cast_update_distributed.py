"""Casts whose amaxes an update has left, on all ranks or some; masters in bfloat16; masters that moved."""

from __future__ import annotations

import pytest
import torch

import zerofp4
from distributed.cases import Model, cast_and_gather, finish
from distributed.run import on_ranks
from zerofp4 import reference
from zerofp4.format import BLOCK
from zerofp4.layout import ceil_div


def leave_amaxes(plan: zerofp4.CastPlan) -> None:
    """What a fused optimizer does, by hand."""
    plan.begin_update()
    for piece in plan.master_pieces():
        arguments = (piece.master, piece.shard.start, piece.matrix, piece.dtype)
        tiles, amax = reference.partial_amax(*arguments)
        count = ceil_div(piece.matrix[0], BLOCK) * ceil_div(piece.matrix[1], BLOCK)
        for offset, values in ((piece.tile_offset, tiles.view(count)), (piece.amax_offset, amax)):
            words = plan.reduced[offset : offset + values.numel()]
            words.copy_(words.maximum(values))
    plan.end_update()


@on_ranks(1, 2)
@pytest.mark.parametrize("how", ["odd", "flat", "last"])
def test_amaxes_left_on_every_rank_or_one(world, how):
    model = Model(world, how)
    groups = [[0, 2], [1, 5]]
    members = [[model.weights[i] for i in group] for group in groups]
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts, amax_groups=members)
    owned = [master for master in model.masters if master is not None]
    assert all(a.master is b for a, b in zip(plan.master_pieces(), owned, strict=True))
    for ranks in (range(world.world_size), [0], []):
        if world.rank in ranks:
            leave_amaxes(plan)
        finish(plan)
        model.check(groups)
        model.change()


@on_ranks(2)
def test_amaxes_left_are_the_ones_used(world):
    """Masters that shrink after end_update() keep the amax they had."""
    weight = zerofp4.empty((32, 64), device=world.device)
    master = torch.full((1024,), 3.0 + world.rank, device=world.device)
    plan = zerofp4.CastPlan([weight], [master], [1024 * world.rank])
    leave_amaxes(plan)
    master.mul_(0.5)
    finish(plan)
    assert weight.amax.item() == 4.0
    finish(plan)
    assert weight.amax.item() == 2.0


@on_ranks(2, time_limit=30)
def test_amaxes_left_are_dropped_where_a_rank_cannot_take_part(world):
    model = Model(world, "odd")
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts)
    finish(plan)
    leave_amaxes(plan)
    if world.rank == 1:  # a step on a GPU looks at weights, not at masters
        model.weights[2].rowwise_data = model.weights[2].rowwise_data.clone()
    match = r"model_weights\[2\]: rowwise_data has moved" if world.rank == 1 else "another rank could not"
    before = model.snapshot()
    with pytest.raises(RuntimeError, match=match):
        plan.step()
        plan.check()
    model.check_untouched(before)
    model.change()
    plan.refresh()
    finish(plan)
    model.check()


@on_ranks(2, 3, time_limit=30)
def test_a_master_that_moved_is_heard_of_where_all_are_looked_at(world):
    """On the CPU in all_gather(), by all ranks. On a GPU in post(), by the rank itself: its codes are those
    of the step, and the others have them.
    """
    model = Model(world, "odd")
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts)
    finish(plan)
    plan.step()
    before = model.snapshot()
    if world.rank == 1:
        model.masters[2].data = model.masters[2].clone()
    mine = r"master_weights\[2\] has moved"
    if world.device.type == "cpu":
        with pytest.raises(RuntimeError, match=mine if world.rank == 1 else "rank 1 could not take part"):
            plan.all_gather()
        model.check_untouched(before)
    else:
        plan.all_gather()
        if world.rank == 1:
            for call in (plan.post, plan.check):
                with pytest.raises(RuntimeError, match=mine):
                    call()
        else:
            plan.post()
            plan.check()
    plan.refresh()
    model.change()
    finish(plan)
    model.check()


@on_ranks(2, 3)
def test_bfloat16_masters_on_some_ranks(world):
    model = Model(world, "odd")
    model.whole = [whole.bfloat16().float() for whole in model.whole]
    model.cut()
    if world.rank == 1:
        model.masters = [None if master is None else master.bfloat16() for master in model.masters]
    for _ in range(2):
        cast_and_gather(model)
        model.check()


@on_ranks(2, 3)
def test_only_the_rank_whose_masters_moved_checks_its_call(world):
    model = Model(world, "odd")
    for step in range(4):
        if step > 1 and world.rank == 1:
            model.cut()
        cast_and_gather(model)
        model.check()
        model.change()
    assert len(model.weights[0].record.attachments["cast_plans"]) == 1
