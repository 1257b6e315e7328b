"""FusedAdamW in CUDA graphs and on several streams."""

import pytest
import torch
from fused_cases import OPTIONS, Expected, set_gradient

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
