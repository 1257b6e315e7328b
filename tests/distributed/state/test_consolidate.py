"""consolidate_state_dict(): the whole state of an optimizer on one rank, for what saves it there alone."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from cases.optim import assert_all_equal
from helpers import assert_bytes_equal

from distributed.engine.overlap_cases import assert_same, make, nothing_changes, step_of
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


def given_to_all(world, state_dict, by):
    """The state dict of rank `by` as every rank reads it from that rank's file."""
    torch.save(state_dict, file := io.BytesIO())
    told = [file.getvalue()]
    if world.world_size > 1:
        dist.broadcast_object_list(told, by)
    return torch.load(io.BytesIO(told[0]), weights_only=True)


@on_ranks(1, 2, nightly=[3])
@pytest.mark.parametrize("name", ["AdamW", "FusedAdamW"])
@pytest.mark.parametrize("steps", [0, 2])
def test_every_rank_goes_on_from_one_file(world, name, steps):
    net, optimizer = make(world, name)
    for step in range(steps):
        step_of(world, [(net, optimizer)], step)
    to = world.world_size - 1
    optimizer.consolidate_state_dict(to)
    state_dict = optimizer.state_dict()
    pieces = optimizer.state_dict()["state"]  # only once whole
    assert state_dict["state"].keys() == pieces.keys()
    for number, entries in pieces.items():
        for entry, piece in entries.items():
            whole = piece.full_tensor() if world.world_size > 1 else piece.values.view(piece.shape)
            if world.world_size > 1 and world.rank == to:
                found = state_dict["state"][number][entry]
                assert type(found) is torch.Tensor and found.device.type == "cpu"
                assert_bytes_equal(found, whole.cpu(), f"{number}.{entry}")
    other = make(world, name)
    step_of(world, [other], 5)
    other[1].load_state_dict(given_to_all(world, state_dict, to))
    assert_same([(net, optimizer), other], "loaded")
    step_of(world, [(net, optimizer), other], steps)
    assert_same([(net, optimizer), other], "a step later")


@on_ranks(2)
def test_a_world_of_two_goes_on_from_the_file_of_one(world):
    alone = [dist.new_group([rank]) for rank in range(world.world_size)][world.rank]
    one = make(world, process_group=alone)
    two = make(world)
    step_of(world, [one], 0)
    saved = given_to_all(world, one[1].state_dict(), 0)
    two[1].load_state_dict(saved)
    one[1].load_state_dict(saved)  # each rank stepped with a batch of its own
    assert_all_equal(two[1].gathered_masters(), one[1].gathered_masters(), "master")
    assert int(two[1].state_dict()["steps"]) == 1


@on_ranks(2)
def test_a_step_drops_it_and_a_part_names_the_way(world):
    net, optimizer = make(world)
    optimizer.consolidate_state_dict()
    step_of(world, [(net, optimizer)], 0)
    state = optimizer.state_dict()["state"]
    assert not any(type(value) is torch.Tensor for entries in state.values() for value in entries.values())
    with pytest.warns(UserWarning, match=r"consolidate_state_dict\(\) of the optimizer on every rank before"):
        part = given_to_all(world, optimizer.state_dict(), 0)
    found = r"rank 1: state_dict does not fit: \S+ has the elements of another rank"
    message = rf"{found}.*: call consolidate_state_dict\(\) of the optimizer"
    with nothing_changes(net, optimizer), pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(part)


@on_ranks(2)
def test_what_cannot_be_gathered_on_one_rank(world):
    _, optimizer = make(world)
    for to in (2, -1, "0"):
        with pytest.raises(ValueError, match=rf"to must be a rank from 0 to 1, got {to!r}"):
            optimizer.consolidate_state_dict(to)
    groups = [dist.new_group([rank]) for rank in range(2)]
    own = torch.nn.Parameter(torch.ones(4, 4, device=world.device))
    shared = torch.nn.Parameter(torch.ones(4, device=world.device))
    groups = [
        {"params": [("shared", shared)]},
        {"params": [(f"experts.{world.rank}", own)], "process_group": groups[world.rank]},
    ]
    optimizer = ZeroFP4Optimizer(groups, FusedAdamW, lr=0.1)
    message = r"consolidate_state_dict\(\) needs .* other ranks train other .*torch\.distributed\.checkpoint"
    with pytest.raises(ValueError, match=message):
        optimizer.consolidate_state_dict()


@on_ranks(2)
def test_one_that_is_broken_on_a_rank_is_refused_on_all_until_a_load(world):
    net, optimizer = make(world, "AdamW")
    step_of(world, [(net, optimizer)], 0)
    saved = copy.deepcopy(optimizer.state_dict())
    if world.rank == 1:
        optimizer._sound.broken = RuntimeError("on this rank alone")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="on this rank alone"):
            optimizer.consolidate_state_dict()
    optimizer.load_state_dict(saved)
    optimizer.consolidate_state_dict()
    whole = [type(entry) is torch.Tensor for entry in optimizer.state_dict()["state"][0].values()]
    assert all(whole) if world.rank == 0 else not any(whole)
