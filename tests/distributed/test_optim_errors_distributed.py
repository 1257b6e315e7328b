"""What ranks of a ZeroFP4Optimizer do when they disagree, or when one of them finds an error."""

from __future__ import annotations

import copy
import math
from unittest import mock

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
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


@on_ranks(2, 3)
def test_a_state_dict_that_does_not_fit_one_rank_is_refused_by_all(world):
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters)
    states: list = [None] * world.world_size
    dist.all_gather_object(states, copy.deepcopy(optimizer.state_dict()))
    before = model_bytes(parameters)
    swapped = states[(world.rank + 1) % world.world_size] if world.rank < 2 else states[world.rank]
    message = r"rank 0: state_dict does not fit: saved by a rank with other elements: param_groups\[0\]"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(swapped)
    assert_all_equal(model_bytes(parameters), before, "weight")
    optimizer.step()


@on_ranks(2, 3, time_limit=30)
def test_an_error_of_one_rank_while_building_is_raised_by_all(world):
    last = world.world_size - 1
    parameters = parameters_of(world)
    count, bad = len(parameters), world.rank == last
    with pytest.raises(ValueError, match=f"rank {last}: Invalid learning rate: -1.0"):
        ZeroFP4Optimizer(parameters, lr=-1.0 if bad else 0.1)
    with pytest.raises(TypeError, match=f"rank {last}: .* must have one of the dtypes"):
        ZeroFP4Optimizer(
            [*parameters, nn.Parameter(torch.zeros(2, dtype=torch.float64))] if bad else parameters
        )
    with pytest.raises(ValueError, match=f"rank 0 has {count} parameters, rank {last} has {count - 1}"):
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


def raises_on_rank_1(world, kind, message):
    """What rank 1 raises when it alone finds an error; the others RuntimeError."""
    if world.rank == 1:
        return pytest.raises(kind, match=message)
    return pytest.raises(RuntimeError, match="rank 1 found an error, and no rank takes this step")


@on_ranks(2, 3, time_limit=30)
@pytest.mark.parametrize("optimizer_class", [FusedAdamW, torch.optim.AdamW])
def test_an_option_of_one_rank_that_is_not_finite(world, optimizer_class):
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters, optimizer_class, lr=0.1)
    set_gradients(parameters, make_gradients(parameters, 0))
    before = optimizer.gathered_masters()
    if world.rank == 1:
        optimizer.param_groups[0]["lr"] = math.inf
    with raises_on_rank_1(world, ValueError, r"param_groups\[0\]\['lr'\] must be finite, got inf"):
        optimizer.step()
    assert_all_equal(optimizer.gathered_masters(), before, "master")
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    check_weights(parameters, optimizer)


@on_ranks(2, time_limit=30)
def test_an_interrupt_of_all_ranks_breaks_the_optimizer(world):
    """As that of a terminal: between the updates of two classes."""
    parameters = parameters_of(world)
    sgd = {"params": parameters[4:], "optimizer_class": torch.optim.SGD, "lr": 0.1}
    optimizer = ZeroFP4Optimizer([{"params": parameters[:4]}, sgd])
    saved, before = copy.deepcopy(optimizer.state_dict()), optimizer.gathered_masters()

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = optimizer.inners.all[1].register_step_pre_hook(interrupt)
    set_gradients(parameters, make_gradients(parameters, 0))
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    handle.remove()
    assert "KeyboardInterrupt" in str(optimizer.broken)
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match=r"the optimizer is of no more use: step\(\) was left"):
            call()
    optimizer.load_state_dict(saved)
    assert_all_equal(optimizer.gathered_masters(), before, "master")
    set_gradients(parameters, make_gradients(parameters, 0))
    optimizer.step()
    check_weights(parameters, optimizer)


@on_ranks(2, time_limit=30)
def test_what_breaks_on_one_rank_the_others_hear_of(world):
    """In the vote of the next call: here the update was over, and the rank had done its part of the rest."""
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters, FusedAdamW)
    set_gradients(parameters, make_gradients(parameters, 0))
    if world.rank == 1:
        late = mock.patch.object(optimizer.inners, "pull_options", side_effect=KeyboardInterrupt)
        with late, pytest.raises(KeyboardInterrupt):
            optimizer.step()
    else:
        optimizer.step()
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        with raises_on_rank_1(world, RuntimeError, "the optimizer is of no more use"):
            call()
    assert (optimizer.broken is not None) == (world.rank == 1)


@on_ranks(2, time_limit=30)
def test_ranks_that_do_different_things_all_raise(world):
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters, torch.optim.SGD, lr=1.0)
    before = optimizer.gathered_masters()
    first = world.rank == 0

    def clip():
        return optimizer.clip_grad_norm_(1.0)

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
    for call in (optimizer.step, clip):
        with pytest.raises(RuntimeError, match="some ranks have gradients to reduce and others have reduced"):
            call()
    start(clipped=False)
    with pytest.raises(RuntimeError, match=r"some ranks called clip_grad_norm_ and others step\(\)"):
        (optimizer.step if first else clip)()
    with pytest.raises(RuntimeError, match=r"norm_type must be the same on every rank, got from 2\.0 to inf"):
        optimizer.clip_grad_norm_(1.0, 2.0 if first else float("inf"))
    with pytest.raises(RuntimeError, match=r"max_norm must be the same on every rank, got from 0\.5 to 1\.0"):
        optimizer.clip_grad_norm_(1.0 if first else 0.5)
    assert_all_equal(optimizer.gathered_masters(), before, "master")
    start()
    optimizer.step()
    check_weights(parameters, optimizer)


@on_ranks(2, time_limit=30)
def test_bad_arguments_of_clip_on_one_rank(world):
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters)
    for arguments, message in [
        ((1.0, "two"), "norm_type must be a number, positive, got 'two'"),
        ((1.0, 0.0), "norm_type must be positive, got 0.0"),
        ((None,), "max_norm must be a number, 0 or more, got None"),
        ((float("nan"),), "max_norm must be 0 or more, got nan"),
        ((-1.0,), "max_norm must be 0 or more, got -1.0"),
    ]:
        with raises_on_rank_1(world, ValueError, message):
            optimizer.clip_grad_norm_(*(arguments if world.rank == 1 else (1.0,)))
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()


@on_ranks(2, time_limit=30)
def test_what_one_rank_raises_before_a_step_ends_the_step_of_all(world):
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters)
    set_gradients(parameters, make_gradients(parameters, 0))
    before = optimizer.gathered_masters()

    def closure():
        if world.rank == 1:
            raise KeyError("no batch")
        return 3

    with raises_on_rank_1(world, KeyError, "no batch"):
        optimizer.step(closure)
    group = optimizer.param_groups[0]
    params = group["params"]
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        if world.rank == 1:
            del group["params"]
        with raises_on_rank_1(world, KeyError, "params"):
            call()
        group["params"] = params
    assert_all_equal(optimizer.gathered_masters(), before, "master")
    assert optimizer.step(lambda: 3) == 3
    check_weights(parameters, optimizer)


@on_ranks(2, time_limit=30)
def test_a_closure_that_clips(world):
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters)
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


@on_ranks(2, time_limit=30)
def test_a_state_that_one_rank_cannot_load_changes_no_rank(world):
    def shrink(state, _):
        state["state"][0]["momentum_buffer"] = torch.zeros(3)

    def sparse(state, _):
        state["state"][0]["master"] = torch.zeros(34, 48).to_sparse()

    def forget(state, _):
        state["state"][0]["momentum_buffer"] = None

    def stray(state, _):
        state["state"][99] = {}

    def move(state, parameters):
        parameters[1].data = parameters[1].data.clone()
        for entries in state["state"].values():
            del entries["master"]

    for optimizer_class, damage, message in [
        (torch.optim.SGD, shrink, r"rank 1: .*other shapes: .*\.momentum_buffer \(\(3,\), here \(34, 48\)\)"),
        (torch.optim.SGD, stray, r"rank 1: state_dict: state\[99\] is of no parameter"),
        (torch.optim.SGD, lambda state, _: state.update(state=None), "rank 1: .*state is a NoneType"),
        (torch.optim.SGD, sparse, "rank 1: .*no dense tensor .*master .* of layout torch.sparse_coo"),
        (torch.optim.SGD, forget, r"rank 1: .*missing: .*\.momentum_buffer"),
        (FailsOnRank1, lambda *_: None, "rank 1: state_dict cannot be loaded: KeyError: 'momentum'"),
        (torch.optim.SGD, move, r"rank 1: .*no master of .*\['params'\]\[1\] has moved since"),
    ]:
        parameters = parameters_of(world)
        optimizer = ZeroFP4Optimizer(parameters, optimizer_class, lr=0.5, momentum=0.9)
        set_gradients(parameters, make_gradients(parameters, 0))
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["lr"] = 7.0
        for entries in saved["state"].values():
            entries["master"].values.fill_(7)
        if world.rank == 1:
            damage(saved, parameters)
        inner = optimizer.inner
        state, groups, masters = inner.state, inner.param_groups, optimizer.gathered_masters()
        kept = copy.deepcopy(inner.state_dict())
        before = model_bytes(parameters)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)
        assert inner.state is state and inner.param_groups is groups
        assert optimizer.param_groups[0]["lr"] == groups[0]["lr"] == 0.5
        now = inner.state_dict()["state"]
        assert now.keys() == kept["state"].keys()
        for i, entries in kept["state"].items():
            assert_bytes_equal(now[i]["momentum_buffer"], entries["momentum_buffer"], f"state {i}")
        assert_all_equal(optimizer.gathered_masters(), masters, "master")
        assert_all_equal(model_bytes(parameters), before, "weight")
        if damage is not move:
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


@on_ranks(2, time_limit=30)
def test_storage_that_moved_on_one_rank_ends_the_step_of_all(world):
    """Before the update: masters, moments and weights are untouched, and go on after refresh()."""
    if world.device.type != "cpu":
        pytest.skip("torch does not move storages in place on a GPU")
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters, torch.optim.SGD, lr=0.5, momentum=0.9)
    for name, tensor in [
        (r"master_weights\[\d\]", lambda: optimizer.state[parameters[4]]["master"].values),
        ("found_inf", lambda: optimizer.found_inf),
        (r"\['params'\]\[3\]", lambda: parameters[3].detach()),
        (r"\['params'\]\[4\]: columnwise_scale", lambda: parameters[4].columnwise_scale),
    ]:
        set_gradients(parameters, make_gradients(parameters, 0))
        optimizer.step()
        before, weights = optimizer.gathered_masters(), [b.clone() for b in model_bytes(parameters)]
        state = copy.deepcopy(optimizer.inner.state_dict()["state"])
        if world.rank == 1:
            tensor().share_memory_()
        for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
            with raises_on_rank_1(world, RuntimeError, rf"{name}.* has moved since .* call refresh\(\)"):
                call()
        assert_all_equal(optimizer.gathered_masters(), before, "master")
        assert_all_equal(model_bytes(parameters), weights, "weight")
        for i, entries in optimizer.inner.state_dict()["state"].items():
            assert_bytes_equal(entries["momentum_buffer"], state[i]["momentum_buffer"], f"state {i}")
        if world.rank == 1:
            optimizer.refresh()
        optimizer.step()
        check_weights(parameters, optimizer)
