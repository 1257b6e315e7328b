"""The gather of packed codes: shards that do not fit together, and what changes between calls."""

from __future__ import annotations

import pytest
import torch

import zerofp4
from distributed.cases import Model, cast_and_gather, raised_everywhere
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
