"""ZeroFP4Optimizer over FusedAdamW in a world of one: it reads gradients where a backward pass left them, and
leaves the amaxes that publishing the weights needs.
"""

import copy
import math
import weakref
from unittest import mock

import pytest
import torch
from cases.optim import (
    SPECIFICATIONS,
    Plain,
    assert_all_equal,
    assert_weights_follow,
    built,
    check,
    make_gradients,
    set_gradients,
    take_step,
    turn_gradients,
)
from distributed.optim.fused_cases import Alone, stages_of_plans
from helpers import assert_bytes_equal, captured, collect_garbage, needs_gpu

from zerofp4.cast import CastPlan
from zerofp4.optim import FusedAdamW, adamw

DEFAULTS = {"lr": 0.01, "weight_decay": 0.1}
READ_THERE = [
    ((48, 64), torch.bfloat16, True),
    ((34, 48), torch.bfloat16, True),
    ((3, 16, 32), torch.bfloat16, True),
    ((5, 3), torch.bfloat16, False),
    ((7,), torch.float32, False),
]
"""Of which every bucket is one whose gradients FusedAdamW reads where they are."""


class NotPlain(FusedAdamW):
    """Not FusedAdamW itself: its step() is called, with gradients in FP32 slices."""


class Multiplied(FusedAdamW):
    """Writes to its masters after it has left their amaxes."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for master in self.param_groups[0]["params"]:
            master.mul_(3)
        return loss


def build(device, cls=FusedAdamW, specifications=READ_THERE, **options):
    return built(device, cls, specifications=specifications, **DEFAULTS | options)


@pytest.mark.parametrize("wire", [None, torch.float32])
@pytest.mark.parametrize("specifications", [READ_THERE, SPECIFICATIONS])
def test_gradients_in_any_order_of_memory(device, specifications, wire):
    """p.grad stays as it is; what is missing is left alone. Clipped once and twice, norms and bytes are those
    of gradients that were copied to slices.
    """
    parameters, optimizer = build(device, specifications=specifications, gradient_wire=wire)
    others, other = build(device, NotPlain, specifications, gradient_wire=torch.float32)
    plain = Plain(parameters, FusedAdamW, **DEFAULTS)
    assert optimizer.describe()["in_buckets"] and optimizer.describe()["transport"] == "none"
    for step in range(5):
        gradients = make_gradients(parameters, step)
        gradients[step] = None
        clips = (0.5, 0.25)[: max(step - 2, 0)] if specifications is READ_THERE else ()
        for some in (others, parameters):
            set_gradients(some, gradients)
        plain.take_gradients()
        turn_gradients(parameters[step % 2 :: 2])
        before = [None if p.grad is None else (p.grad.data_ptr(), p.grad.clone()) for p in parameters]
        norms = [[one.clip_grad_norm_(most) for most in clips] for one in (optimizer, other)]
        assert_all_equal(*norms, "norm")
        for one in (optimizer, other):
            one.step()
        assert_all_equal(optimizer.gathered_masters(), other.gathered_masters(), f"step {step}: master")
        if not clips:
            plain.step()
            check(optimizer, plain, f"step {step}:")
        for p, found in zip(parameters, before, strict=True):
            if found is not None:
                assert p.grad.data_ptr() == found[0] and p.grad.equal(found[1])
    if specifications is READ_THERE and wire is None:
        assert not any("gradients" in vars(bucket) for bucket in optimizer._shards.buckets)


@pytest.mark.parametrize(("optimizer_class", "passes"), [(FusedAdamW, 0), (Alone, 3), (Multiplied, 3)])
def test_amaxes_are_taken_once(device, optimizer_class, passes):
    """By the update, unless it keeps them to itself or masters were written after it."""
    parameters, optimizer = built(device, optimizer_class, **DEFAULTS)
    with stages_of_plans() as stages:
        for step in range(3):
            take_step(parameters, optimizer, step)
            assert_weights_follow(parameters, optimizer.gathered_masters())
    assert stages.count("begin_amax") == passes
    assert optimizer.found_inf.item() == 0


def test_loaded_masters_are_not_cast_with_amaxes_left_before(device):
    """An error after the update leaves amaxes which belong to masters that are then loaded over."""
    parameters, optimizer = built(device, FusedAdamW, **DEFAULTS)
    take_step(parameters, optimizer, 0)
    state, masters = copy.deepcopy(optimizer.state_dict()), optimizer.gathered_masters()
    set_gradients(parameters, [10 * gradient for gradient in make_gradients(parameters, 1)])
    with mock.patch.object(CastPlan, "start_step", side_effect=RuntimeError("no step today")):
        with pytest.raises(RuntimeError, match="no step today"):
            optimizer.step()
    optimizer.load_state_dict(state)
    assert_all_equal(optimizer.gathered_masters(), masters, "master")
    assert_weights_follow(parameters, masters)


def test_a_load_between_clipping_and_a_step(device):
    """The step takes gradients anew, as they are: a load forgets that they were clipped."""
    models = [build(device) for _ in range(2)]
    for parameters, one in models:
        take_step(parameters, one, 0)
        set_gradients(parameters, make_gradients(parameters, 1))
    (_, optimizer), (_, other) = models
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.clip_grad_norm_(0.5)
    optimizer.load_state_dict(state)
    optimizer.step()
    other.step()
    assert_all_equal(optimizer.gathered_masters(), other.gathered_masters(), "master")


def test_gradients_that_were_not_used_are_not_kept(device, monkeypatch):
    """zero_grad() frees them, though the step failed in the middle."""
    parameters, optimizer = build(device)
    set_gradients(parameters, make_gradients(parameters, 0))
    monkeypatch.setattr(adamw.Part, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("no update")))
    kept = [weakref.ref(p.grad) for p in parameters]
    with pytest.raises(RuntimeError, match="no update"):
        optimizer.step()
    optimizer.zero_grad()
    collect_garbage()
    assert [ref() for ref in kept] == [None] * len(kept)


@needs_gpu
@pytest.mark.parametrize(
    ("specifications", "clips", "turned"),
    [(READ_THERE, True, True), (SPECIFICATIONS, False, True), (SPECIFICATIONS, False, False)],
)
def test_steps_in_a_cuda_graph(specifications, clips, turned):
    """Clipped or not, of gradients of which some must be copied, with a NaN in some replays."""
    device = torch.device("cuda")
    models = [build(device, specifications=specifications, capturable=True) for _ in range(2)]

    norms = {}

    def step_of(one):
        norms[one] = one.clip_grad_norm_(0.5) if clips else None
        one.step()

    (parameters, optimizer), (others, other) = models
    for ps, _ in models:
        set_gradients(ps, make_gradients(ps, 0))
        if turned:
            turn_gradients(ps[1::2])
    step_of(other)
    graph = captured(lambda: step_of(optimizer))
    for step in range(1, 5):
        gradients = make_gradients(others, step)
        if step == 2:
            gradients[3][0, 0] = math.nan
        for p, q, gradient in zip(parameters, others, gradients, strict=True):
            p.grad.copy_(gradient)
            q.grad = p.grad.clone()
        step_of(other)
        graph.replay()
        if clips:
            assert_bytes_equal(norms[optimizer], norms[other], f"step {step}: norm")
        assert (optimizer.found_inf.item() != 0) == (step == 2)
        assert optimizer.first_nonfinite() == ("param_groups[0]['params'][3]" if step == 2 else None)
        assert_all_equal(optimizer.gathered_masters(), other.gathered_masters(), f"step {step}: master")
        assert_weights_follow(parameters, optimizer.gathered_masters())
    assert optimizer.skipped_steps == 1
