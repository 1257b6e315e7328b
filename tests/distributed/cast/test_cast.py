"""Casts of sharded masters: the bytes of quantizing the whole, at any world size and sharding, and what
travels for it.
"""

import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import transformer_engine
from helpers import assert_bytes_equal

import zerofp4
import zerofp4.integrations.transformer_engine
from distributed import cases
from distributed.cases import (
    DTYPES,
    EXPERTS,
    ODD_SHAPES,
    ROWS,
    SHAPES,
    SPLITS,
    TILES,
    WIRES,
    Model,
    cast_and_gather,
    finish,
    split,
)
from distributed.run import on_ranks
from zerofp4 import FourOverSix, reference
from zerofp4.optim import FusedAdamW
from zerofp4.shard import row_block

MODELS = {
    "plain": (SHAPES, DTYPES, [TILES], [None], [[0, 2], [1, 5]]),
    "experts": (EXPERTS, DTYPES, [TILES], [None], [[0, 3]]),
    "experts in bfloat16": (EXPERTS, WIRES["bfloat16"], [TILES], [None], [[0, 3]]),
    "rows": (ODD_SHAPES, DTYPES, [ROWS], [None], [[0, 2], [1, 5]]),
    "rows in bfloat16": (SHAPES, WIRES["bfloat16"], [ROWS], [None], [[0, 2], [1, 5]]),
    "both blocks": (SHAPES, DTYPES, [TILES, ROWS], [None], [[0, 2, 3], [1, 4]]),
    "chosen tiles": (SHAPES, DTYPES, [TILES], [FourOverSix()], [[0, 2], [1, 5]]),
    "chosen rows": (ODD_SHAPES, WIRES["bfloat16"], [ROWS], [FourOverSix(448, "mse")], [[0, 2], [1, 5]]),
    "chosen experts": (EXPERTS, DTYPES, [TILES], [FourOverSix(256, "mse")], [[0, 3]]),
    "all kinds": (SHAPES, DTYPES, [TILES, TILES, ROWS], [None, FourOverSix()], [[0, 1, 2, 3, 4]]),
}
"""Shapes, dtypes, blocks, four over six, and amax groups of a plan."""


@on_ranks(1, 2, 3, nightly=[4])
@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("which", MODELS)
def test_every_byte_is_that_of_the_whole(world, how, which):
    """By the functions, then by a plan with amax groups."""
    shapes, dtypes, blocks, choices, groups = MODELS[which]
    model = Model(world, how, shapes=shapes, dtypes=dtypes, blocks=blocks, choices=choices)
    cast_and_gather(model)
    model.check()
    # Again with other values: the plans are there now, the masters have moved. Amaxes that travel in bfloat16
    # lose nothing, subnormal ones either.
    small = 1e-38 if dtypes == WIRES["bfloat16"] else 1
    model.whole = [(whole * -3 + 1) * (small if i % 2 else 1) for i, whole in enumerate(model.whole)]
    model.cut()
    cast_and_gather(model)
    model.check()
    assert len(model.plans) == len(model.weights[0].record.attachments["gather_plans"]) == 1
    plan = model.plan(amax_groups=[[model.weights[i] for i in group] for group in groups])
    for _ in range(2):
        model.change()
        finish(plan)
        model.check(groups)


@on_ranks(2, 3)
@pytest.mark.parametrize("blocks", [TILES, ROWS])
def test_fsdp_shard_model_weights(world, blocks):
    """Codes into shard buffers of exactly the shard's bytes; rowwise_data stays as it was. The scales of
    tiles are all there, those of blocks of 1x16 where the shard has elements.
    """
    model = Model(world, "odd", blocks=[blocks])
    before = [weight.rowwise_data.clone() for weight in model.weights]
    options = {"dtype": torch.uint8, "device": world.device}
    sizes = [(shard.end + 1) // 2 - shard.start // 2 for _, shard in model.own()]
    buffers = [torch.full((size,), 0xA5, **options) if size else None for size in sizes]
    model.cast(fsdp_shard_model_weights=buffers)
    for i, (weight, buffer) in enumerate(zip(model.weights, buffers, strict=True)):
        assert_bytes_equal(weight.rowwise_data, before[i], f"rowwise_data {i}")
        if buffer is None:
            continue
        whole, expected = model.whole[i].to(weight.dtype), torch.full_like(buffer, 0xA5)
        matrix = whole.shape, weight.dtype
        amaxes = reference.partial_amax(whole.float().flatten(), 0, *matrix, blocks[0])
        parts = *amaxes, expected, blocks[0]
        scale = reference.partial_cast(model.masters[i], model.starts[i], *matrix, *parts).view(torch.uint8)
        assert_bytes_equal(buffer, expected, f"shard {i}")
        if blocks == ROWS:
            start, end = model.starts[i], model.starts[i] + model.numels[i]
            first, last = (row_block(element, whole.shape[1])[0] for element in (start, end - 1))
            scale.view(-1)[:first] = scale.view(-1)[last + 1 :] = 0xA5
        assert_bytes_equal(weight.rowwise_scale.view(torch.uint8), scale, f"scale {i}")
    with pytest.raises(ValueError, match="fsdp_shard_model_weights: gather those"):
        model.plan(fsdp_shard_model_weights=buffers).all_gather()


@on_ranks(1, 2, 3, time_limit=30)
@pytest.mark.parametrize("blocks", [TILES, ROWS])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.4e38])
def test_nonfinite_master_on_one_rank_is_skipped_on_all(world, bad, wire, blocks):
    """3.4e38 is finite in float32 and infinite in bfloat16. The group of the bad weight keeps everything. A
    found_inf is a rank's own business: with a new one on some ranks no plan is built anew.
    """
    model = Model(world, "odd", dtypes=WIRES[wire], blocks=[blocks])
    groups = [model.weights[3:5]]
    cast_and_gather(model, amax_groups=groups)
    before = [(n, b.clone()) for i in (3, 4) for n, b in model.weights[i].record.buffers()]
    plans, is_last = model.plans, world.rank == world.world_size - 1
    for _ in range(2):
        model.change()
        if is_last:
            model.masters[3][0] = bad
        found_inf = torch.zeros(1, device=world.device) if world.rank or is_last else None
        cast_and_gather(model, amax_groups=groups, found_inf=found_inf)
        assert found_inf is None or found_inf.item() == 1
    assert model.plans == plans
    after = [buffer for i in (3, 4) for _, buffer in model.weights[i].record.buffers()]
    for (name, old), new in zip(before, after, strict=True):
        assert_bytes_equal(new, old, name)
    model.check(skip=(3, 4))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("blocks", [TILES, ROWS])
def test_nonfinite_master_on_one_rank_raises_on_all(world, blocks):
    """With the name of the weight alone, and not of those that it shares an amax with."""
    model = Model(world, "odd", blocks=[blocks])
    model.weights[3].record.name = "layers.3"
    plan = model.plan(on_nonfinite="raise", amax_groups=[model.weights[2:4]])
    if world.rank == world.world_size - 1:
        model.masters[3][0] = float("nan")
    message = cases.raised_everywhere(world, FloatingPointError, plan.step)
    assert "model_weights[3] 'layers.3'" in message and "model_weights[2]" not in message
    if world.rank == world.world_size - 1:
        model.masters[3][0] = 0.5
    plan.step()


@on_ranks(3)
def test_subgroup(world):
    """A group of ranks 2 and 0: every call tells the rank that is not in it."""
    group = dist.new_group([0, 2])
    if world.rank == 1:
        model = Model(world, "odd")
        for call in (model.plan, model.cast, model.gather):
            with pytest.raises(ValueError, match="group does not contain the calling process"):
                call(group=group)
        return
    model = Model(type(world)(dist.get_rank(group), 2, world.local_rank, world.device, world.backend), "odd")
    finish(model.plan(group=group))
    model.check()


@on_ranks(2, nightly=[3])
@pytest.mark.parametrize("wire", WIRES)
def test_ranks_may_change_shards_options_and_masters(world, wire):
    """All together; masters on one rank alone too, where they are and then their dtype."""
    model = Model(world, "odd", dtypes=WIRES[wire])
    model.whole = [whole.bfloat16().float() for whole in model.whole]
    model.cut()
    cast_and_gather(model)
    model.shards = Model(world, "even").shards
    model.cut()
    cast_and_gather(model, amax_groups=[[model.weights[0], model.weights[2]]])
    model.check([[0, 2]])
    for step in range(3):
        if step > 0 and world.rank == 1:
            model.cut()
        if step == 2 and world.rank == 1:
            model.masters = [None if master is None else master.bfloat16() for master in model.masters]
        cast_and_gather(model)
        model.check()
    assert len(model.plans) == len(model.weights[0].record.attachments["gather_plans"]) == 1


@on_ranks(2)
def test_plans_of_a_group_that_was_destroyed_are_dropped(world):
    """With what they hold, at the next call with these weights."""
    model, group = Model(world, "even"), dist.new_group()
    flag = torch.zeros(1, device=world.device)
    model.cast(group=group, found_inf=flag)
    held = weakref.ref(flag)
    del flag
    assert held() is not None
    dist.destroy_process_group(group)
    del group
    cast_and_gather(model)
    model.check()
    assert held() is None


# TransformerEngine's tensors


@on_ranks(1, 2)
@pytest.mark.parametrize(("how", "columnwise"), [*((how, True) for how in SPLITS), ("odd", False)])
def test_tensors_of_transformer_engine(world, how, columnwise):
    weights, whole, _ = transformer_engine.make(
        world.device, transformer_engine.SHAPES, columnwise=columnwise
    )
    shards = [split(w.numel(), world.world_size, how, i)[world.rank] for i, w in enumerate(weights)]
    starts, numels = [s.start if s.numel else None for s in shards], [s.numel for s in shards]

    def cut():
        pairs = zip(whole, shards, strict=True)
        return [values[s.start : s.end].clone() if s.numel else None for values, s in pairs]

    before = transformer_engine.places(weights)
    for _ in range(2):
        cast_and_gather(SimpleNamespace(weights=weights, masters=cut(), starts=starts, numels=numels))
        transformer_engine.check(weights, whole)
        whole = [values * -3 + 1 for values in whole]
    finish(zerofp4.CastPlan(weights, cut(), starts))
    transformer_engine.check(weights, whole)
    assert transformer_engine.places(weights) == before


# Amaxes that an update has left


@on_ranks(1, 2)
@pytest.mark.parametrize("how", ["odd", "flat", "last"])
def test_amaxes_left_on_every_rank_or_one(world, how):
    model, groups = Model(world, how), [[0, 2], [1, 5]]
    members = [[model.weights[i] for i in group] for group in groups]
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts, amax_groups=members)
    owned = [master for master in model.masters if master is not None]
    assert all(a.master.data_ptr() == b.data_ptr() for a, b in zip(plan.master_pieces(), owned, strict=True))
    optimizer = FusedAdamW([{"params": owned}])
    optimizer.offer_amaxes(plan)
    for ranks in (range(world.world_size), [0], []):
        if world.rank in ranks:
            optimizer.step()  # there is no gradient: masters are only read
        finish(plan)
        model.check(groups)
        model.change()
