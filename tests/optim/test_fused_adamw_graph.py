"""FusedAdamW in CUDA graphs and on several streams."""

import copy
import gc
import weakref

import pytest
import torch
from cast_cases import make
from fused_cases import OPTIONS, Expected, set_gradient
from helpers import assert_bytes_equal

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

    def make_gradients(scale):
        for p in masters:
            p.grad = source[: p.numel()] * scale

    def eager(scale):
        make_gradients(scale)
        expected.step()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for scale in (1, 2):
            eager(scale)
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        make_gradients(3)
        optimizer.step()
    captured = [p.grad for p in masters]
    for replay in range(4):
        source.normal_()
        if tensor_lr:
            lr.mul_(0.5)
        for p, gradient in zip(masters, captured, strict=True):
            gradient.copy_(source[: p.numel()] * 3)
            p.grad = gradient
        expected.step()
        graph.replay()
        expected.check(f"replay {replay}:")
        if replay == 1:
            optimizer.zero_grad()
            eager(0.5)
            expected.check("eager step:")


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


def test_steps_on_several_streams(gpu):
    p = torch.randn(1 << 20, device=gpu)
    optimizer = FusedAdamW([p], **OPTIONS)
    expected = Expected(optimizer)
    stream = torch.cuda.Stream()
    for step in range(6):
        p.grad = torch.randn_like(p)
        expected.step()
        if step % 2:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                optimizer.step()
            torch.cuda.current_stream().wait_stream(stream)
        else:
            optimizer.step()
        expected.check(f"step {step}:")


@pytest.mark.parametrize("offer", ["amaxes", "parts"])
def test_what_a_graph_uses_outlives_an_offer(device, offer, monkeypatch):
    """A replay reads descriptors that the optimizer itself needs no more."""
    weights, masters, starts = make(device)
    optimizer = FusedAdamW(masters, **OPTIONS, capturable=True)
    for master in masters:
        master.grad = torch.ones_like(master)
    optimizer.step()
    with monkeypatch.context() as context:
        context.setattr(ops, "is_capturing", lambda device: True)
        optimizer.step()
    stage, plan = weakref.ref(optimizer._parts[0].stage), zerofp4.CastPlan(weights, masters, starts)
    for _ in range(2):
        if offer == "amaxes":
            optimizer.offer_amaxes(plan)
        else:
            optimizer.offer_parts([(masters, plan)])
        optimizer.step()
        gc.collect()
        assert stage() is not None


def test_a_replay_after_the_plan_was_refreshed(gpu):
    """Memory that is freed meanwhile is given to others, which write to it."""
    weights, masters, starts = make(gpu)
    optimizer = FusedAdamW(masters, **OPTIONS, capturable=True)
    plan = zerofp4.CastPlan(weights, masters, starts)
    optimizer.offer_amaxes(plan)
    for master in masters:
        master.grad = torch.randn_like(master)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    plan.refresh()
    optimizer.offer_amaxes(plan)
    eager = copy.deepcopy([[m, *optimizer.state[m].values()] for m in masters])
    optimizer.step()
    expected = [[m, *optimizer.state[m].values()] for m in masters]
    wanted = [[t.clone() for t in tensors] for tensors in expected]
    for tensors, before in zip(expected, eager, strict=True):
        for t, b in zip(tensors, before, strict=True):
            t.copy_(b)
    junk = [torch.full((256,), 0xAB, dtype=torch.uint8, device=gpu) for _ in range(4096)]
    graph.replay()
    for i, (tensors, those) in enumerate(zip(expected, wanted, strict=True)):
        for t, w in zip(tensors, those, strict=True):
            assert_bytes_equal(t, w, f"master {i}")
    assert len(junk) == 4096
