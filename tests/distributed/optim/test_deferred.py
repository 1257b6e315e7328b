"""Agreements that no host waits for: the outcome is read in the first collective call of the next step.

With NCCL it is so by itself; here any backend does as it is told.
"""

import contextlib
import copy
import math
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases.optim import assert_all_equal, set_gradients

from distributed.optim.cases import built, check_weights, gradients_of, model_bytes, whole_state
from distributed.run import on_ranks
from zerofp4.engine import GradientMemory
from zerofp4.optim import FusedAdamW


def build(world, defers=True, **options):
    parameters, optimizer = built(world, FusedAdamW, lr=0.02, weight_decay=0.1, **options)
    optimizer._agreement.defers = defers
    return parameters, optimizer


def take(world, model, step, clips=False, bad=None):
    parameters, optimizer = model
    gradients = gradients_of(world, parameters, step)
    if bad is not None and world.rank == 1:
        gradients[bad] = torch.full_like(parameters[bad], math.nan, dtype=parameters[bad].dtype)
    set_gradients(parameters, gradients)
    if clips:
        optimizer.clip_grad_norm_(0.003)
    optimizer.step()


def everything(model):
    parameters, optimizer = model
    return [tensor.clone() for tensor in (*whole_state(parameters, optimizer), *model_bytes(parameters))]


@on_ranks(2, 3)
@pytest.mark.parametrize("clips", [False, True])
def test_steps_have_the_bytes_of_those_that_wait(world, clips):
    """With other gradients missing on each rank in each step, and a step with a NaN."""
    deferred, waits = build(world), build(world, defers=False)
    for step in range(6):
        bad = 3 if step == 3 else None
        for model in (deferred, waits):
            take(world, model, step, clips, bad)
        assert deferred[1].found_inf.item() == waits[1].found_inf.item() == (bad is not None)
        assert deferred[1].first_nonfinite() == waits[1].first_nonfinite()
        assert_all_equal(everything(deferred), everything(waits), f"step {step}: tensor")
    assert deferred[1].skipped_steps == waits[1].skipped_steps == 1
    check_weights(*deferred)


@on_ranks(2, nightly=[3])
@pytest.mark.parametrize(
    ("max_norm", "norm_type"),
    [(math.inf, 2), (sys.float_info.max, 2), (0, 2), (0.003, math.inf), (math.inf, math.inf), (0.003, 1)],
)
def test_no_norm_keeps_ranks_from_a_step(world, max_norm, norm_type):
    """clip_grad_norm_(math.inf) is how people log the norm: it changes nothing about the step."""
    deferred, waits = build(world), build(world, defers=False)
    before = everything(deferred)
    for step in range(2):
        norms = []
        for parameters, optimizer in (deferred, waits):
            set_gradients(parameters, gradients_of(world, parameters, step))
            norms.append(optimizer.clip_grad_norm_(max_norm, norm_type))
            optimizer.step()
        assert norms[0].equal(norms[1]) and norms[0] > 0
    assert deferred[1].found_inf.item() == 0
    deferred[1].check()
    after = everything(deferred)
    assert_all_equal(after, everything(waits), "tensor")
    assert not all(map(torch.equal, after, before))


@on_ranks(2)
def test_the_backend_for_the_device_of_the_parameters_decides(world):
    """Of a group that has several, as torch recommends, and of one that was given none."""
    on_gpu = world.device.type == "cuda"
    for backend in ("cpu:gloo,cuda:nccl" if on_gpu else "cpu:gloo", None):
        group = dist.new_group(backend=backend)
        model = built(world, FusedAdamW, lr=0.02, weight_decay=0.1, process_group=group)
        reason = model[1].describe()["host_waits"]
        assert reason is None if on_gpu else "backend for cpu is gloo" in reason
        take(world, model, 0, clips=True)
        model[1].check()
        check_weights(*model)


def fail(message):
    raise RuntimeError(message)


@on_ranks(2, nightly=[3], time_limit=60)
@pytest.mark.parametrize("calls", ["step", "clip", "clip, then step", "step behind clip"])
@pytest.mark.parametrize("loads", [False, True])
def test_the_others_hear_of_an_error_in_the_next_step(world, calls, loads):
    """Nothing has changed, check() raises it, too, and the steps behind it are those without it. A load in
    between forgets what nobody has heard.
    """
    model, plain = build(world), build(world, defers=False)
    for step in range(2):
        take(world, model, step)
        take(world, plain, step)
    before = everything(model)
    parameters, optimizer = model
    set_gradients(parameters, gradients_of(world, parameters, 2))
    fails = world.rank == 1
    if calls == "step behind clip":
        optimizer.clip_grad_norm_(1.0)
    if fails:
        parameters[1].data = parameters[1].data.clone()
    if calls.startswith("clip"):
        assert optimizer.clip_grad_norm_(1.0).isnan()  # on every rank: none takes it
    if calls != "clip":
        with pytest.raises(RuntimeError, match="has moved") if fails else contextlib.nullcontext():
            optimizer.step()
    optimizer.refresh()
    assert_all_equal(everything(model), before, "tensor")
    optimizer.zero_grad()
    if loads:
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.check()
    else:
        set_gradients(parameters, gradients_of(world, parameters, 2))
        call = optimizer.step if calls == "step" else lambda: optimizer.clip_grad_norm_(1.0)
        told = "which no rank has taken: rank 1 found an error"
        for function in (optimizer.check, optimizer.check, call):
            own = fails and calls == "clip" and function is call  # which no step has raised
            with pytest.raises(RuntimeError, match="has moved" if own else told):
                function()
    for step in range(2, 4):
        take(world, model, step)
        take(world, plain, step)
    assert_all_equal(everything(model), everything(plain), "tensor")


@on_ranks(2, 3, time_limit=60)
@pytest.mark.parametrize("call", ["step", "clip"])
def test_a_rank_that_a_clip_broke_reduces_only_what_the_others_do(world, call):
    """They have reduced their gradients in that clip, and it has not: else each would wait for the other."""
    model = build(world, gradient_wire=torch.float16, transport="collective")
    parameters, optimizer = model
    saved = copy.deepcopy(optimizer.state_dict())
    set_gradients(parameters, gradients_of(world, parameters, 0))
    if world.rank == 1:
        refuse = mock.patch.object(GradientMemory, "take", lambda *_: fail("no memory today"))
        with refuse, pytest.raises(RuntimeError, match="no memory today"):
            optimizer.clip_grad_norm_(1.0)
    else:
        optimizer.clip_grad_norm_(1.0)
    if call == "clip":
        assert optimizer.clip_grad_norm_(1.0).isnan()
    broken = pytest.raises(RuntimeError, match="left in the middle")
    with broken if world.rank == 1 else contextlib.nullcontext():
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="which no rank has taken: rank 1 found an error"):
        optimizer.step()
    optimizer.load_state_dict(saved)
    take(world, model, 1)
    check_weights(*model)


@on_ranks(2)
def test_ranks_with_other_options_refuse_the_step(world):
    model = build(world)
    optimizer = model[1]
    take(world, model, 0)
    before = everything(model)
    optimizer.param_groups[0]["lr"] = 0.02 + world.rank
    take(world, model, 1)
    assert_all_equal(everything(model), before, "tensor")
    with pytest.raises(RuntimeError, match=r"same on every rank: rank 0 has .*'lr'\] 0.02, "):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.02
    take(world, model, 2)
    check_weights(*model)


@on_ranks(2)
def test_ranks_that_clip_at_other_norms_refuse_the_step(world):
    """The agreement of step() itself finds nothing wrong."""
    model = build(world)
    parameters, optimizer = model
    take(world, model, 0)
    before = everything(model)
    set_gradients(parameters, gradients_of(world, parameters, 1))
    optimizer.clip_grad_norm_(0.003 + world.rank)
    optimizer.step()
    assert_all_equal(everything(model), before, "tensor")
    with pytest.raises(RuntimeError, match=r"max_norm must be the same .* got from 0\.003 to 1\.003"):
        optimizer.step()
    take(world, model, 1, clips=True)
    check_weights(*model)
