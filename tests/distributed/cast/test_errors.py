"""Casts and gathers of ranks that disagree, or of which one finds an error, and changes between calls."""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import pytest
import torch
from cases.optim import assert_all_equal

import zerofp4
from distributed.cases import (
    ROWS,
    TILES,
    WIRES,
    Model,
    cast_and_gather,
    finish,
    raised_by,
    raised_everywhere,
    split,
)
from distributed.run import on_ranks
from zerofp4.cast.plan import StepStatus
from zerofp4.cast.signature import plan_hash


def finished(world, **options) -> tuple[Model, zerofp4.CastPlan]:
    model = Model(world, "odd", **options)
    plan = model.plan()
    finish(plan)
    return model, plan


def go_on(model: Model, plan: zerofp4.CastPlan) -> None:
    plan.refresh()
    finish(plan)
    plan.check()
    model.check()


DISAGREEMENTS = {
    "shape": "model_weights[0] 'q' must be the same on all ranks, but has shape (32, 16) on rank 0 and "
    "(16, 32) on rank 1",
    "block": "model_weights[0] 'q' must be the same on all ranks, but has block (16, 16) on rank 0 and "
    "(1, 16) on rank 1",
    "four_over_six": "model_weights[0] 'q' must be the same on all ranks, but has four_over_six None on rank "
    "0 and FourOverSix(e4m3_max=256, error='mae') on rank 1",
    # Every byte would be wrong, and every length right.
    "order": "model_weights must be in the same order on all ranks, but model_weights[0] 'q' of rank 0 is "
    "model_weights[0] 'k' on rank 1",
    "number": "rank 0 has 2 model_weights, rank 1 has 1",
    "on_nonfinite": "on_nonfinite must be the same on all ranks, but is 'skip' on rank 0 and 'raise' on",
    "amax_groups": "amax_groups must be the same on all ranks, but is [] on rank 0 and [[0, 1]] on rank 1",
}
"""What all ranks raise, by what is other on rank 1."""


@on_ranks(2, nightly=[3], time_limit=30)
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree(world, what):
    shape, options = (16, 32) if world.rank == 1 and what == "shape" else (32, 16), {}
    block = ROWS if world.rank == 1 and what == "block" else TILES
    choice = zerofp4.FourOverSix() if world.rank == 1 and what == "four_over_six" else None
    weights = [zerofp4.empty(shape, block=block, four_over_six=choice, device=world.device) for _ in "qk"]
    for weight, name in zip(weights, "qk", strict=True):
        weight.record.name = name
    if world.rank == 1:
        weights = {"order": weights[::-1], "number": weights[:1]}.get(what, weights)
        others = {"on_nonfinite": "raise", "amax_groups": [weights]}
        options = {what: others[what]} if what in others else {}
    nothing = [None] * len(weights)
    message = raised_everywhere(world, ValueError, zerofp4.CastPlan, weights, nothing, nothing, **options)
    assert message.startswith(DISAGREEMENTS[what])


@on_ranks(2, nightly=[3], time_limit=30)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("other", [0x010204, 0x020203, 0x010303, 0xFFFFFF, 0x000000, None])
def test_ranks_that_step_different_plans(world, wire, other):
    """Of hashes that differ in any byte, and two plans of the same weights."""
    model = Model(world, "odd", dtypes=WIRES[wire])
    found = 0x010203 if world.rank else other
    hash_of = plan_hash if other is None else lambda signatures: found
    with mock.patch("zerofp4.cast.plan.plan_hash", hash_of):
        plans = [model.plan(), model.plan()]
    plan = plans[world.rank % 2 if other is None else 0]
    with model.refused("different cast plans"):
        plan.step()
        plan.check()
    if other is None:
        finish(plans[0])
        model.check()


@on_ranks(2, 3, time_limit=30)
@pytest.mark.parametrize("blocks", [TILES, ROWS])
def test_a_cut_through_a_block_whose_scale_is_chosen(world, blocks):
    """All ranks raise what the first such rank finds, and nobody writes."""
    model = Model(world, "odd", shapes=[(32, 16), (64, 48)], blocks=[blocks], choices=[zerofp4.FourOverSix()])
    model.weights[1].record.name = "layers.1"
    model.shards[1] = split(64 * 48, world.world_size, "odd", 0)
    model.cut()
    before = model.snapshot()
    for call in (model.plan, model.cast, model.gather):
        message = raised_everywhere(world, ValueError, call)
        what = "master_weights[1]" if call != model.gather else "shard 1"
        unit = "rows of tiles, 768 elements" if blocks == TILES else "blocks of 16 along its rows of 48"
        assert f"{what}: elements 0 to {model.shards[1][0].end - 1} are not whole {unit}" in message
        assert "model_weights[1] 'layers.1', whose scales FourOverSix(" in message
    model.check_untouched(before)


WRONG = {"amax_groups": torch.zeros(3), "manual_post_all_gather_processing": False}


@on_ranks(2, time_limit=30)
@pytest.mark.parametrize("case", ["weights", "masters", "dtype", *WRONG])
def test_nonsense_on_one_rank(world, case):
    """Not only wrong values: whatever goes wrong on one rank, the others hear of it."""
    model = Model(world, "odd")
    before, weights, options = model.snapshot(), model.weights, {}
    if world.rank == 1:
        model.weights = None if case == "weights" else weights
        doubles = [master.double() for master in model.masters]
        model.masters = {"masters": 5, "dtype": doubles}.get(case, model.masters)
        options = {case: WRONG[case]} if case in WRONG else {}
    expected = ValueError if case == "manual_post_all_gather_processing" else TypeError
    message = raised_everywhere(world, expected, model.cast, **options)
    assert message.startswith("rank 1: ")
    assert case != "dtype" or message.endswith("must be a float32 or bfloat16 tensor, got torch.float64")
    model.weights = weights
    model.check_untouched(before)


@on_ranks(2, nightly=[3], time_limit=30)
@pytest.mark.parametrize("what", ["dtype", "shards", "amax_groups", "on_nonfinite"])
def test_one_rank_calls_with_other_arguments_after_the_plan_was_built(world, what):
    """That rank raises its own error, the others hear of it, nobody writes, and the next step works."""
    model = Model(world, "odd")
    cast_and_gather(model)
    starts, masters, options = list(model.starts), list(model.masters), {}
    error, mine = ValueError, "change on all ranks or on none"
    if world.rank == 1:
        if what == "dtype":
            masters[2], error, mine = masters[2].double(), TypeError, "must be a float32 or bfloat16"
        elif what == "shards":
            starts[2], masters[2] = None, None
        else:
            options = {what: "raise" if what == "on_nonfinite" else [model.weights[:2]]}
    with model.refused("another rank could not take part", mine, error):
        zerofp4.cast_master_weights_to_nvfp4(model.weights, masters, starts, **options)
        model.plans[0].check()
    cast_and_gather(model)
    model.check()


# The gather of packed codes; that of a plan is decided on the device


@on_ranks(2, 3, time_limit=30)
@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0, 101), (100, 156), (256, 0)], "model_weights[0]: ranks 0 and 1 both own elements 100..100"),
        ([(0, 99), (100, 156), (256, 0)], "model_weights[0]: elements 99..99 of 256 are owned by no rank"),
        ([(0, 99), (99, 156), (256, 0)], "model_weights[0]: elements 255..255 of 256 are owned by no rank"),
    ],
)
def test_overlapping_and_missing_shards(world, spans, expected):
    """A plan casts what nobody owns, but does not gather it."""
    weight = zerofp4.empty((16, 16), device=world.device)
    start, numel = spans[world.rank]
    message = raised_everywhere(world, ValueError, zerofp4.all_gather_nvfp4, [weight], [start], [numel])
    assert message == expected
    call = functools.partial(zerofp4.CastPlan, [weight], [torch.ones(numel, device=world.device)], [start])
    if "owned by no rank" in expected:
        plan = call()
        plan.step()
        call = plan.all_gather
    assert raised_everywhere(world, ValueError, call) == expected


@on_ranks(2, nightly=[3], time_limit=30)
@pytest.mark.parametrize("what", ["length", "shards"])
def test_an_error_of_one_rank_after_the_first_call(world, what):
    """Of its arguments, or shards that have changed on this rank only."""
    model = Model(world, "odd")
    cast_and_gather(model)
    starts, numels = list(model.starts), list(model.numels)
    if world.rank == 1:
        starts[2], numels[2] = (starts[2], -5) if what == "length" else (None, 0)
    mine = "rank 1 owns other shards than before, rank 0 the same"
    told = {"length": ("rank 1 found an error", "-5", ValueError), "shards": (mine,)}
    with model.refused(*told[what]):
        zerofp4.all_gather_nvfp4(model.weights, starts, numels)
    cast_and_gather(model)
    model.check()


@on_ranks(2, nightly=[3], time_limit=30)
@pytest.mark.parametrize("first", [False, True])
def test_plan_gathers_nothing_where_memory_of_one_rank_has_moved(world, first):
    model, plan = finished(world)
    plan = model.plan() if first else plan
    plan.step()
    plan.check()
    model.move()
    with model.refused(r"rank 1 could not .* all_gather\(\)", r"model_weights\[2\]: rowwise_data has moved"):
        plan.all_gather()
        plan.check()
    go_on(model, plan)


@on_ranks(2, nightly=[3], time_limit=30)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("is_refreshed", [True, False])
def test_storage_of_one_rank_that_moved_before_a_step(world, wire, is_refreshed):
    """The step raises everywhere and writes nowhere. A plan gathers nothing after it, whatever the ranks have
    done about it since; and where nobody looks in between: on a GPU all of it is queued before the host can
    know.
    """
    model, plan = finished(world, dtypes=WIRES[wire])
    model.change()
    model.move()
    with model.refused("another rank could not take part", r"model_weights\[2\]: rowwise_data has moved"):
        if not is_refreshed:
            calls = plan.step, plan.all_gather, plan.check
            raise next(filter(None, [raised_by(call) for call in calls]))  # no variable: see raised_by
        plan.step()
        plan.check()
    if is_refreshed:
        plan.refresh()
        with model.refused("after a step that did not take place"):
            plan.all_gather()
            plan.check()
    go_on(model, plan)


@on_ranks(2)
def test_a_step_tells_of_a_gather_that_had_no_effect(world):
    """Where no host waits for a gather, as on a GPU."""
    model, plan = finished(world)
    model.move(0)
    on_cpu = world.device.type == "cpu"
    with mock.patch.object(StepStatus, "queued") if on_cpu else contextlib.nullcontext():
        raised = [raised_by(plan.all_gather)]
        plan.refresh()
        if not on_cpu:
            torch.cuda.synchronize()
        raised.append(raised_by(plan.step))
    told = "rank 1 could not take part in all_gather(); no rank changed a weight. This step took place"
    expected = "model_weights[0]: rowwise_data has moved" if world.rank else f"had no effect: {told}"
    [message] = [str(error) for error in raised if error is not None]
    assert expected in message
    plan.all_gather()
    plan.post()
    model.check()


@on_ranks(2, 4)
@pytest.mark.parametrize("by", ["functions", "plan"])
def test_the_gather_is_from_and_to_where_the_codes_are_now(world, by):
    model, plan = finished(world)
    cast_and_gather(model)
    old = [weight.rowwise_data for weight in model.weights]
    kept = [codes.clone() for codes in old]
    for weight in model.weights:
        weight.rowwise_data = torch.zeros_like(weight.rowwise_data)
    model.change()
    if by == "functions":
        cast_and_gather(model)
        model.check()
    else:
        go_on(model, plan)
    assert_all_equal(old, kept, "codes that the weight had before")


@on_ranks(2)
def test_replays_of_a_captured_step_and_gather(world):
    if world.device.type == "cpu":
        pytest.skip("CUDA graphs are of GPUs")
    model, plan = finished(world)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        finish(plan)
    for _ in range(3):
        model.change()
        for weight in model.weights:
            weight.rowwise_data.fill_(0xA5)
        graph.replay()
        torch.cuda.synchronize()
        plan.check()
        model.check()
