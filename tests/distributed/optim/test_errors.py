"""What ranks of a ZeroFP4Optimizer do when they disagree, or when one of them finds an error."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from cases.optim import (
    assert_all_equal,
    batch,
    keywords,
    make_gradients,
    make_net,
    set_gradients,
    unchanged,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zerofp4
from distributed.cases import raised_everywhere
from distributed.optim.cases import (
    built,
    check_weights,
    parameters_of,
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
        (parameters, {"overlap": "backward"}, "overlap is None on rank 0 and backward on rank"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            ZeroFP4Optimizer(params if bad else parameters, **keywords(options if bad else {}))
    ZeroFP4Optimizer(parameters).step()


@on_ranks(2, 3, time_limit=30)
def test_an_error_of_one_rank_in_a_step_ends_the_step_of_all(world):
    parameters, optimizer = built(world, seed=0)
    optimizer.step()
    group = optimizer.param_groups[0]
    params, stray = group["params"], nn.Parameter(torch.zeros(3, device=world.device))

    def fail():
        raise KeyError("no batch")

    def move():
        parameters[4].rowwise_data = parameters[4].rowwise_data.clone()

    with unchanged(parameters, optimizer):
        with raises_on_rank_1(world, KeyError, "no batch"):
            optimizer.step(fail if world.rank == 1 else lambda: 3)
        for change, kind, message in [
            (lambda: params.append(stray), RuntimeError, "is not the list that the optimizer was built with"),
            (lambda: group.update(lr=math.inf), ValueError, r"\[0\]\['lr'\] must be finite, got inf"),
            (move, RuntimeError, r"\['params'\]\[4\].* has moved since .* call refresh\(\)"),
        ]:
            for call in calls_of(optimizer)[: 1 if kind is ValueError else 2]:
                if world.rank == 1:
                    change()
                with raises_on_rank_1(world, kind, message):
                    call()
                params[:] = parameters
                group["lr"] = 0.001
                optimizer.refresh()
    assert optimizer.step(lambda: 3) == 3
    check_weights(parameters, optimizer)


@on_ranks(2, time_limit=30)
def test_ranks_that_do_different_things_all_raise(world):
    parameters, optimizer = built(world, torch.optim.SGD, seed=0, lr=1.0)
    before, first = optimizer.gathered_masters(), world.rank == 0
    step, clip = calls_of(optimizer)

    clip()
    if not first:
        optimizer.zero_grad()
    for call in (step, clip):
        with pytest.raises(RuntimeError, match="some ranks have gradients to reduce and others have reduced"):
            call()
    optimizer.zero_grad()
    set_gradients(parameters, make_gradients(parameters, world.rank))
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
    step()
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


def _change_a_shape(state, _):
    state["state"][0].update(momentum_buffer=torch.zeros(3))


def _move_without_masters(state, parameters):
    parameters[1].data = parameters[1].data.clone()
    for entries in state["state"].values():
        del entries["master"]


@on_ranks(2, time_limit=30)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_change_a_shape, r"\.momentum_buffer has shape \(3,\), here \(34, 48\)"),
        (_move_without_masters, r"no master of .*\['params'\]\[1\] has moved since"),
    ],
)
def test_a_state_that_one_rank_cannot_load_changes_no_rank(world, damage, message):
    parameters, optimizer = built(world, torch.optim.SGD, seed=0, lr=0.5, momentum=0.9)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 7.0
    for entries in saved["state"].values():
        entries["master"].values.fill_(7)
    if world.rank == 1:
        damage(saved, parameters)
    inner = optimizer.inner
    state, groups = inner.state, inner.param_groups
    with unchanged(parameters, optimizer):
        with pytest.raises(ValueError, match=f"rank 1: .*{message}"):
            optimizer.load_state_dict(saved)
    assert inner.state is state and inner.param_groups is groups
    assert optimizer.param_groups[0]["lr"] == groups[0]["lr"] == 0.5
    optimizer.refresh()
    optimizer.step()
    check_weights(parameters, optimizer)


@on_ranks(2, 3, time_limit=60)
def test_a_model_in_distributed_data_parallel(world):
    """It writes rank 0's values into every weight: before the optimizer is built these are what the masters
    begin with, and the next step refuses them behind that. A save has the masters: nothing has changed.
    """
    net = make_net(world.device, seed=world.rank)
    ddp, parameters = DistributedDataParallel(net), list(net.parameters())
    optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, lr=0.1)
    for step in range(2):
        check_weights(parameters, optimizer)
        ddp(batch(world.device, 10 * step + world.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = optimizer.gathered_masters()
    DistributedDataParallel(net)
    message = raised_everywhere(world, RuntimeError, optimizer.step)
    assert "was written to since the last step" in message and "init_sync=False" in message
    found = dict(zerofp4.master_state_dict(net, optimizer))
    assert_all_equal([found[name] for name, _ in net.named_parameters()], before, "exported")
    assert_all_equal(optimizer.gathered_masters(), before, "master")
    check_weights(parameters, optimizer)


@on_ranks(2)
@pytest.mark.parametrize("overlap", ["backward", "update"])
@pytest.mark.parametrize("is_first", [False, True])
def test_distributed_data_parallel_beside_early_gradients(world, overlap, is_first):
    """Both would average them. A wrapper that was deleted does no harm."""
    net = make_net(world.device)
    ddp = DistributedDataParallel(net) if is_first else None
    optimizer = ZeroFP4Optimizer(net.parameters(), FusedAdamW, **keywords(overlap=overlap))
    ddp = ddp or DistributedDataParallel(net, init_sync=False)
    before = optimizer.gathered_masters()
    inputs = batch(world.device, world.rank)
    with pytest.raises(RuntimeError, match=r"is in a DistributedDataParallel.*overlap='update': leave"):
        ddp(inputs).sum().backward()
    assert_all_equal(optimizer.gathered_masters(), before, "master")
    optimizer.zero_grad()
    del ddp
    net(inputs).sum().backward()
    optimizer.step()
    check_weights(list(net.parameters()), optimizer)


def told_of(clip):
    """The warnings of a call of torch's function, and where they point."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clip()
    return [(str(warning.message), warning.filename) for warning in caught]


@on_ranks(1, 2)
@pytest.mark.parametrize("in_ddp", [False, True])
def test_clipping_a_ranks_own_gradients_by_torch_warns_once(world, in_ddp):
    """Not what a trainer clips in DDP, nor another change of gradients."""
    net = make_net(world.device)
    model = DistributedDataParallel(net) if in_ddp else net
    optimizer = ZeroFP4Optimizer(net.named_parameters(), lr=0.01)

    def clip():
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)

    model(batch(world.device, world.rank)).square().mean().backward()
    assert not told_of(lambda: [p.grad.mul_(0.5) for p in net.parameters()])
    assert not told_of(lambda: nn.utils.clip_grads_with_norm_(net.parameters(), 1.0, torch.ones(())))
    told = told_of(clip)
    if world.world_size == 1 or in_ddp:
        assert not told
    else:
        ((message, file),) = told
        assert "call optimizer.clip_grad_norm_ instead" in message and file == __file__
    assert not told_of(clip)
    optimizer.step()
