"""Casts of ranks that disagree, and errors that one rank only finds."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers import assert_bytes_equal

import zerofp4
from distributed.cases import Model, cast_and_gather, finish, raised_everywhere
from distributed.run import on_ranks
from zerofp4.cast import gather
from zerofp4.cast import plan as cast


@on_ranks(2, 3, time_limit=30)
def test_disagreement_about_shapes(world):
    shape = (16, 32) if world.rank == 1 else (32, 16)
    weight = zerofp4.empty(shape, device=world.device)
    message = raised_everywhere(world, ValueError, zerofp4.CastPlan, [weight], [None], [None])
    assert message == (
        "model_weights[0] must be the same on all ranks, but has shape (32, 16) and dtype torch.bfloat16 "
        "on rank 0, (16, 32) and torch.bfloat16 on rank 1"
    )


@on_ranks(2, 3)
def test_weights_of_one_shape_in_another_order(world):
    """Every byte would be wrong, and every length right."""
    weights = [zerofp4.empty((32, 16), device=world.device) for _ in range(2)]
    for weight, name in zip(weights, ("q", "k"), strict=True):
        weight.record.name = name
    if world.rank == 1:
        weights.reverse()
    message = raised_everywhere(world, ValueError, zerofp4.CastPlan, weights, [None, None], [None, None])
    assert message == (
        "model_weights must be in the same order on all ranks, but model_weights[0] 'q' of rank 0 is "
        "model_weights[0] 'k' on rank 1"
    )


@on_ranks(2)
def test_two_plans_of_the_same_weights_are_not_the_same_plan(world):
    weight = zerofp4.empty((32, 16), device=world.device)
    master = torch.ones(256, device=world.device)
    plans = [zerofp4.CastPlan([weight], [master], [256 * world.rank]) for _ in range(2)]
    before = weight.rowwise_data.clone()
    with pytest.raises(RuntimeError, match="different cast plans"):
        plans[world.rank].step()
        plans[world.rank].check()
    assert_bytes_equal(weight.rowwise_data, before, "codes")
    plans[0].step()
    plans[0].check()


@on_ranks(2, 3, time_limit=30)
def test_disagreement_about_the_number_of_weights(world):
    weights = [zerofp4.empty((16, 16), device=world.device) for _ in range(1 + (world.rank == 1))]
    empty = [None] * len(weights)
    message = raised_everywhere(world, ValueError, zerofp4.CastPlan, weights, empty, empty)
    assert message == "rank 0 has 1 model_weights, rank 1 has 2"


@on_ranks(2, 3, time_limit=30)
def test_two_owners_of_one_element(world):
    weight = zerofp4.empty((16, 16), device=world.device)
    start, numel = [(0, 101), (100, 156), (256, 0)][world.rank]
    master = torch.zeros(numel, device=world.device)
    message = raised_everywhere(world, ValueError, zerofp4.CastPlan, [weight], [master], [start])
    assert message == "model_weights[0]: ranks 0 and 1 both own elements 100..100"


@on_ranks(2, 3, time_limit=30)
def test_invalid_argument_on_one_rank(world):
    model = Model(world, "even")
    if world.rank == 1:
        model.masters[2] = model.masters[2].double()
    before = model.snapshot()
    message = raised_everywhere(
        world, TypeError, zerofp4.cast_master_weights_to_nvfp4, model.weights, model.masters, model.starts
    )
    assert message == "rank 1: master_weights[2] must be a float32 or bfloat16 tensor, got torch.float64"
    model.check_untouched(before)


@on_ranks(2, 3, time_limit=30)
def test_invalid_argument_on_one_rank_after_the_plan_was_built(world):
    """That rank raises its own error, the others hear of it, nobody writes, and the next step works."""
    model = Model(world, "odd")
    cast_and_gather(model)
    before = model.snapshot()
    masters = list(model.masters)
    if world.rank == 1:
        masters[2] = masters[2].double()
    expected = TypeError if world.rank == 1 else RuntimeError
    message = "must be a float32 or bfloat16" if world.rank == 1 else "another rank could not take part"
    with pytest.raises(expected, match=message):
        zerofp4.cast_master_weights_to_nvfp4(model.weights, masters, model.starts)
        model.weights[0].record.attachments["cast_plans"][0].plan.check()
    model.check_untouched(before)
    cast_and_gather(model)
    model.check()


@on_ranks(2, 3, time_limit=30)
def test_storage_that_moved_on_one_rank(world):
    """step() raises everywhere and writes nowhere; refresh() and the function take the new address."""
    model = Model(world, "odd")
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts)
    finish(plan)
    if world.rank == 1:
        model.weights[2].rowwise_data = model.weights[2].rowwise_data.clone()
    before = model.snapshot()
    match = r"model_weights\[2\]: rowwise_data has moved" if world.rank == 1 else "another rank could not"
    with pytest.raises(RuntimeError, match=match):
        plan.step()
        plan.check()
    model.check_untouched(before)
    plan.refresh()
    finish(plan)
    model.check()


@on_ranks(2, 3, time_limit=30)
def test_ranks_that_step_different_plans_of_one_size(world):
    model = Model(world, "odd")
    plans = [
        zerofp4.CastPlan(model.weights, model.masters, model.starts),
        zerofp4.CastPlan(model.weights, model.masters, model.starts, on_nonfinite="raise"),
    ]
    before = model.snapshot()
    with pytest.raises(RuntimeError, match="different cast plans"):
        plan = plans[world.rank % 2]
        plan.step()
        plan.check()
    model.check_untouched(before)


@on_ranks(2, 3, time_limit=30)
def test_steps_go_on_after_an_error_of_one_rank(world):
    """The error is told once: it must not keep later steps, in which all ranks take part, from writing."""
    model = Model(world, "odd")
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts)
    raised = []
    for step in range(6):
        if step == 2 and world.rank == 1:
            model.weights[2].rowwise_data = model.weights[2].rowwise_data.clone()
        try:
            plan.step()
            if step == 5:
                plan.check()  # on a GPU all steps may be queued before the host comes to see the error
        except RuntimeError as error:
            raised.append((step, str(error)))
            if "has moved" in str(error):
                plan.refresh()
    if world.rank == 1:
        assert [step for step, _ in raised] == [2] and "has moved" in raised[0][1]
    else:
        assert len(raised) == 1 and "another rank could not take part" in raised[0][1]
    plan.all_gather()
    plan.post()
    model.check()


@on_ranks(2, 3, time_limit=30)
@pytest.mark.parametrize("what", ["shards", "amax_groups", "on_nonfinite"])
def test_one_rank_changes_shards_or_options_after_the_plan_was_built(world, what):
    model = Model(world, "odd")
    cast_and_gather(model)
    before = model.snapshot()
    starts, masters, options = list(model.starts), list(model.masters), {}
    if world.rank == 1 and what == "shards":
        starts[2], masters[2] = None, None
    elif world.rank == 1:
        options = {"amax_groups": [model.weights[:2]]} if what == "amax_groups" else {"on_nonfinite": "raise"}
    error = ValueError if world.rank == 1 else RuntimeError
    with pytest.raises(error, match=r"change on all ranks or on none|another rank could not take part"):
        zerofp4.cast_master_weights_to_nvfp4(model.weights, masters, starts, **options)
        model.weights[0].record.attachments["cast_plans"][0].plan.check()
    model.check_untouched(before)
    cast_and_gather(model)
    model.check()


@on_ranks(2, 3, time_limit=30)
def test_disagreement_about_options(world):
    model = Model(world, "odd")
    for options, expected in (
        ({"on_nonfinite": "raise"}, "on_nonfinite must be the same on all ranks, but is 'skip' on rank 0"),
        (
            {"amax_groups": [model.weights[:2]]},
            "amax_groups must be the same on all ranks, but is [] on rank 0",
        ),
    ):
        mine = options if world.rank == 1 else {}
        message = raised_everywhere(
            world, ValueError, zerofp4.CastPlan, model.weights, model.masters, model.starts, **mine
        )
        assert message.startswith(expected), message


@on_ranks(2, time_limit=30)
@pytest.mark.parametrize("case", ["weights", "masters", "amax_groups", "manual_post"])
def test_nonsense_on_one_rank(world, case):
    """Not only wrong values: whatever goes wrong on one rank, the others hear of it."""
    model = Model(world, "odd")
    arguments = [model.weights, model.masters, model.starts, None, None, True]
    options = {}
    if world.rank == 1:
        arguments[0] = None if case == "weights" else arguments[0]
        arguments[1] = 5 if case == "masters" else arguments[1]
        arguments[5] = case != "manual_post"
        options = {"amax_groups": torch.zeros(3)} if case == "amax_groups" else {}
    expected = ValueError if case == "manual_post" else TypeError
    call = zerofp4.cast_master_weights_to_nvfp4
    assert raised_everywhere(world, expected, call, *arguments, **options).startswith("rank 1: ")


@on_ranks(3, time_limit=30)
def test_functions_refuse_a_group_without_the_caller(world):
    group = dist.new_group([0, 2])
    model = Model(world, "odd")
    if world.rank == 1:
        for call, lists in (
            (zerofp4.cast_master_weights_to_nvfp4, (model.masters, model.starts)),
            (zerofp4.all_gather_nvfp4, (model.starts, model.numels)),
        ):
            with pytest.raises(ValueError, match="group does not contain the calling process"):
                call(model.weights, *lists, group)


@on_ranks(2)
@pytest.mark.parametrize("call", ["plan", "cast", "gather"])
def test_a_device_that_one_rank_cannot_use_is_agreed_on(world, call):
    def refuse(device):
        raise RuntimeError(f"zerofp4 cannot run on {device}")

    model = Model(world, "odd")
    arguments = (model.weights, model.starts, model.numels)
    if call == "gather":
        function = zerofp4.all_gather_nvfp4
    else:
        function = zerofp4.CastPlan if call == "plan" else zerofp4.cast_master_weights_to_nvfp4
        arguments = (model.weights, model.masters, model.starts)
    before = model.snapshot()
    module = gather if call == "gather" else cast
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(module, "target_of", refuse)
        message = raised_everywhere(world, RuntimeError, function, *arguments)
    assert message.startswith("rank 1: zerofp4 cannot run on")
    model.check_untouched(before)
