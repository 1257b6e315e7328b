"""What ranks of a ZeroFP4Optimizer do when they disagree, or when one of them finds an error."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from helpers import assert_bytes_equal
from optim_cases import (
    assert_all_equal,
    assert_weights_follow,
    make_gradients,
    set_gradients,
)
from torch import nn

from distributed.checks_optim import (
    check_weights,
    model_bytes,
    parameters_of,
)
from distributed.run import on_ranks
from zerofp4.optim import ZeroFP4Optimizer


@on_ranks(2, 3)
def test_a_state_dict_that_does_not_fit_one_rank_is_refused_by_all(world):
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters)
    states: list = [None] * world.world_size
    dist.all_gather_object(states, copy.deepcopy(optimizer.state_dict()))
    before = model_bytes(parameters)
    swapped = states[(world.rank + 1) % world.world_size] if world.rank < 2 else states[world.rank]
    with pytest.raises(
        ValueError, match=r"rank 0: state_dict was saved by rank 1 of \d and this is rank 0 of"
    ):
        optimizer.load_state_dict(swapped)
    mine = states[world.rank]
    if world.rank == 1:
        mine["fingerprint"]["world_size"] = 7
    with pytest.raises(
        ValueError, match=r"rank 1: state_dict was saved by rank 1 of 7 and this is rank 1 of"
    ):
        optimizer.load_state_dict(mine)
    assert_all_equal(model_bytes(parameters), before, "weight")
    optimizer.step()


@on_ranks(2, 3, time_limit=30)
def test_an_error_of_one_rank_while_building_is_raised_by_all(world):
    last = world.world_size - 1
    parameters = parameters_of(world)
    bad = world.rank == last
    with pytest.raises(ValueError, match=f"rank {last}: Invalid learning rate: -1.0"):
        ZeroFP4Optimizer(parameters, lr=-1.0 if bad else 0.1)
    with pytest.raises(TypeError, match=f"rank {last}: .* must have one of the dtypes"):
        ZeroFP4Optimizer(
            [*parameters, nn.Parameter(torch.zeros(2, dtype=torch.float64))] if bad else parameters
        )
    with pytest.raises(ValueError, match=f"rank 0 has 8 parameters, rank {last} has 7"):
        ZeroFP4Optimizer(parameters[bad:])
    with pytest.raises(
        ValueError, match=rf"\[1\] is bfloat16 \(7,\) in group 0 on rank 0 and .* on rank {last}"
    ):
        ZeroFP4Optimizer([parameters[0], parameters[3 if bad else 1]])
    with pytest.raises(ValueError, match=f"optimizer_class is torch.* on rank 0 and .*SGD on rank {last}"):
        ZeroFP4Optimizer(parameters, torch.optim.SGD if bad else torch.optim.AdamW)
    with pytest.raises(ValueError, match="amax_groups"):
        ZeroFP4Optimizer(parameters, amax_groups=[[parameters[1 if bad else 0], parameters[2]]])
    ZeroFP4Optimizer(parameters).step()


@on_ranks(2, 3, time_limit=30)
def test_an_error_of_one_rank_in_a_step_ends_the_step_of_all(world):
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters)
    set_gradients(parameters, make_gradients(parameters, 0))
    before = optimizer.gathered_masters()
    stray = nn.Parameter(torch.zeros(3, device=world.device))
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        if world.rank == 1:
            optimizer.param_groups[0]["params"].append(stray)
            with pytest.raises(RuntimeError, match="is not the list that the optimizer was built with"):
                call()
            optimizer.param_groups[0]["params"].pop()
        else:
            with pytest.raises(RuntimeError, match="rank 1 found an error, and no rank takes this step"):
                call()
    assert_all_equal(optimizer.gathered_masters(), before, "master")
    optimizer.step()
    check_weights(parameters, optimizer)


@on_ranks(3)
def test_a_subgroup(world):
    group = dist.new_group([0, 2])
    if world.rank == 1:
        with pytest.raises(ValueError, match="does not contain the calling process"):
            ZeroFP4Optimizer(parameters_of(world), process_group=group)
        return
    parameters = parameters_of(world, seed=world.rank)
    optimizer = ZeroFP4Optimizer(parameters, torch.optim.SGD, lr=1.0, process_group=group)
    before = optimizer.gathered_masters()
    set_gradients(parameters, make_gradients(parameters, world.rank))
    optimizer.step()
    a, b = (make_gradients(parameters, rank) for rank in (0, 2))
    for i, (p, master) in enumerate(zip(parameters, optimizer.gathered_masters(), strict=True)):
        mean = (a[i].to(p.dtype).float() + b[i].to(p.dtype).float()) / 2
        assert_bytes_equal(master, before[i] - mean, f"master {i}")
    assert_weights_follow(parameters, optimizer.gathered_masters())
