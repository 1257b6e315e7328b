"""Casts whose amaxes an update has left, on all ranks or some, and masters that change on one rank."""

from __future__ import annotations

import pytest

import zerofp4
from distributed.cases import Model, cast_and_gather, finish
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW


@on_ranks(1, 2)
@pytest.mark.parametrize("how", ["odd", "flat", "last"])
def test_amaxes_left_on_every_rank_or_one(world, how):
    model, groups = Model(world, how), [[0, 2], [1, 5]]
    members = [[model.weights[i] for i in group] for group in groups]
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts, amax_groups=members)
    owned = [master for master in model.masters if master is not None]
    assert all(a.master is b for a, b in zip(plan.staged.master_pieces(), owned, strict=True))
    optimizer = FusedAdamW([{"params": owned}])
    optimizer.offer_amaxes(plan)
    for ranks in (range(world.world_size), [0], []):
        if world.rank in ranks:
            optimizer.step()  # there is no gradient: masters are only read
        finish(plan)
        model.check(groups)
        model.change()


@on_ranks(2, 3)
def test_one_rank_changes_its_masters(world):
    """Where they are, and then their dtype: only that rank checks its call anew."""
    model = Model(world, "odd")
    model.whole = [whole.bfloat16().float() for whole in model.whole]
    model.cut()
    for step in range(4):
        if step > 1 and world.rank == 1:
            model.cut()
        if step == 3 and world.rank == 1:
            model.masters = [None if master is None else master.bfloat16() for master in model.masters]
        cast_and_gather(model)
        model.check()
    assert len(model.weights[0].record.attachments["cast_plans"]) == 1
