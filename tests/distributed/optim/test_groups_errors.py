"""Process groups of parameter groups that cannot be meant, or that differ between ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cases.optim import assert_all_equal, assert_weights_follow, keywords, make_parameters
from torch.distributed.device_mesh import DeviceMesh

from distributed.cases import raised_everywhere
from distributed.optim.cases import model_bytes
from distributed.optim.group_cases import REPLICATED, Mesh, Mixture, Parts, expert_group, mesh_of
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


def check_refused(model, param_groups, message: str, error=ValueError, **options) -> None:
    """On every rank, with one message, before a parameter was touched."""
    before = [b.clone() for b in model_bytes(model.parameters)]
    build = lambda: ZeroFP4Optimizer(param_groups, lr=0.1, **keywords(options))  # noqa: E731
    assert message in raised_everywhere(model.world, error, build)
    assert_all_equal(model_bytes(model.parameters), before, "parameter")


@on_ranks(2, 4, time_limit=30)
def test_a_group_that_is_none(world):
    model, group = Mixture(world), expert_group(world)
    outside = dist.new_group([0])  # for rank 1, what torch gives a rank that is not in it
    copied = {"params": model.experts, "replicated_over": 3}
    for groups, message, error in [
        (model.param_groups("experts"), "process_group of param_groups[1] must be a process gr", TypeError),
        (model.param_groups(outside), "process_group of param_groups[1] does not contain the c", ValueError),
        ([copied], "replicated_over of param_groups[0] must be a process group, got int", TypeError),
    ]:
        groups = groups if world.rank == 1 else model.param_groups(group)
        check_refused(model, groups, f"rank 1: {message}", error)


@on_ranks(3, time_limit=30)
def test_a_group_with_ranks_that_do_not_step(world):
    model = Mixture(world, kind=0)
    pair, all_ranks = dist.new_group([0, 2]), dist.group.WORLD
    if world.rank != 1:
        message = r"process_group of param_groups\[1\] has global rank 1, and the"
        with pytest.raises(ValueError, match=message):
            ZeroFP4Optimizer(model.param_groups(all_ranks), process_group=pair)
    dist.barrier()
    optimizer = ZeroFP4Optimizer(model.param_groups(dist.new_group()), process_group=all_ranks)
    why = optimizer.describe()["why_collective"]  # None where the ranks' GPUs share memory
    assert why is None or "process_group" not in why  # the same ranks are the same


@on_ranks(2, 4, time_limit=30)
def test_groups_that_differ_between_ranks(world):
    model, group = Mixture(world), expert_group(world)
    last = world.world_size - 1
    alone = [dist.new_group([rank]) for rank in range(world.world_size)][world.rank]
    if world.world_size == 4:
        message = "the number of parameters sharded over ranks [1, 3] is 3 on rank 1 and 0 on rank 3"
    else:
        message = "the number of parameters sharded over ranks [0, 1] is 11 on rank 0 and 9 on rank 1"
        group = dist.group.WORLD
    check_refused(model, model.param_groups(alone if world.rank == last else group), message)
    more = [{"params": make_parameters(world.device, 5, [((4,), torch.float32, False)])}]
    groups = model.param_groups(alone) + more * (world.rank == last)
    check_refused(model, groups, "optimizer_class of param_groups is ['torch.optim.adamw.AdamW', ")


@on_ranks(4, time_limit=30)
def test_parameters_that_differ_within_a_group(world):
    """Others may have other experts; those of a group are the same on its ranks."""
    model, group = Mixture(world), expert_group(world)
    fewer = [{"params": model.dense}, {"params": model.experts[:1], "process_group": group}]
    groups = fewer if world.rank == 3 else model.param_groups(group)
    check_refused(model, groups, "parameters sharded over ranks [1, 3] is 3 on rank 1 and 1 on rank 3")
    other = Mixture(world, kind=1 - model.kind)
    groups = other.param_groups(group) if world.rank == 2 else model.param_groups(group)
    check_refused(model, groups, "parameters sharded over ranks [0, 2] is 2 on rank 0 and 3 on rank 2")
    model.experts[0].requires_grad_(world.rank != 3)
    kind = "nvfp4 bfloat16 (16, 34) in group 1"
    message = f"param_groups[1]['params'][0] is {kind} on rank 1 and {kind}, frozen on rank 3"
    check_refused(model, model.param_groups(group), message)


@on_ranks(2, 4, time_limit=30)
def test_options_that_go_with_groups(world):
    model, group = Mixture(world), expert_group(world)
    check_refused(
        model,
        model.param_groups(group),
        "param_groups[0]['params'][0] and param_groups[1]['params'][0] share an amax, so they must have",
        amax_groups=[[model.dense[0], model.experts[0]]],
    )
    first = ZeroFP4Optimizer(model.param_groups(group), FusedAdamW, lr=0.1)
    count = len(model.dense)
    message = f"rank 0: param_groups[0]['params'][{count}] is sharded over another process group"
    check_refused(model, [{"params": model.parameters[: count + 1]}], message, masters_from=first)
    again = ZeroFP4Optimizer(model.param_groups(group), FusedAdamW, lr=0.1, masters_from=first)
    assert_all_equal(again.gathered_masters(), first.gathered_masters(), "master")
    with pytest.raises(RuntimeError, match="add_param_group"):
        again.add_param_group({"params": [], "process_group": group})
    assert not {"process_group", "replicated_over"} & again.param_groups[1].keys()


# Slices of tensor parallelism


@on_ranks(2, 4, time_limit=30)
def test_what_is_wrong_with_slices(world):
    model = Parts(world)
    slices, replicated = model.param_groups()
    message = "rank 0: param_groups[0] names no process_group, and another is replicated_over a tensor-para"
    check_refused(model, [{"params": model.slices}, replicated], message)
    both = replicated | {"process_group": dist.group.WORLD}
    check_refused(model, [slices, both], "may have no rank in common but this one")
    with pytest.raises(ValueError, match=r"has global rank \d, and the optimizer's process_group has not"):
        ZeroFP4Optimizer([slices, replicated], process_group=model.data)
    dist.barrier()
    other = make_parameters(world.device, 1, [((301,), torch.float32, False), *REPLICATED[1:]])
    differs = replicated | {"params": other if model.part else model.replicated}
    message = "[0] is float32 (300,) in group 1 on rank 0 and float32 (301,) in group 1 on rank 1"
    check_refused(model, [slices, differs], message)
    if world.world_size == 4:
        alone = [dist.new_group([rank]) for rank in range(4)][world.rank]
        some = replicated | ({"replicated_over": alone} if world.rank == 3 else {})
        message = "the number of parameters replicated over ranks [2, 3] is 3 on rank 2 and 0 on rank 3"
        check_refused(model, [slices, some], message)
    optimizer = ZeroFP4Optimizer(model.param_groups(), lr=0.1)
    model.set_gradients(0)
    optimizer.step()
    assert_weights_follow(model.parameters, optimizer.gathered_masters())


@on_ranks(4, time_limit=30)
def test_meshes_that_cannot_be_meant(world):
    square, line = mesh_of(world, (2, 2)), mesh_of(world, (4,))
    model, other = Mesh(world, (2, 2)), square if world.rank < 3 else dist.group.WORLD
    outside = DeviceMesh(world.device.type, [[0], [1]])
    for group, message, options in [
        (line, "rank 0: process_group of param_groups[0] may be a DeviceMesh of two dimensions", {}),
        (other, "in 2 parts on rank 0 and", {}),
        (outside, "rank 2: process_group of param_groups[0] does not contain the calling process", {}),
        (square, "transport='peer' is not supported because", {"transport": "peer"}),
    ]:
        check_refused(model, [{"params": model.parameters, "process_group": group}], message, **options)


def test_a_group_without_torch_distributed(device):
    parameters = make_parameters(device, 0, [((4, 4), torch.float32, False)])
    message = r"process_group of param_groups\[0\] must be a process group, got int"
    with pytest.raises(TypeError, match=message):
        ZeroFP4Optimizer([{"params": parameters, "process_group": 1}])
