"""Parameter groups with a process group of their own: experts, replicas, and slices of tensor parallelism."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases.optim import Plain, assert_all_equal, check, keywords, set_gradients
from torch.utils._python_dispatch import TorchDispatchMode

from distributed.cases import shared_folder
from distributed.optim.cases import WAYS, model_bytes, parameters_of
from distributed.optim.group_cases import (
    CLASSES,
    OPTIONS,
    SHAPES,
    Mesh,
    Mixture,
    Parts,
    check_steps,
    gradients_of,
    mean,
    members,
    mesh_of,
    named,
)
from distributed.run import on_ranks
from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer

LAYOUTS = {
    "experts": lambda world: [Mixture(world)],
    "parts": lambda world: [Parts(world)],
    "replicas": lambda world: [Mesh(world, shape) for shape in SHAPES[world.world_size]],
}


@on_ranks(2, 4, time_limit=120)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "bucket_mb", "clip"), WAYS)
def test_steps_are_those_of_whole_masters(world, layout, name, bucket_mb, clip):
    """In the documented order of addition; the norm counts every element once."""
    for model in LAYOUTS[layout](world):

        def build(cls, groups=model.param_groups(), **options):  # noqa: B008
            return ZeroFP4Optimizer(groups, cls, **keywords(options))

        check_steps(model, build, name, clip, bucket_mb=bucket_mb)


class Groups(TorchDispatchMode):
    """The sizes of the process groups of the collectives and messages that this rank begins inside."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            group = next(given for given in args if isinstance(given, torch.ScriptObject))
            self.sizes.append(dist.ProcessGroup.unbox(group).size())
        return func(*args, **(kwargs or {}))


@on_ranks(4)
def test_a_group_begins_when_the_one_before_is_done(world):
    """No collective of the experts begins before the last of the dense parameters: ranks whose groups have
    different numbers of buckets would wait for each other crosswise.
    """
    model = Mixture(world)
    options = {"transport": "collective", "bucket_mb": 1e-4, **OPTIONS}
    optimizer = ZeroFP4Optimizer(model.param_groups(), FusedAdamW, **keywords(options))
    for clip in (False, True):
        model.set_gradients(0)
        if clip:
            optimizer.clip_grad_norm_(1.0)
        with Groups() as begun:
            optimizer.step()
        assert begun.sizes == sorted(begun.sizes, reverse=True) and set(begun.sizes) == {4, 2}, begun.sizes


@on_ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("norm_type", "wire"), [(1.0, None), (3.0, torch.float32), (math.inf, None)])
def test_other_norms_count_every_element_once(world, layout, norm_type, wire):
    for model in LAYOUTS[layout](world):
        way = Communication(gradient_wire=wire)
        optimizer = ZeroFP4Optimizer(model.param_groups(), torch.optim.SGD, communication=way)
        model.set_gradients(0)
        whole = torch.cat([mean.flatten().double() for mean in model.all_means(0)])
        total = optimizer.clip_grad_norm_(1.0, norm_type)
        # Sums in FP32 of a few hundred elements, in another order than here.
        expected = torch.linalg.vector_norm(whole, norm_type)
        torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)


@on_ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "clip"), [("AdamW", True), ("FusedAdamW", False)])
def test_a_nan_on_one_rank_skips_the_step_of_all(world, layout, name, clip):
    """Also of those that do not share the parameter."""
    for model in LAYOUTS[layout](world):
        optimizer = ZeroFP4Optimizer(model.param_groups(), CLASSES[name], **OPTIONS)
        masters, weights = optimizer.gathered_masters(), [b.clone() for b in model_bytes(model.parameters)]
        model.set_gradients(0)
        bad = model.experts[1] if layout == "experts" else model.parameters[2]
        if world.rank == 1:
            bad.grad.view(-1)[-1] = math.nan
        if clip:
            assert optimizer.clip_grad_norm_(1.0).isnan()
        optimizer.step()
        assert (optimizer.skipped_steps, optimizer.found_inf.item()) == (1, 1)
        place = "param_groups[1]['params'][1]" if layout == "experts" else "param_groups[0]['params'][2]"
        assert optimizer.first_nonfinite().startswith(place)
        if layout == "experts":
            assert optimizer.first_nonfinite() == f"{place} (of ranks {members(world, 1)})"
        assert_all_equal(optimizer.gathered_masters(), masters, "master")
        assert_all_equal(model_bytes(model.parameters), weights, "weight")
        model.set_gradients(0)
        optimizer.step()
        assert optimizer.first_nonfinite() is None and optimizer.found_inf.item() == 0


# Experts


@on_ranks(2, 4)
def test_masters_begin_with_the_first_rank_of_their_group(world):
    """Frozen parameters too, whatever the order of their elements in memory."""
    model = Mixture(world, seed=1000 * world.rank)
    mesh = Mesh(world, SHAPES[world.world_size][0], seed=world.rank)
    for parameters in (model.dense, model.experts, mesh.parameters):
        parameters[0].requires_grad_(False)
    turned = model.dense[7].requires_grad_(False)
    turned.data = turned.data.t().contiguous().t()
    ZeroFP4Optimizer(model.param_groups(), lr=0.1)
    firsts = Mixture(world, seed=1000 * members(world, model.kind)[0])
    assert_all_equal(model_bytes(model.dense), model_bytes(Mixture(world).dense), "dense")
    assert_all_equal(model_bytes(model.experts), model_bytes(firsts.experts), "expert")
    optimizer = ZeroFP4Optimizer(mesh.param_groups(), lr=0.1)
    assert_all_equal(model_bytes(mesh.parameters), model_bytes(parameters_of(world)), "replica")
    buckets = optimizer.describe()["buckets"]
    assert {(bucket["replicas"], bucket["ranks"]) for bucket in buckets} == {mesh.shape}


@on_ranks(2, 4)
@pytest.mark.parametrize("name", CLASSES)
def test_an_expert_without_gradient_is_skipped_where_it_has_none(world, name):
    """Not where others have one for another expert in its place."""
    model = Mixture(world)
    plain = Plain(model.parameters, CLASSES[name], **OPTIONS)
    optimizer = ZeroFP4Optimizer(model.param_groups(), CLASSES[name], **OPTIONS)
    for step in range(3):
        model.set_gradients(step)
        means = model.means(step)
        if step == 1 and model.kind == 1:  # on all of its ranks
            for p in model.experts:
                p.grad = None
            means[len(model.dense) :] = [None] * len(model.experts)
        if step == 2:  # on one of them: its gradient counts as zeros
            first, i = members(world, model.kind)[0], len(model.dense)
            if world.rank == first:
                model.experts[0].grad = None
            given = [model.gradients(rank, step)[i] * (rank != first) for rank in members(world, model.kind)]
            means[i] = mean(given) if len(given) > 1 else None
        plain.step(means)
        optimizer.step()
        check(optimizer, plain, f"step {step}:")
        model.check_same()


# Replicas


@on_ranks(4, time_limit=120)
def test_checkpoints_of_replicas_and_of_one_group_load_each_other(world):
    mesh, folders = mesh_of(world, (2, 2)), [shared_folder(world) for _ in range(2)]
    optimizers = []
    for folder, group in zip(folders, (mesh, None), strict=True):
        parameters = parameters_of(world)
        groups = [{"params": named(parameters, "p"), "process_group": group}]
        optimizer = ZeroFP4Optimizer(groups, FusedAdamW, **OPTIONS)
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
