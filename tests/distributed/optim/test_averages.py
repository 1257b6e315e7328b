"""AveragedMasters: an average of masters that are sharded."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import assert_bytes_equal

import zerofp4
from distributed.cases import shared_folder
from distributed.run import on_ranks
from distributed.state.cases import run, trained
from zerofp4.optim import AveragedMasters

DECAY = 0.9


def averaged(world, steps=3, case="adamw"):
    """A model, its optimizer, the averages, and what they have to be: by hand, of whole masters."""
    model, optimizer = trained(world, 0, case)
    averages = AveragedMasters(optimizer, DECAY)
    expected = dict(zerofp4.master_state_dict(model, optimizer))
    for step in range(steps):
        run(model, optimizer, [step])
        averages.update()
        expected = by_hand(expected, model, optimizer)
    return model, optimizer, averages, expected


def by_hand(expected, model, optimizer):
    masters = dict(zerofp4.master_state_dict(model, optimizer))
    return {name: DECAY * expected[name] + (1 - DECAY) * masters[name] for name in masters}


def check(model, averages, expected):
    found = dict(zerofp4.master_state_dict(model, averages))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if name != "frozen":
            assert_bytes_equal(value, expected[name], name)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("case", ["adamw", "fused", "muon", "compact"])
def test_the_average_is_that_of_whole_masters(world, case):
    model, optimizer, averages, expected = averaged(world, case=case)
    check(model, averages, expected)
    model.cube.grad = torch.full_like(model.cube, math.nan)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    averages.update()
    check(model, averages, by_hand(expected, model, optimizer))


@on_ranks(1, 2)
def test_averages_are_saved_and_loaded(world):
    _, _, averages, expected = averaged(world)
    path = shared_folder(world)
    dcp.save({"averages": averages}, checkpoint_id=path)
    other, optimizer, loaded, _ = averaged(world, steps=1)
    dcp.load({"averages": loaded}, checkpoint_id=path)
    check(other, loaded, expected)
    run(other, optimizer, [1])
    loaded.update()
    check(other, loaded, by_hand(expected, other, optimizer))
    loaded.load_state_dict(averages.state_dict())
    check(other, loaded, expected)
    alone = [dist.new_group([rank]) for rank in range(world.world_size)][world.rank]
    other, optimizer = trained(world, 0, group=alone)
    loaded = AveragedMasters(optimizer, DECAY)
    dcp.load({"averages": loaded}, checkpoint_id=path, no_dist=True)
    check(other, loaded, expected)


@on_ranks(1, 2)
def test_averages_that_lack_one_are_refused_and_the_others_make_an_ordinary_model(world):
    model, _, averages, expected = averaged(world)
    state = averages.state_dict()
    if world.rank == world.world_size - 1:
        state["state"].popitem()
    with pytest.raises(ValueError, match=r"\.average is missing"):
        averages.load_state_dict(state)
    check(model, averages, expected)
    zerofp4.unconvert_model(model, averages)
    for p, name in ((model.first.weight, "first.weight"), (model.second.weight, "second.weight")):
        assert type(p) is torch.nn.Parameter
        assert_bytes_equal(p.detach(), expected[name].to(p.dtype), name)
