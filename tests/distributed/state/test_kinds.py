"""Checkpoints of weights in blocks of 1x16 and with four over six: any world, and other kinds of weights."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases.optim import assert_all_equal

import zerofp4
from distributed.cases import shared_folder
from distributed.optim.cases import model_bytes, whole_state
from distributed.run import on_ranks
from distributed.state.cases import Model, build, run
from zerofp4 import FourOverSix
from zerofp4.testing import verify_model

KINDS = {
    "tiles": {},
    "rows": {"block": (1, 16)},
    "rows, four over six": {"block": (1, 16), "four_over_six": FourOverSix()},
    "tiles, four over six": {"four_over_six": FourOverSix(448, "mse")},
}


def model_of(world, kind, seed=0) -> Model:
    torch.manual_seed(seed)
    model = Model(lambda *_: False)
    zerofp4.convert_model(model, **KINDS[kind])
    return model.to(world.device)


def trained(world, kind, steps, seed=0, group=None):
    model = model_of(world, kind, seed)
    optimizer = build(model, "fused", group)
    run(model, optimizer, range(steps))
    return model, optimizer


@on_ranks(3)
@pytest.mark.parametrize("kind", ["rows", "rows, four over six", "tiles, four over six"])
def test_saved_on_two_ranks_and_loaded_on_three(world, kind):
    path, pair = shared_folder(world), dist.new_group([0, 1])
    if world.rank < 2:
        model, optimizer = trained(world, kind, 3, group=pair)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path, process_group=pair)
    dist.barrier()
    straight, through = trained(world, kind, 3)
    other, resumed = trained(world, kind, 0, seed=1)
    dcp.load({"model": other, "optimizer": resumed}, checkpoint_id=path)
    for steps in (range(0), range(3, 6)):
        run(straight, through, steps)
        run(other, resumed, steps)
        sides = [model_bytes(list(one.parameters())) for one in (other, straight)]
        assert_all_equal(*sides, f"after {steps}: buffer")
    pairs = (other, resumed), (straight, through)
    states = [whole_state([p for p in m.parameters() if p.requires_grad], o) for m, o in pairs]
    assert_all_equal(*states, "state")


@on_ranks(2)
@pytest.mark.parametrize(
    ("saved", "loaded"), [("tiles", "rows"), ("rows, four over six", "tiles, four over six")]
)
def test_another_kind_follows_the_masters_that_are_loaded(world, saved, loaded):
    path = shared_folder(world)
    _, optimizer = trained(world, saved, 2)
    dcp.save({"optimizer": optimizer}, checkpoint_id=path)
    other, resumed = trained(world, loaded, 0, seed=1)
    dcp.load({"optimizer": resumed}, checkpoint_id=path)
    expected, masters = optimizer.gathered_masters(), resumed.gathered_masters()
    assert_all_equal([m for m in masters if m is not None], [m for m in expected if m is not None], "master")
    assert other.first.weight.block == KINDS[loaded].get("block", (16, 16))
    verify_model(other, resumed)
