"""Sharded casts into TransformerEngine's tensors: the bytes of the whole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from cases.transformer_engine import SHAPES, check, make, places

import zerofp4
import zerofp4.integrations.transformer_engine
from distributed.cases import SPLITS, cast_and_gather, finish, split
from distributed.run import on_ranks


@on_ranks(1, 2)
@pytest.mark.parametrize(("how", "columnwise"), [*((how, True) for how in SPLITS), ("odd", False)])
def test_every_buffer_equals_the_whole(world, how, columnwise):
    weights, whole, _ = make(world.device, SHAPES, columnwise=columnwise)
    shards = [split(w.numel(), world.world_size, how, i)[world.rank] for i, w in enumerate(weights)]
    starts, numels = [s.start if s.numel else None for s in shards], [s.numel for s in shards]

    def cut():
        pairs = zip(whole, shards, strict=True)
        return [values[s.start : s.end].clone() if s.numel else None for values, s in pairs]

    before = places(weights)
    for _ in range(2):
        cast_and_gather(SimpleNamespace(weights=weights, masters=cut(), starts=starts, numels=numels))
        check(weights, whole)
        whole = [values * -3 + 1 for values in whole]
    finish(zerofp4.CastPlan(weights, cut(), starts))
    check(weights, whole)
    assert places(weights) == before
