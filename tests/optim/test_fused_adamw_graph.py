"""FusedAdamW in CUDA graphs; test_stragglers has it on several streams, and in graphs with casts."""

import weakref
from unittest import mock

import pytest
import torch
from cases.cast import make
from distributed.optim.fused_cases import OPTIONS, Expected, set_gradient
from helpers import collect_garbage

import zerofp4
from zerofp4 import ops
from zerofp4.optim import FusedAdamW


@pytest.fixture
def gpu(device):
    if device.type != "cuda":
        pytest.skip("CUDA graphs are captured on a GPU")
    return device


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_replays_of_a_cuda_graph(gpu, tensor_lr):
    """The gradients are made inside the graph, at other addresses than in the step before the capture; an
    eager step between replays has others still.
    """
    masters = [torch.randn(n, device=gpu) for n in (5, 4096, 700)]
    lr = torch.tensor(0.01, device=gpu) if tensor_lr else 0.01
    optimizer = FusedAdamW(masters, **OPTIONS | {"lr": lr}, capturable=True)
    expected = Expected(optimizer)
    source = torch.randn(4096, device=gpu)

    def scaled(scale, _, p):
        return source[: p.numel()] * scale

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected.compare_steps((1, 2), scaled)
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for p in masters:
            p.grad = scaled(3, 0, p)
        optimizer.step()
    captured = [p.grad for p in masters]
    for replay in range(4):
        source.normal_()
        if tensor_lr:
            lr.mul_(0.5)
        for p, gradient in zip(masters, captured, strict=True):
            p.grad = gradient.copy_(scaled(3, 0, p))
        expected.step()
        graph.replay()
        expected.check(f"replay {replay}:")
        if replay == 1:
            optimizer.zero_grad()
            expected.compare_steps((0.5,), scaled)


def test_capture_needs_capturable_and_a_step_before(gpu):
    def capture(optimizer, message):
        with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match=message):
            optimizer.step()

    p = torch.randn(64, device=gpu)
    p.grad = torch.ones_like(p)
    optimizer = FusedAdamW([p], capturable=True)
    capture(optimizer, r"the first step\(\) with these parameters and gradient dtypes cannot be captured")
    assert not optimizer.state
    optimizer.step()
    set_gradient(p, torch.ones_like(p).bfloat16())
    capture(optimizer, r"the first step\(\) with these parameters and gradient dtypes cannot be captured")
    optimizer.step()
    optimizer.param_groups[0]["capturable"] = False
    capture(optimizer, r"param_groups\[0\]\['capturable'\] must be True")


def test_what_a_graph_uses_outlives_an_offer(device):
    """A replay reads descriptors that the optimizer itself needs no more."""
    weights, masters, starts = make(device)
    optimizer, plan = FusedAdamW(masters, capturable=True), zerofp4.CastPlan(weights, masters, starts)
    optimizer.step()
    with mock.patch.object(ops, "is_capturing", lambda device: True):
        optimizer.step()
    stage = weakref.ref(optimizer._parts[0].stages[False])
    for _ in range(2):
        optimizer.offer_amaxes(plan)
        optimizer.step()
        optimizer.offer_parts([(masters, plan)])
        optimizer.step()
        collect_garbage()
        assert stage() is not None


def test_a_replay_after_the_plan_was_refreshed(gpu):
    """Memory that is freed meanwhile is given to others, which write to it."""
    weights, masters, starts = make(gpu)
    optimizer = FusedAdamW(masters, **OPTIONS, capturable=True)
    plan = zerofp4.CastPlan(weights, masters, starts)
    optimizer.offer_amaxes(plan)
    expected = Expected(optimizer)
    expected.compare_steps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    plan.refresh()
    optimizer.offer_amaxes(plan)
    expected.step()
    optimizer.step()
    junk = [torch.full((256,), 0xAB, dtype=torch.uint8, device=gpu) for _ in range(4096)]
    expected.step()
    graph.replay()
    expected.check("replay:")
    assert len(junk) == 4096
