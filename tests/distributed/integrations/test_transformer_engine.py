"""Sharded casts into TransformerEngine's tensors: the bytes of the whole, and errors of one rank."""

from __future__ import annotations

import pytest
import torch
from cases.transformer_engine import SHAPES, check, check_untouched, contents, make, places

import zerofp4
import zerofp4.integrations.transformer_engine
from distributed.cases import SPLITS, cast_and_gather, finish, split
from distributed.run import on_ranks
from zerofp4.cast.plan_cache import attached


class Sharded:
    """The weights, their whole masters, which are equal on all ranks, and this rank's shards."""

    def __init__(self, world, how: str, shapes=SHAPES, **options):
        self.weights, self.whole, _ = make(world.device, shapes, **options)
        self.shards = [
            split(w.numel(), world.world_size, how, i)[world.rank] for i, w in enumerate(self.weights)
        ]
        self.starts = [shard.start if shard.numel else None for shard in self.shards]
        self.numels = [shard.numel for shard in self.shards]

    @property
    def masters(self) -> list[torch.Tensor | None]:
        pairs = zip(self.whole, self.shards, strict=True)
        return [whole[shard.start : shard.end].clone() if shard.numel else None for whole, shard in pairs]


@on_ranks(1, 2)
@pytest.mark.parametrize(("how", "columnwise"), [*((how, True) for how in SPLITS), ("odd", False)])
def test_every_buffer_equals_the_whole(world, how, columnwise):
    model = Sharded(world, how, columnwise=columnwise)
    before = places(model.weights)
    for _ in range(2):
        cast_and_gather(model)
        check(model.weights, model.whole)
        model.whole = [whole * -3 + 1 for whole in model.whole]
    assert places(model.weights) == before
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts)
    finish(plan)
    check(model.weights, model.whole)
    assert places(model.weights) == before


@on_ranks(2, time_limit=30)
@pytest.mark.parametrize("known", [False, True])
def test_a_tensor_that_one_rank_cannot_cast_into(world, known):
    """That rank says which and why, the others hear of it, nobody writes, and later casts work."""
    model = Sharded(world, "odd", [(16, 16), (48, 288)])
    if known:
        cast_and_gather(model)
    bad = model.weights[1]
    before = contents(model.weights)
    if world.rank == 1:
        bad._with_gemm_swizzled_scales = True
    for call in ("cast", "gather"):
        alone = known and world.rank != 1
        message = "" if alone else r"model_weights\[1\]: _with_gemm_swizzled_scales asks for scales"
        with pytest.raises(RuntimeError if alone else ValueError, match=message):
            if call == "cast":
                zerofp4.cast_master_weights_to_nvfp4(model.weights, model.masters, model.starts)
                attached(model.weights, "cast_plans")[0].plan.check()  # a GPU says it here
            else:
                zerofp4.all_gather_nvfp4(model.weights, model.starts, model.numels)
        check_untouched(model.weights, before)
    bad._with_gemm_swizzled_scales = False
    model.whole = [whole.neg() for whole in model.whole]
    cast_and_gather(model)
    check(model.weights, model.whole)
