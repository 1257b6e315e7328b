"""The gather of packed codes: shards that do not fit together, and what changes between calls."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers import assert_bytes_equal

import zerofp4
from distributed.cases import Model, cast_and_gather, finish, raised_everywhere
from distributed.run import on_ranks


@on_ranks(2, 3, time_limit=30)
def test_gather_refuses_overlapping_and_missing_shards(world):
    weight = zerofp4.empty((16, 16), device=world.device)
    for spans, expected in (
        ([(0, 101), (100, 156), (0, 0)], "model_weights[0]: ranks 0 and 1 both own elements 100..100"),
        ([(0, 99), (100, 156), (0, 0)], "model_weights[0]: elements 99..99 of 256 are owned by no rank"),
        ([(0, 99), (99, 156), (0, 0)], "model_weights[0]: elements 255..255 of 256 are owned by no rank"),
    ):
        start, numel = spans[world.rank]
        message = raised_everywhere(world, ValueError, zerofp4.all_gather_nvfp4, [weight], [start], [numel])
        assert message == expected


@on_ranks(2, 3, time_limit=30)
def test_plan_refuses_to_gather_what_nobody_owns(world):
    weight = zerofp4.empty((16, 16), device=world.device)
    start, numel = [(0, 99), (100, 156), (0, 0)][world.rank]
    plan = zerofp4.CastPlan([weight], [torch.ones(numel, device=world.device)], [start])
    plan.step()
    assert "elements 99..99 of 256 are owned by no rank" in raised_everywhere(
        world, ValueError, plan.all_gather
    )


@on_ranks(2, 3, time_limit=30)
def test_gather_error_on_one_rank_after_the_first_call(world):
    model = Model(world, "odd")
    cast_and_gather(model)
    before = model.snapshot()
    numels = list(model.numels)
    if world.rank == 1:
        numels[2] = -5
    expected, match = (ValueError, "-5") if world.rank == 1 else (RuntimeError, "rank 1 found an error")
    with pytest.raises(expected, match=match):
        zerofp4.all_gather_nvfp4(model.weights, model.starts, numels)
    model.check_untouched(before)
    cast_and_gather(model)
    model.check()


@on_ranks(2, 4)
def test_gather_after_storage_moved(world):
    model = Model(world, "odd")
    cast_and_gather(model)
    for weight in model.weights:
        weight.rowwise_data = torch.zeros_like(weight.rowwise_data)
    cast_and_gather(model)
    model.check()


@on_ranks(2, 3, time_limit=30)
def test_gather_after_shards_changed_on_one_rank(world):
    model = Model(world, "odd")
    cast_and_gather(model)
    starts, numels = list(model.starts), list(model.numels)
    if world.rank == 1:
        starts[2], numels[2] = None, 0
    before = model.snapshot()
    message = raised_everywhere(world, RuntimeError, zerofp4.all_gather_nvfp4, model.weights, starts, numels)
    assert message.startswith("rank 1 owns other shards than before, rank 0 the same")
    model.check_untouched(before)


# Of a plan: decided on the device


def _scatter(model: Model) -> None:
    """Give every rank other bytes than its peers: a gather would change them."""
    for weight in model.weights:
        weight.rowwise_data.fill_(0x10 + model.rank)


@on_ranks(1, 2, 3)
def test_plan_gathers_before_its_first_step(world):
    model = Model(world, "odd")
    zerofp4.CastPlan(model.weights, model.masters, model.starts).step()
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts)
    plan.all_gather()
    plan.check()
    plan.post()
    model.check()


@on_ranks(2, 3, time_limit=30)
@pytest.mark.parametrize("first", [False, True])
def test_plan_gathers_nothing_where_memory_of_one_rank_has_moved(world, first):
    model = Model(world, "odd")
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts)
    if not first:
        finish(plan)
    plan.step()
    plan.check()
    _scatter(model)
    if world.rank == 1:
        model.weights[2].rowwise_data = model.weights[2].rowwise_data.clone()
    before = model.snapshot()
    mine = r"model_weights\[2\]: rowwise_data has moved"
    with pytest.raises(
        RuntimeError, match=mine if world.rank == 1 else r"rank 1 could not .* all_gather\(\)"
    ):
        plan.all_gather()
        plan.check()
    model.check_untouched(before)
    plan.refresh()
    finish(plan)
    model.check()


@on_ranks(2, 3, time_limit=30)
def test_plan_gathers_nothing_after_a_step_that_did_not_take_place(world):
    """Whatever the ranks have done about it since."""
    model = Model(world, "odd")
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts)
    finish(plan)
    if world.rank == 1:
        model.weights[2].rowwise_data = model.weights[2].rowwise_data.clone()
    with pytest.raises(RuntimeError, match="has moved" if world.rank == 1 else "another rank could not"):
        plan.step()
        plan.check()
    plan.refresh()
    _scatter(model)
    before = model.snapshot()
    with pytest.raises(RuntimeError, match="after a step that did not take place"):
        plan.all_gather()
        plan.check()
    model.check_untouched(before)
    finish(plan)
    model.check()


@on_ranks(2, 3, time_limit=30)
def test_a_failed_step_and_its_gather_are_told_and_change_nothing(world):
    """Nobody looks in between: on a GPU all of it is queued before the host can know."""
    model = Model(world, "odd")
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts)
    finish(plan)
    _scatter(model)
    if world.rank == 1:
        model.weights[2].rowwise_data = model.weights[2].rowwise_data.clone()
    before = model.snapshot()
    raised = []
    for call in (plan.step, plan.all_gather, plan.check):
        try:
            call()
        except RuntimeError as error:
            raised.append(str(error))
    mine = "has moved" if world.rank == 1 else "another rank could not take part in the cast"
    assert mine in raised[0]
    model.check_untouched(before)
    plan.refresh()
    finish(plan)
    plan.check()
    model.check()


@on_ranks(2)
def test_a_step_tells_of_a_gather_that_had_no_effect(world):
    model = Model(world, "odd")
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts)
    finish(plan)
    if world.rank == 1:
        model.weights[0].rowwise_data = model.weights[0].rowwise_data.clone()
    raised = []
    for call in (plan.all_gather, plan.refresh, plan.step, plan.check):
        if world.device.type == "cuda":
            torch.cuda.synchronize()  # what is queued is done: the next call hears of it
        try:
            call()
        except RuntimeError as error:
            raised.append(str(error))
    told = "rank 1 could not take part in all_gather(); no rank changed a weight"
    if world.rank == 1:
        assert len(raised) == 1 and "has moved" in raised[0]
    elif world.device.type == "cuda":
        assert raised == [f"an earlier call had no effect: {told}. This step took place"]
    else:
        assert raised == [told]
    plan.all_gather()
    plan.post()
    model.check()


@on_ranks(2, 4)
def test_plan_gathers_from_and_to_where_the_codes_are_now(world):
    model = Model(world, "odd")
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts)
    finish(plan)
    old = [weight.rowwise_data for weight in model.weights]
    for weight in model.weights:
        weight.rowwise_data = torch.zeros_like(weight.rowwise_data)
    kept = [codes.clone() for codes in old]
    model.change()
    plan.refresh()
    finish(plan)
    model.check()
    for codes, expected in zip(old, kept, strict=True):
        assert_bytes_equal(codes, expected, "codes that the weight had before")


@on_ranks(2)
def test_replays_of_a_captured_step_and_gather(world):
    """On GPUs; on the CPU the same calls, which leave the same bytes."""
    model = Model(world, "odd")
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts)
    replay = functools.partial(finish, plan)
    finish(plan)
    if world.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            finish(plan)
        replay = graph.replay
    for _ in range(3):
        model.change()
        for weight in model.weights:
            weight.rowwise_data.fill_(0xA5)
        replay()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        plan.check()
        model.check()


@on_ranks(2)
def test_a_gather_of_a_plan_waits_for_nothing(world):
    """On GPUs, where the host would have to; on the CPU only what is gathered is looked at."""
    model = Model(world, "odd")
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts)
    finish(plan)
    model.change()
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        torch.cuda._sleep(10**9)
    try:
        finish(plan)
        assert not on_gpu or not torch.cuda.current_stream().query()
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    plan.check()
    model.check()
