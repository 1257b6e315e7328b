"""ZeroFP4Optimizer in a world of one, whose update reads gradients where a backward pass left them."""

import copy
import math
import weakref

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
    turn_gradients,
)
from helpers import assert_bytes_equal, collect_garbage, needs_gpu

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


def build(device, cls=FusedAdamW, specifications=READ_THERE, **options):
    return built(device, cls, specifications=specifications, **DEFAULTS | options)


def have_slices(optimizer):
    return ["gradients" in vars(buffer) for buffer in optimizer._shards.buckets]


def assert_same_masters(one, other, what):
    assert_all_equal(one.gathered_masters(), other.gathered_masters(), f"{what}: master")


@pytest.mark.parametrize("wire", [None, torch.float32])
@pytest.mark.parametrize("specifications", [READ_THERE, SPECIFICATIONS])
def test_gradients_in_any_order_of_memory(device, specifications, wire):
    """p.grad stays as it is; what is missing is left alone."""
    parameters, optimizer = build(device, specifications=specifications, gradient_wire=wire)
    plain = Plain(parameters, FusedAdamW, **DEFAULTS)
    assert optimizer.describe()["in_buckets"] and optimizer.describe()["transport"] == "none"
    for step in range(4):
        gradients = make_gradients(parameters, step)
        gradients[step] = None
        set_gradients(parameters, gradients)
        plain.step()
        turn_gradients(parameters[step % 2 :: 2])
        before = [None if p.grad is None else (p.grad.data_ptr(), p.grad.clone()) for p in parameters]
        optimizer.step()
        check(optimizer, plain, f"step {step}:")
        for p, found in zip(parameters, before, strict=True):
            if found is not None:
                assert p.grad.data_ptr() == found[0] and p.grad.equal(found[1])
    assert specifications is SPECIFICATIONS or wire is not None or not any(have_slices(optimizer))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("classes", [(FusedAdamW, NotPlain), (torch.optim.AdamW,) * 2])
def test_clipped_where_they_are_and_in_slices(device, classes, norm_type):
    """Not at all, once and twice: the same norms and bytes, with gradients in any order of memory."""
    wires = None, torch.float32  # the latter copies what is bfloat16
    models = [build(device, cls, gradient_wire=wire) for cls, wire in zip(classes, wires, strict=True)]
    for step in range(5):
        norms = []
        for parameters, optimizer in models:
            set_gradients(parameters, make_gradients(parameters, step))
            if optimizer is models[0][1]:
                turn_gradients(parameters[step % 2 :: 2])
            if step == 1:
                parameters[2].grad[0, 0] = math.nan
            clips = (0.5, 0.25)[: step % 3]
            norms.append([optimizer.clip_grad_norm_(most, norm_type).item() for most in clips])
            optimizer.step()
            assert (optimizer.found_inf.item() != 0) == (step == 1)
        assert norms[0] == pytest.approx(norms[1], rel=0 if norm_type == 2.0 else 1e-6, nan_ok=True)
        if norm_type == 2.0:
            assert_same_masters(models[0][1], models[1][1], f"step {step}")
    assert classes[0] is not FusedAdamW or not any(have_slices(models[0][1]))


def test_a_load_between_clipping_and_a_step(device):
    """The step takes gradients anew, as they are: a load forgets that they were clipped."""
    (_, optimizer), (_, other) = models = [build(device) for _ in range(2)]
    for step in range(2):
        for ps, one in models:
            set_gradients(ps, make_gradients(ps, step))
            if step == 0:
                one.step()
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.clip_grad_norm_(0.5)
    optimizer.load_state_dict(state)
    optimizer.step()
    other.step()
    assert_same_masters(optimizer, other, "after the load")


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

    def step_of(one):
        norm = one.clip_grad_norm_(0.5) if clips else None
        one.step()
        return norm

    (parameters, optimizer), (others, other) = models
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for ps, one in models:
            set_gradients(ps, make_gradients(ps, 0))
            if turned:
                turn_gradients(ps[1::2])
            step_of(one)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = step_of(optimizer)
    for step in range(1, 5):
        gradients = make_gradients(others, step)
        if step == 2:
            gradients[3][0, 0] = math.nan
        for p, q, gradient in zip(parameters, others, gradients, strict=True):
            p.grad.copy_(gradient)
            q.grad = p.grad.clone()
        expected = step_of(other)
        graph.replay()
        if clips:
            assert_bytes_equal(norm, expected, f"step {step}: norm")
        assert (optimizer.found_inf.item() != 0) == (step == 2)
        assert optimizer.first_nonfinite() == ("param_groups[0]['params'][3]" if step == 2 else None)
        assert_same_masters(optimizer, other, f"step {step}")
        assert_weights_follow(parameters, optimizer.gathered_masters())
    assert optimizer.skipped_steps == 1
