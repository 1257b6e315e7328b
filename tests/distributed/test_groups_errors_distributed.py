"""Process groups of parameter groups that cannot be meant, or that differ between ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from optim_cases import assert_all_equal, make_parameters

from distributed.cases import raised_everywhere
from distributed.checks_optim import model_bytes
from distributed.group_cases import Mixture, expert_group, members
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


def check_refused(world, model: Mixture, param_groups, message: str, error=ValueError, **options) -> None:
    """On every rank, with one message, before a parameter was touched."""
    before = [b.clone() for b in model_bytes(model.parameters)]
    build = lambda: ZeroFP4Optimizer(param_groups, lr=0.1, **options)  # noqa: E731
    assert message in raised_everywhere(world, error, build)
    assert_all_equal(model_bytes(model.parameters), before, "parameter")


@on_ranks(2, 4, time_limit=30)
def test_a_group_that_is_none(world):
    model, group = Mixture(world), expert_group(world)
    bad = world.rank == 1
    check_refused(
        world,
        model,
        model.param_groups("experts" if bad else group),
        "rank 1: process_group of a parameter group must be a process group, got str",
        TypeError,
    )
    outside = dist.new_group([0])  # for rank 1, what torch gives a rank that is not in it
    check_refused(
        world,
        model,
        model.param_groups(outside if bad else group),
        "rank 1: process_group of a parameter group does not contain the calling process",
    )
    check_refused(
        world,
        model,
        [model.param_groups(group)[0], {"params": model.experts, "replicated_over": 3}],
        "rank 0: replicated_over of a parameter group must be a process group, got int",
        TypeError,
    )


@on_ranks(3, time_limit=30)
def test_a_group_with_ranks_that_do_not_step(world):
    model = Mixture(world, kind=0)
    pair, all_ranks = dist.new_group([0, 2]), dist.group.WORLD
    if world.rank != 1:
        with pytest.raises(
            ValueError, match=r"process_group of param_groups\[1\] has global rank 1, and the"
        ):
            ZeroFP4Optimizer(model.param_groups(dist.group.WORLD), process_group=pair)
    dist.barrier()
    ZeroFP4Optimizer(model.param_groups(all_ranks), process_group=all_ranks)  # the same ranks are the same


@on_ranks(2, 4, time_limit=30)
def test_groups_that_differ_between_ranks(world):
    model, group = Mixture(world), expert_group(world)
    last = world.world_size - 1
    alone = [dist.new_group([rank]) for rank in range(world.world_size)][world.rank]
    if world.world_size == 4:
        message = "process_group of param_groups[1] is ranks [1, 3] on rank 1 and ranks [3] on rank 3"
    else:
        message = "process_group of param_groups[1] is ranks [0, 1] on rank 0 and ranks [1] on rank 1"
        group = dist.group.WORLD
    check_refused(world, model, model.param_groups(alone if world.rank == last else group), message)
    more = [
        *model.param_groups(alone),
        {"params": make_parameters(world.device, 5, [((4,), torch.float32, False)])},
    ]
    check_refused(
        world,
        model,
        more if world.rank == last else model.param_groups(alone),
        f"param_groups: rank 0 has 2 groups, rank {last} has 3",
    )


@on_ranks(4, time_limit=30)
def test_parameters_that_differ_within_a_group(world):
    """Others may have other experts; those of a group are the same on its ranks."""
    model, group = Mixture(world), expert_group(world)
    fewer = {"params": model.experts[:1], "process_group": group}
    check_refused(
        world,
        model,
        [{"params": model.dense}, fewer] if world.rank == 3 else model.param_groups(group),
        "params: rank 1 has 3 parameters, rank 3 has 1 (of ranks [1, 3])",
    )
    other = Mixture(world, kind=1 - model.kind)
    groups = other.param_groups(group) if world.rank == 2 else model.param_groups(group)
    check_refused(world, model, groups, "params: rank 0 has 2 parameters, rank 2 has 3 (of ranks [0, 2])")
    model.experts[0].requires_grad_(world.rank != 3)
    check_refused(
        world,
        model,
        model.param_groups(group),
        "param_groups[1]['params'][0] is nvfp4 bfloat16 (16, 34) in group 1 on rank 1 and nvfp4 bfloat16 "
        "(16, 34) in group 1, frozen on rank 3",
    )


@on_ranks(2, 4, time_limit=30)
def test_options_that_go_with_groups(world):
    model, group = Mixture(world), expert_group(world)
    check_refused(
        world,
        model,
        model.param_groups(group),
        "put param_groups[0]['params'][0] and param_groups[1]['params'][0] together, which are in other",
        amax_groups=[[model.dense[0], model.experts[0]]],
    )
    first = ZeroFP4Optimizer(model.param_groups(group), FusedAdamW, lr=0.1)
    check_refused(
        world,
        model,
        [{"params": model.parameters[: len(model.dense) + 1]}],
        f"rank 0: param_groups[0]['params'][{len(model.dense)}] is sharded over another process group",
        masters_from=first,
    )
    again = ZeroFP4Optimizer(model.param_groups(group), FusedAdamW, lr=0.1, masters_from=first)
    assert_all_equal(again.gathered_masters(), first.gathered_masters(), "master")
    with pytest.raises(RuntimeError, match="add_param_group"):
        again.add_param_group({"params": [], "process_group": group})
    assert dist.get_process_group_ranks(again.param_groups[1]["process_group"]()) == members(
        world, model.kind
    )


def test_a_group_without_torch_distributed(device):
    parameters = make_parameters(device, 0, [((4, 4), torch.float32, False)])
    with pytest.raises(
        TypeError, match="process_group of a parameter group must be a process group, got int"
    ):
        ZeroFP4Optimizer([{"params": parameters, "process_group": 1}])
