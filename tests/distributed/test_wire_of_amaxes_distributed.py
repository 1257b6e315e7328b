"""The reduced vector on its way: bfloat16 of a plan of bfloat16 weights, and not a bit is lost."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from helpers import assert_bytes_equal
from optim_cases import make_gradients, set_gradients

import zerofp4
from distributed.cases import DTYPES, EXPERTS, SPLITS, Model, cast_and_gather, finish
from distributed.checks_optim import parameters_of
from distributed.run import on_ranks
from zerofp4.cast import reduced_vector
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

BF16 = (torch.bfloat16,)
FORMS = {"bfloat16": BF16, "float32": DTYPES}


def plan_of(model, **options):
    return zerofp4.CastPlan(model.weights, model.masters, model.starts, **options)


def wide(plan):
    """The plan, whose vector travels in float32."""
    plan.wire = plan.reduced
    return plan


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_travels(world, dtype):
    """In a world of one nothing does, and no memory is taken for it."""
    plan = plan_of(Model(world, "even", dtypes=(dtype,)))
    is_narrow = dtype == torch.bfloat16 and world.world_size > 1
    assert plan.wire.dtype == (torch.bfloat16 if is_narrow else torch.float32)
    assert plan.wire.shape == plan.reduced.shape and plan.reduced.dtype == torch.float32
    assert (plan.wire is plan.reduced) == (not is_narrow)
    if world.world_size > 1:
        assert plan_of(Model(world, "even", dtypes=DTYPES)).wire.dtype == torch.float32


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("how", SPLITS)
def test_the_vector_is_that_of_float32(world, how):
    """Every word of it, amaxes of all sizes and bfloat16's subnormal ones too; and the weights follow."""
    models = [Model(world, how, seed=3, dtypes=BF16) for _ in range(2)]
    for model in models:
        tiny = [whole * 1e-38 if i % 2 else whole for i, whole in enumerate(model.whole)]
        tiny[1] = model.whole[1] * 1e-40
        model.whole = tiny
        model.cut()
    plans = [plan_of(models[0]), wide(plan_of(models[1]))]
    for _ in range(2):
        for plan in plans:
            finish(plan)
        header = reduced_vector.HEADER_WORDS  # has another plan's number
        assert_bytes_equal(plans[0].reduced[header:], plans[1].reduced[header:], "amaxes")
        for model in models:
            model.check()
            model.change()


@on_ranks(2, 3)
@pytest.mark.parametrize("form", list(FORMS))
def test_experts_and_groups(world, form):
    model = Model(world, "odd", shapes=EXPERTS, seed=5, dtypes=FORMS[form])
    plan = plan_of(model, amax_groups=[[model.weights[0], model.weights[3]]])
    for _ in range(2):
        finish(plan)
        model.check([[0, 3]])
        model.change()


@on_ranks(2, 3)
@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.4e38])
def test_masters_that_are_not_finite_on_one_rank(world, form, bad):
    """Or not once they are rounded to the weight's dtype."""
    model = Model(world, "even", dtypes=FORMS[form])
    plan = plan_of(model)
    finish(plan)
    before = [buffer.clone() for _, buffer in model.weights[3].record.buffers()]
    model.change()
    if world.rank == 1:
        model.masters[3][5] = bad
    finish(plan)
    assert plan.found_inf.item() == 1
    model.check(skip=(3,))
    after = [buffer for _, buffer in model.weights[3].record.buffers()]
    for i, (now, then) in enumerate(zip(after, before, strict=True)):
        assert_bytes_equal(now, then, f"buffer {i} of the weight that was skipped")


@on_ranks(2, 3)
@pytest.mark.parametrize("form", list(FORMS))
def test_a_rank_with_an_error(world, form):
    model = Model(world, "odd", dtypes=FORMS[form])
    plan = plan_of(model)
    finish(plan)
    before = model.snapshot()
    model.change()
    if world.rank == 1:
        plan.abstain()
    else:
        with pytest.raises(RuntimeError, match="another rank could not take part"):
            plan.step()
            plan.check()
    model.check_untouched(before)
    finish(plan)
    model.check()


HASHES = 0x010203, 0x010204, 0x020203, 0x010303, 0xFFFFFF, 0x000000


@on_ranks(2, 3)
@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("other", HASHES[1:])
def test_plans_that_differ_in_any_byte_of_their_hashes(world, form, other):
    model = Model(world, "odd", dtypes=FORMS[form])
    found = HASHES[0] if world.rank else other
    with mock.patch("zerofp4.cast.plan.plan_hash", lambda signatures: found):
        plan = plan_of(model)
    before = model.snapshot()
    with pytest.raises(RuntimeError, match="different cast plans"):
        plan.step()
        plan.check()
    model.check_untouched(before)


@on_ranks(2, 3)
@pytest.mark.parametrize("form", list(FORMS))
def test_ranks_that_ask_for_another_plan(world, form):
    """Of the function, whose shards are others in the second call: on all ranks, then on one."""
    model = Model(world, "even", dtypes=FORMS[form])
    cast_and_gather(model)
    for i, shards in enumerate(model.shards):
        model.shards[i] = [*shards[1:], shards[0]]
    model.whole = [whole * -3 + 1 for whole in model.whole]
    model.cut()
    cast_and_gather(model)
    model.check()


@on_ranks(2)
def test_describe_counts_what_travels(world):
    """Half of the bytes for weights of bfloat16, whose bucket has one dtype."""
    parameters = [p for p in parameters_of(world) if isinstance(p, zerofp4.NVFP4Tensor)]
    parameters = [p for p in parameters if p.dtype == torch.bfloat16]
    optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, lr=0.01)
    set_gradients(parameters, make_gradients(parameters, world.rank))
    optimizer.step()
    words = sum(plan.reduced.numel() for plan in optimizer._shards.plans)
    assert optimizer.describe()["bytes_sent"]["amaxes"] == 2 * words
