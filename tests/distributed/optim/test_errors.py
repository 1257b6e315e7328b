"""What ranks of a ZeroFP4Optimizer do when they disagree, or when one of them finds an error."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from cases.optim import assert_all_equal, keywords, make_gradients, set_gradients
from helpers import assert_bytes_equal
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distributed.cases import raised_everywhere
from distributed.optim.cases import (
    assert_same_on_all_ranks,
    built,
    check_weights,
    make_net,
    model_bytes,
    parameters_of,
    whole_state,
)
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


def raises_on_rank_1(world, kind, message):
    """What rank 1 raises when it alone finds an error; the others RuntimeError."""
    if world.rank == 1:
        return pytest.raises(kind, match=message)
    return pytest.raises(RuntimeError, match="rank 1 found an error, and no rank takes this step")


def calls_of(optimizer):
    return optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)


@on_ranks(2, 3, time_limit=30)
def test_what_one_rank_builds_otherwise_all_refuse(world):
    last = world.world_size - 1
    parameters = parameters_of(world)
    count, bad = len(parameters), world.rank == last
    double = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    kinds = rf"\[1\] is bfloat16 \(7,\) in group 0 on rank 0 and .* on rank {last}"
    for params, options, message in [
        (parameters, {"lr": -1.0}, f"rank {last}: Invalid learning rate: -1.0"),
        ([*parameters, double], {}, f"rank {last}: .* must have one of the dtypes"),
        (parameters[1:], {}, rf"parameters sharded .* is {count} on rank 0 and {count - 1} on rank {last}"),
        ([parameters[i] for i in (0, 3, 2, 1, *range(4, count))], {}, kinds),
        (parameters, {"optimizer_class": torch.optim.SGD}, "optimizer_class of .*AdamW.* rank 0 and .*SGD"),
        (parameters, {"amax_groups": [[parameters[1], parameters[2]]]}, "amax_groups"),
        (parameters, {"gradient_wire": torch.float32}, "gradient_wire is None on rank 0 and torch.float32"),
        (parameters, {"on_nonfinite": "raise"}, "on_nonfinite is skip on rank 0 and raise on rank"),
        (parameters, {"bucket_mb": 2.0}, "bucket_mb is None on rank 0 and 2.0"),
        (parameters, {"gradient_dtype": torch.float32}, "gradient_dtype is None on rank 0 and torch.float32"),
        (parameters, {"overlap": "backward"}, "overlap is None on rank 0 and backward on rank"),
        (parameters, {"overlap": "forward"}, "overlap is None on rank 0 and forward on rank"),
        (parameters, {"accumulate": "sharded"}, "accumulate is local on rank 0 and sharded on rank"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            ZeroFP4Optimizer(params if bad else parameters, **keywords(options if bad else {}))
    ZeroFP4Optimizer(parameters).step()


@on_ranks(2, 3, time_limit=30)
def test_an_error_of_one_rank_in_a_step_ends_the_step_of_all(world):
    """Masters, moments and weights are untouched."""
    parameters, optimizer = built(world, seed=0)
    optimizer.step()
    before = [b.clone() for b in (*model_bytes(parameters), *whole_state(parameters, optimizer))]
    group = optimizer.param_groups[0]
    params, stray = group["params"], nn.Parameter(torch.zeros(3, device=world.device))

    def fail():
        raise KeyError("no batch")

    with raises_on_rank_1(world, KeyError, "no batch"):
        optimizer.step(fail if world.rank == 1 else lambda: 3)
    for change, kind, message in [
        (lambda: params.append(stray), RuntimeError, "is not the list that the optimizer was built with"),
        (lambda: group.pop("params"), KeyError, "params"),
        (lambda: group.update(lr=math.inf), ValueError, r"\[0\]\['lr'\] must be finite, got inf"),
        (
            lambda: setattr(parameters[4], "rowwise_data", parameters[4].rowwise_data.clone()),
            RuntimeError,
            r"\['params'\]\[4\].* has moved since .* call refresh\(\)",
        ),
    ]:
        for call in calls_of(optimizer)[: 1 if kind is ValueError else 2]:
            if world.rank == 1:
                change()
            with raises_on_rank_1(world, kind, message):
                call()
            params[:] = parameters
            group.update(params=params, lr=0.001)
            optimizer.refresh()
    now = [*model_bytes(parameters), *whole_state(parameters, optimizer)]
    assert_all_equal(now, before, "tensor")
    assert optimizer.step(lambda: 3) == 3
    check_weights(parameters, optimizer)


@on_ranks(2, time_limit=30)
def test_ranks_that_do_different_things_all_raise(world):
    parameters, optimizer = built(world, torch.optim.SGD, seed=0, lr=1.0)
    before, first = optimizer.gathered_masters(), world.rank == 0
    step, clip = calls_of(optimizer)

    def start(clipped=True):
        optimizer.zero_grad()
        set_gradients(parameters, make_gradients(parameters, world.rank))
        if clipped:
            clip()

    start()
    if not first:
        parameters[1].grad = parameters[1].grad.clone()  # another tensor: reduced anew
    with pytest.raises(RuntimeError, match="some ranks have gradients to reduce and others have reduced"):
        clip()
    start()
    if not first:
        optimizer.zero_grad()
    for call in (step, clip):
        with pytest.raises(RuntimeError, match="some ranks have gradients to reduce and others have reduced"):
            call()
    start(clipped=False)
    for call, message in [
        (step if first else clip, r"some ranks called clip_grad_norm_ and others step\(\)"),
        (
            lambda: optimizer.clip_grad_norm_(1.0, 2.0 if first else math.inf),
            r"norm_type must be the same on every rank, got from 2\.0 to inf",
        ),
        (
            lambda: optimizer.clip_grad_norm_(1.0 if first else 0.5),
            r"max_norm must be the same on every rank, got from 0\.5 to 1\.0",
        ),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call()
    assert_all_equal(optimizer.gathered_masters(), before, "master")
    start()
    optimizer.step()
    check_weights(parameters, optimizer)


@on_ranks(2, time_limit=30)
def test_a_closure_that_clips(world):
    parameters, optimizer = built(world, seed=0)
    bad = world.rank == 1

    def closure(early=False, max_norm=1.0):
        if early:
            raise KeyError("no batch")
        optimizer.zero_grad()
        set_gradients(parameters, make_gradients(parameters, 0))
        return optimizer.clip_grad_norm_(max_norm)

    with raises_on_rank_1(world, KeyError, "no batch"):
        optimizer.step(lambda: closure(early=bad))
    with raises_on_rank_1(world, ValueError, "max_norm"):
        optimizer.step(lambda: closure(max_norm=-1.0 if bad else 1.0))
    with pytest.raises(RuntimeError, match="max_norm must be the same on every rank"):
        optimizer.step(lambda: closure(max_norm=2.0 if bad else 1.0))
    assert optimizer.step(closure) > 1
    check_weights(parameters, optimizer)


class FailsOnRank1(torch.optim.SGD):
    """Cannot take a state on rank 1, and finds that when it has replaced its own."""

    def __setstate__(self, state):
        super().__setstate__(state)
        if dist.get_rank() == 1:
            raise KeyError("momentum")


def _move(state, parameters):
    parameters[1].data = parameters[1].data.clone()
    for entries in state["state"].values():
        del entries["master"]


DAMAGES = [
    (
        lambda state, _: state["state"][0].update(momentum_buffer=torch.zeros(3)),
        r"\.momentum_buffer has shape \(3,\), here \(34, 48\)",
    ),
    (None, "state_dict cannot be loaded: KeyError: 'momentum'"),
    (_move, r"no master of .*\['params'\]\[1\] has moved since"),
]


@on_ranks(2, time_limit=30)
def test_a_state_that_one_rank_cannot_load_changes_no_rank(world):
    for damage, message in DAMAGES:
        optimizer_class = torch.optim.SGD if damage else FailsOnRank1
        parameters, optimizer = built(world, optimizer_class, seed=0, lr=0.5, momentum=0.9)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["lr"] = 7.0
        for entries in saved["state"].values():
            entries["master"].values.fill_(7)
        if world.rank == 1 and damage:
            damage(saved, parameters)
        inner = optimizer.inner
        state, groups, masters = inner.state, inner.param_groups, optimizer.gathered_masters()
        kept, before = copy.deepcopy(inner.state_dict()), model_bytes(parameters)
        with pytest.raises(ValueError, match=f"rank 1: .*{message}"):
            optimizer.load_state_dict(saved)
        assert inner.state is state and inner.param_groups is groups
        assert optimizer.param_groups[0]["lr"] == groups[0]["lr"] == 0.5
        now = inner.state_dict()["state"]
        assert now.keys() == kept["state"].keys()
        for i, entries in kept["state"].items():
            assert_bytes_equal(now[i]["momentum_buffer"], entries["momentum_buffer"], f"state {i}")
        assert_all_equal(optimizer.gathered_masters(), masters, "master")
        assert_all_equal(model_bytes(parameters), before, "weight")
        if damage is not _move:
            optimizer.step()
            check_weights(parameters, optimizer)


# Beside DistributedDataParallel, which writes rank 0's values into every weight


def backward(world, ddp, step: int) -> None:
    """Of another batch on every rank."""
    generator = torch.Generator().manual_seed(10 * step + world.rank)
    tokens = torch.randint(32, (4, 5), generator=generator).to(world.device)
    ddp(tokens).square().mean().backward()


@on_ranks(2, 3)
def test_a_model_that_is_wrapped_before_the_optimizer_is_built(world, seed=0):
    """DDP quantizes anew on the other ranks, from values that were quantized; the masters are rank 0's."""
    net = make_net(world, seed=world.rank)
    initial = [p.get_high_precision_init_val() for p in (net.first.weight, net.second.weight)]
    ddp = DistributedDataParallel(net)
    parameters = list(net.parameters())
    optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, lr=0.1)
    masters = optimizer.gathered_masters()
    assert_same_on_all_ranks([*masters, *model_bytes(parameters)])
    if world.rank == 0:
        by_weight = dict(zip(parameters, masters, strict=True))
        for p, value in zip((net.first.weight, net.second.weight), initial, strict=True):
            assert torch.equal(by_weight[p], value.float().to(world.device))
    for step in range(3):
        backward(world, ddp, step)
        optimizer.step()
        optimizer.zero_grad()
        check_weights(parameters, optimizer)


@on_ranks(2, time_limit=60)
def test_a_model_that_is_wrapped_after_it(world):
    """What DDP writes is not what the masters say: the next step says so, on every rank."""
    net = make_net(world)
    parameters = list(net.parameters())
    optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, lr=0.1)
    ddp = DistributedDataParallel(net, init_sync=False)
    backward(world, ddp, 0)
    optimizer.step()
    check_weights(parameters, optimizer)
    before = optimizer.gathered_masters()
    DistributedDataParallel(net)
    message = raised_everywhere(world, RuntimeError, optimizer.step)
    assert "was written to since the last step" in message and "init_sync=False" in message
    assert_all_equal(optimizer.gathered_masters(), before, "tensor")
