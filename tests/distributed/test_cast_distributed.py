"""Casts of sharded masters: the bytes of quantizing the whole, at any world size and sharding."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers import assert_bytes_equal

import zerofp4
from distributed.cases import EXPERTS, SHAPES, SPLITS, Model, cast_and_gather, finish, raised_everywhere
from distributed.run import on_ranks
from zerofp4 import reference
from zerofp4.storage import allocate


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("how", SPLITS)
def test_functions_equal_the_whole(world, how):
    model = Model(world, how)
    cast_and_gather(model)
    model.check()
    # Again with other values: the plans are there now, the masters have moved.
    model.whole = [whole * -3 + 1 for whole in model.whole]
    model.cut()
    cast_and_gather(model)
    model.check()
    assert len(model.weights[0].record.attachments["cast_plans"]) == 1
    assert len(model.weights[0].record.attachments["gather_plans"]) == 1


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("how", SPLITS)
def test_plan_equals_the_whole(world, how):
    model = Model(world, how, seed=7)
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts)
    for _ in range(3):
        finish(plan)
        model.check()
        model.change()


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("how", SPLITS)
def test_experts_equal_the_whole(world, how):
    """Boundaries of shards anywhere in a stack: at odd elements of an expert, between two, over several."""
    model = Model(world, how, shapes=EXPERTS, seed=5)
    cast_and_gather(model)
    model.check()
    plan = zerofp4.CastPlan(
        model.weights, model.masters, model.starts, amax_groups=[[model.weights[0], model.weights[3]]]
    )
    for _ in range(2):
        model.change()
        finish(plan)
        model.check([[0, 3]])


@on_ranks(2, 3)
def test_an_expert_that_is_not_finite_on_one_rank_is_skipped_on_all(world):
    model = Model(world, "odd", shapes=[(3, 18, 50), (16, 48)])
    finish(zerofp4.CastPlan(model.weights, model.masters, model.starts))
    model.check()
    before = model.weights[0].clone()
    model.whole = [2 * whole for whole in model.whole]
    model.whole[0][1, 17, 49] = torch.nan
    model.cut()
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts)
    finish(plan)
    assert plan.found_inf.item() == 1
    model.check(skip=(0,))
    expected = reference.quantize_experts(model.whole[0].to(before.dtype))
    for e, codes in enumerate(model.weights[0].rowwise_data):
        kept = e == 1
        assert_bytes_equal(codes, before.rowwise_data[e] if kept else expected.rowwise_data[e], f"{e}")
        amax = model.weights[0].amax[e]
        assert_bytes_equal(amax, before.amax[e] if kept else expected.amax[e], f"amax {e}")


@on_ranks(2, launcher="mpirun")
def test_functions_equal_the_whole_under_mpirun(world):
    model = Model(world, "odd")
    cast_and_gather(model)
    model.check()


@on_ranks(3)
def test_one_all_reduce_a_step(world):
    model = Model(world, "odd")
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts)
    calls = []
    original = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append("all_reduce"), original(*args, **kwargs))[1]
    try:
        plan.step()
        zerofp4.cast_master_weights_to_nvfp4(model.weights, model.masters, model.starts)
        del calls[:]
        zerofp4.cast_master_weights_to_nvfp4(model.weights, model.masters, model.starts)
    finally:
        dist.all_reduce = original
    assert calls == ["all_reduce"]


@on_ranks(2, 3)
def test_amax_groups(world):
    model = Model(world, "odd")
    groups = [[0, 2], [1, 5]]
    members = [[model.weights[i] for i in group] for group in groups]
    cast_and_gather(model, amax_groups=members)
    model.check(groups)


@on_ranks(2, 3)
def test_fsdp_shard_model_weights(world):
    """Codes into shard buffers of exactly the shard's bytes; rowwise_data stays as it was."""
    model = Model(world, "odd")
    before = [weight.rowwise_data.clone() for weight in model.weights]
    buffers = []
    for start, numel in zip(model.starts, model.numels, strict=True):
        size = (start + numel + 1) // 2 - start // 2 if numel else 0
        buffers.append(torch.full((size,), 0xA5, dtype=torch.uint8, device=world.device) if numel else None)
    zerofp4.cast_master_weights_to_nvfp4(model.weights, model.masters, model.starts, None, buffers)
    for i, (weight, buffer) in enumerate(zip(model.weights, buffers, strict=True)):
        assert_bytes_equal(weight.rowwise_data, before[i], f"rowwise_data {i}")
        if buffer is None:
            continue
        whole = model.whole[i].to(weight.dtype)
        expected = torch.full_like(buffer, 0xA5)
        tiles, amax = reference.partial_amax(whole.float().flatten(), 0, whole.shape, weight.dtype)
        reference.partial_cast(
            model.masters[i], model.starts[i], whole.shape, weight.dtype, tiles, amax, expected
        )
        assert_bytes_equal(buffer, expected, f"shard {i}")
        assert_bytes_equal(weight.rowwise_scale, reference.block_scale(tiles, amax), f"scale {i}")
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts, fsdp_shard_model_weights=buffers)
    with pytest.raises(ValueError, match="fsdp_shard_model_weights: gather those"):
        plan.all_gather()


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.4e38])
def test_nonfinite_master_on_one_rank_is_skipped_on_all(world, bad):
    """3.4e38 is finite in float32 and infinite in bfloat16. The group of the bad weight keeps everything."""
    model = Model(world, "odd")
    found_inf = torch.zeros(1, device=world.device)
    groups = [[model.weights[3], model.weights[4]]]
    before = [b.clone() for i in (3, 4) for _, b in model.weights[i].record.buffers()]
    if world.rank == world.world_size - 1:
        model.masters[3][0] = bad
    cast_and_gather(model, amax_groups=groups, found_inf=found_inf)
    assert found_inf.item() == 1.0
    after = [(n, b) for i in (3, 4) for n, b in model.weights[i].record.buffers()]
    for old, (name, new) in zip(before, after, strict=True):
        if name != "columnwise_data":  # the transpose of unchanged codes
            assert_bytes_equal(new, old, name)
    model.check(skip=(3, 4))


@on_ranks(1, 2, 3)
def test_nonfinite_master_on_one_rank_raises_on_all(world):
    model = Model(world, "odd")
    model.weights[3].record.name = "layers.3"
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts, on_nonfinite="raise")
    if world.rank == world.world_size - 1:
        model.masters[3][0] = float("nan")
    message = raised_everywhere(world, FloatingPointError, plan.step)
    assert "model_weights[3] 'layers.3'" in message and "model_weights[2]" not in message
    if world.rank == world.world_size - 1:
        model.masters[3][0] = 0.5
    plan.step()


@on_ranks(3)
def test_subgroup(world):
    """A group of ranks 2 and 0; the rank that is not in it is told so."""
    group = dist.new_group([0, 2])
    model = Model(world, "odd")
    if world.rank == 1:
        with pytest.raises(ValueError, match="group does not contain the calling process"):
            zerofp4.CastPlan(model.weights, model.masters, model.starts, group)
        return
    local = type(world)(dist.get_rank(group), 2, world.local_rank, world.device, world.backend)
    model = Model(local, "odd")
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts, group)
    finish(plan)
    model.check()


@on_ranks(3)
def test_a_rank_that_owns_nothing_at_all(world):
    model = Model(world, "last")
    assert (world.rank < 2) == all(master is None for master in model.masters)
    cast_and_gather(model)
    model.check()


@on_ranks(2)
def test_ranks_may_keep_different_layouts(world):
    """Scales never travel, so what a rank keeps of them is its own business."""
    shape = SHAPES[2]
    layouts = ("compact", "swizzled") if world.rank else ("compact",)
    record = allocate(
        shape, dtype=torch.bfloat16, device=world.device, columnwise=bool(world.rank), scale_layouts=layouts
    )
    weight = zerofp4.NVFP4Tensor(record)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(world.device)
    half = whole.numel() // 2 | 1
    start, end = (0, half) if world.rank == 0 else (half, whole.numel())
    plan = zerofp4.CastPlan([weight], [whole.flatten()[start:end]], [start])
    finish(plan)
    expected = reference.quantize(whole.bfloat16())
    assert_bytes_equal(weight.rowwise_data, expected.rowwise_data, "codes")
    if world.rank:
        assert_bytes_equal(weight.columnwise_data, expected.columnwise_data, "columnwise codes")


@on_ranks(2, 3, time_limit=30)
def test_all_ranks_may_change_shards_and_options(world):
    model, other = Model(world, "odd"), Model(world, "even")
    cast_and_gather(model)
    model.shards = other.shards
    model.cut()
    groups = [[model.weights[0], model.weights[2]]]
    cast_and_gather(model, amax_groups=groups)
    model.check([[0, 2]])
    cast_and_gather(model)
    model.check()
    attachments = model.weights[0].record.attachments
    assert len(attachments["cast_plans"]) == len(attachments["gather_plans"]) == 1


@on_ranks(2, 3, time_limit=30)
def test_found_inf_is_a_rank_s_own_business(world):
    """A new flag on some ranks, none on others: no plan is built anew."""
    model = Model(world, "odd")
    cast_and_gather(model)
    plan = model.weights[0].record.attachments["cast_plans"][0]
    for _ in range(2):
        options = {"found_inf": torch.zeros(1, device=world.device)} if world.rank else {}
        if world.rank == 1:
            model.masters[3][0] = torch.nan
        cast_and_gather(model, **options)
        assert world.rank == 0 or options["found_inf"].item() == 1
    assert model.weights[0].record.attachments["cast_plans"] == [plan]
