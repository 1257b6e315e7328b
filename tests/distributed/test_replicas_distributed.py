"""Parameters that are sharded within one group and replicated over another (HSDP)."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from optim_cases import assert_all_equal, make_gradients, set_gradients

from distributed.cases import raised_everywhere, shared_folder
from distributed.checks_optim import WAYS, model_bytes, parameters_of
from distributed.group_cases import named
from distributed.mesh_cases import OPTIONS, check_order_of_addition, gradients_of, means_of, mesh_of
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

SHAPES = {2: [(2, 1)], 3: [(3, 1)], 4: [(2, 2), (4, 1), (1, 4)]}


@on_ranks(2, 3, 4, time_limit=120)
@pytest.mark.parametrize(("name", "bucket_mb", "clip"), WAYS)
def test_steps_in_the_documented_order_of_addition(world, name, bucket_mb, clip):
    for shape in SHAPES[world.world_size]:

        def build(parameters, *arguments, shape=shape, **options):
            groups = [{"params": parameters, "process_group": mesh_of(world, shape)}]
            optimizer = ZeroFP4Optimizer(groups, *arguments, **options)
            buckets = optimizer.describe()["buckets"]
            assert {(bucket["replicas"], bucket["ranks"]) for bucket in buckets} == {shape}
            return optimizer

        check_order_of_addition(world, shape, build, name, clip, bucket_mb=bucket_mb)


@on_ranks(4)
@pytest.mark.parametrize("norm_type", [1.0, math.inf])
def test_other_norms_count_each_element_once(world, norm_type):
    parameters = parameters_of(world)
    groups = [{"params": parameters, "process_group": mesh_of(world, (2, 2))}]
    optimizer = ZeroFP4Optimizer(groups, torch.optim.SGD)
    set_gradients(parameters, gradients_of(parameters, world.rank, 0))
    whole = torch.cat([m.flatten().double() for m in means_of(parameters, (2, 2), 0)])
    # Sums in FP32 of a few hundred elements, in another order than here.
    total, expected = optimizer.clip_grad_norm_(1.0, norm_type), torch.linalg.vector_norm(whole, norm_type)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)


@on_ranks(4)
def test_exact_sums_give_the_bytes_of_one_group(world):
    """Where no order of addition makes a difference, how ranks are put together makes none."""
    sides = []
    for groups in ({}, {"process_group": mesh_of(world, (2, 2))}):
        parameters = parameters_of(world)
        optimizer = ZeroFP4Optimizer([{"params": parameters, **groups}], FusedAdamW, **OPTIONS)
        for step in range(3):
            made = make_gradients(parameters, 100 * world.rank + step)
            set_gradients(parameters, [g.clamp(-8, 8).round() for g in made])
            optimizer.step()
        sides.append([*optimizer.gathered_masters(), *model_bytes(parameters)])
    assert_all_equal(*sides, "tensor")


@on_ranks(4)
def test_masters_begin_with_the_first_rank_and_a_nan_skips_all(world):
    """Frozen parameters too."""
    parameters, expected = parameters_of(world, seed=world.rank), parameters_of(world)
    for p in parameters[:4]:
        p.requires_grad_(False)
    groups = [{"params": parameters, "process_group": mesh_of(world, (2, 2))}]
    optimizer = ZeroFP4Optimizer(groups, **OPTIONS)
    assert_all_equal(model_bytes(parameters), model_bytes(expected), "parameter")
    set_gradients(parameters[4:], gradients_of(parameters, world.rank, 0)[4:])
    if world.rank == 3:
        parameters[5].grad.view(-1)[0] = math.inf
    optimizer.step()
    assert optimizer.skipped_steps == 1 and optimizer.first_nonfinite() == "param_groups[0]['params'][5]"
    assert_all_equal(model_bytes(parameters), model_bytes(expected), "parameter")


@on_ranks(4, time_limit=120)
def test_checkpoints_of_replicas_and_of_one_group_load_each_other(world):
    mesh, folders = mesh_of(world, (2, 2)), [shared_folder(world) for _ in range(2)]
    optimizers = []
    for folder, group in zip(folders, (mesh, None), strict=True):
        parameters = parameters_of(world)
        optimizer = ZeroFP4Optimizer(
            [{"params": named(parameters, "p"), "process_group": group}], FusedAdamW, **OPTIONS
        )
        set_gradients(parameters, [g.round() for g in gradients_of(parameters, world.rank, 0)])
        optimizer.step()
        dcp.save({"optimizer": optimizer}, checkpoint_id=folder)
        optimizers.append((parameters, optimizer))
    for (parameters, optimizer), folder in zip(optimizers, reversed(folders), strict=True):
        expected, weights = optimizer.gathered_masters(), [b.clone() for b in model_bytes(parameters)]
        set_gradients(parameters, gradients_of(parameters, world.rank, 1))
        optimizer.step()
        dcp.load({"optimizer": optimizer}, checkpoint_id=folder)
        assert_all_equal(optimizer.gathered_masters(), expected, "master")
        assert_all_equal(model_bytes(parameters), weights, "weight")


@on_ranks(4, time_limit=30)
def test_meshes_that_cannot_be_meant(world):
    parameters = parameters_of(world)
    before = [b.clone() for b in model_bytes(parameters)]
    square, line = mesh_of(world, (2, 2)), mesh_of(world, (4,))
    other = square if world.rank < 3 else dist.group.WORLD
    for group, message, options in [
        (line, "rank 0: process_group of a parameter group may be a DeviceMesh of two dimensions", {}),
        (other, "in 2 parts on rank 0 and", {}),
        (square, 'transport="peer" cannot be where', {"transport": "peer"}),
    ]:
        groups = [{"params": parameters, "process_group": group}]
        build = lambda g=groups, o=options: ZeroFP4Optimizer(g, lr=0.1, **o)  # noqa: E731
        assert message in raised_everywhere(world, ValueError, build)
    assert_all_equal(model_bytes(parameters), before, "parameter")
