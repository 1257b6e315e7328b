"""Parameter groups with a process group of their own: experts beside dense parameters."""

from __future__ import annotations

import contextlib
import copy
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import assert_bytes_equal
from optim_cases import assert_all_equal, assert_weights_follow, plain_masters, set_gradients
from torch.utils._python_dispatch import TorchDispatchMode

from distributed.cases import raised_by
from distributed.checks_optim import WAYS, Injected, model_bytes
from distributed.group_cases import Mixture, assert_same_on, expert_group, give, members
from distributed.run import on_ranks
from zerofp4 import NVFP4Tensor, ops, reference
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

OPTIONS = {"lr": 0.02, "weight_decay": 0.1}
CLASSES = {"AdamW": torch.optim.AdamW, "FusedAdamW": FusedAdamW}


def check(model: Mixture, optimizer: ZeroFP4Optimizer, masters: list[torch.Tensor], what: str) -> None:
    """Masters, and weights on every rank that holds them."""
    found = optimizer.gathered_masters()
    assert_all_equal(found, masters, f"{what}: master")
    assert_weights_follow(model.parameters, found)
    world = model.world
    assert_same_on(world, range(world.world_size), model_bytes(model.dense), f"{what}: dense")
    assert_same_on(world, members(world, model.kind), model_bytes(model.experts), f"{what}: expert")


@on_ranks(2, 3, 4)
@pytest.mark.parametrize(("name", "bucket_mb", "clip"), WAYS)
def test_experts_beside_dense_parameters(world, name, bucket_mb, clip):
    """The bytes of whole masters, updated on one machine with the means over each parameter's own ranks."""
    model = Mixture(world)
    masters = plain_masters(model.parameters)
    plain = CLASSES[name](masters, **OPTIONS)
    groups = model.param_groups(expert_group(world))
    optimizer = ZeroFP4Optimizer(groups, CLASSES[name], bucket_mb=bucket_mb, **OPTIONS)
    check(model, optimizer, masters, "built")
    for step in range(4):
        model.set_gradients(step)
        means = model.means(step)
        if clip:
            total = optimizer.clip_grad_norm_(0.7)
            means = [mean * (0.7 / (total + 1e-6)).clamp(max=1.0) for mean in means]
        give(masters, means)
        plain.step()
        optimizer.step()
        check(model, optimizer, masters, f"step {step}")
    assert optimizer.describe()["in_buckets"] == (name == "FusedAdamW")


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
    optimizer = ZeroFP4Optimizer(model.param_groups(expert_group(world)), FusedAdamW, **options)
    for clip in (False, True):
        model.set_gradients(0)
        if clip:
            optimizer.clip_grad_norm_(1.0)
        with Groups() as begun:
            optimizer.step()
        assert begun.sizes == sorted(begun.sizes, reverse=True) and set(begun.sizes) == {4, 2}, begun.sizes


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("name", CLASSES)
def test_same_gradients_same_masters(world, name):
    """With injected gradients, as in a world of one: nothing depends on how ranks are put together."""
    model = Mixture(world, kind=1)
    masters = plain_masters(model.parameters)
    plain = CLASSES[name](masters, **OPTIONS)
    optimizer = Injected(model.param_groups(expert_group(world)), CLASSES[name], **OPTIONS)
    for step in range(5):
        set_gradients(model.parameters, model.gradients(0, step))
        give(masters, [p.grad.float() for p in model.parameters])
        plain.step()
        optimizer.step()
        found = optimizer.gathered_masters()
        assert_all_equal(found, masters, f"step {step}: master")
        assert_weights_follow(model.parameters, found)


@on_ranks(2, 4)
def test_masters_begin_with_the_first_rank_of_their_group(world):
    """Frozen parameters too."""
    model = Mixture(world, seed=1000 * world.rank)
    for parameters in (model.dense, model.experts):
        parameters[0].requires_grad_(False)
    expected = Mixture(world, seed=0)
    firsts = Mixture(world, seed=1000 * members(world, model.kind)[0])
    ZeroFP4Optimizer(model.param_groups(expert_group(world)), lr=0.1)
    assert_all_equal(model_bytes(model.dense), model_bytes(expected.dense), "dense")
    assert_all_equal(model_bytes(model.experts), model_bytes(firsts.experts), "expert")


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("name", CLASSES)
def test_an_expert_without_gradient_is_skipped_where_it_has_none(world, name):
    """Not where others have one for another expert in its place."""
    model = Mixture(world)
    masters = plain_masters(model.parameters)
    plain = CLASSES[name](masters, **OPTIONS)
    optimizer = ZeroFP4Optimizer(model.param_groups(expert_group(world)), CLASSES[name], **OPTIONS)
    for step in range(3):
        model.set_gradients(step)
        means = model.means(step)
        if step == 1 and model.kind == 1:  # on all of its ranks
            for p in model.experts:
                p.grad = None
            means[len(model.dense) :] = [None] * len(model.experts)
        if step == 2:  # on one of them: its gradient counts as zeros
            first = members(world, model.kind)[0]
            if world.rank == first:
                model.experts[0].grad = None
            i, n = len(model.dense), len(members(world, model.kind))
            others = [model.gradients(r, step)[i].float() for r in members(world, model.kind) if r != first]
            means[i] = sum(others, start=torch.zeros_like(means[i])) / n if others else None
        give(masters, means)
        plain.step()
        optimizer.step()
        check(model, optimizer, masters, f"step {step}")


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("clip", [False, True])
def test_a_nan_in_an_expert_skips_the_step_of_all(world, name, clip):
    model = Mixture(world)
    optimizer = ZeroFP4Optimizer(model.param_groups(expert_group(world)), CLASSES[name], **OPTIONS)
    masters, weights = optimizer.gathered_masters(), [b.clone() for b in model_bytes(model.parameters)]
    model.set_gradients(0)
    if world.rank == 1:
        model.experts[1].grad.view(-1)[-1] = math.nan
    if clip:
        assert optimizer.clip_grad_norm_(1.0).isnan()
    optimizer.step()
    assert (optimizer.skipped_steps, optimizer.found_inf.item()) == (1, 1)
    expected = f"param_groups[1]['params'][1] (of ranks {members(world, 1)})"
    assert optimizer.first_nonfinite() == expected
    assert_all_equal(optimizer.gathered_masters(), masters, "master")
    assert_all_equal(model_bytes(model.parameters), weights, "weight")
    model.set_gradients(0)
    optimizer.step()
    assert optimizer.first_nonfinite() is None and optimizer.found_inf.item() == 0


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("wire", [None, torch.float32])
def test_the_norm_counts_every_expert_once(world, wire):
    """The bits of the sums of squares of all means, wherever they are."""
    model = Mixture(world)
    groups = model.param_groups(expert_group(world))
    optimizer = ZeroFP4Optimizer(groups, torch.optim.SGD, lr=1.0, gradient_wire=wire)
    model.set_gradients(0)
    count = len(model.dense)
    dense = [mean.flatten().cpu() for mean in model.means(0)[:count]]
    experts = [mean.flatten().cpu() for kind in (0, 1) for mean in Mixture(world, kind).means(0)[count:]]
    words = sum(reference.square_sums(mean) for mean in [*dense, *experts])
    total = optimizer.clip_grad_norm_(1.0)
    assert_bytes_equal(total, ops.norm_of_squares(words.to(world.device)), "norm")
    for norm_type in (1.0, math.inf):
        other = ZeroFP4Optimizer(model.param_groups(expert_group(world)), torch.optim.SGD)
        model.set_gradients(0)
        whole = torch.cat([*dense, *experts]).double()
        # Sums in FP32 of a few hundred elements, in another order than here.
        torch.testing.assert_close(
            other.clip_grad_norm_(1.0, norm_type).double().cpu(),
            torch.linalg.vector_norm(whole, norm_type),
            rtol=1e-6,
            atol=0,
        )


@on_ranks(4, time_limit=30)
@pytest.mark.parametrize("name", CLASSES)
def test_an_update_that_fails_on_one_rank_is_heard_by_all(world, name):
    """Where rank 3 can update nothing, at once. Where only its experts, rank 1 at once, with whom it shares
    them, and ranks 0 and 2 in the next step. A load mends all of them.
    """
    if world.device.type != "cpu":
        pytest.skip("on a GPU others hear of it in a later call")
    model = Mixture(world)
    optimizer = ZeroFP4Optimizer(model.param_groups(expert_group(world)), CLASSES[name], **OPTIONS)
    checkpoint = copy.deepcopy(optimizer.state_dict())
    model.set_gradients(0)
    experts = [p for p in model.experts if isinstance(p, NVFP4Tensor)]
    before, error, raised = [b.clone() for b in model_bytes(experts)], RuntimeError("cannot"), None
    kinds = [bucket["kind"] for bucket in optimizer.describe()["buckets"]]
    last = len(kinds) - 1 - kinds[::-1].index("nvfp4")
    owner, attribute = (optimizer.inner, "step") if name == "AdamW" else (optimizer.inner._parts[last], "run")
    bad = world.rank == 3
    with mock.patch.object(owner, attribute, side_effect=error) if bad else contextlib.nullcontext():
        raised = raised_by(optimizer.step)
    if bad:
        assert raised is error
    elif world.rank == 1 or name == "AdamW":
        assert "another rank could not take part" in str(raised)
    else:
        assert raised is None
    if world.rank in (1, 3):
        assert_all_equal(model_bytes(experts), before, "expert")
    model.set_gradients(1)
    broken = name == "AdamW" or world.rank in (1, 3)
    with pytest.raises(RuntimeError, match="left in the middle" if broken else "found an error"):
        optimizer.step()
    optimizer.load_state_dict(checkpoint)
    optimizer.step()
    assert_same_on(world, members(world, model.kind), model_bytes(model.experts), "expert")
