"""Layers in CUDA graphs that were captured with is_first_microbatch=False."""

import pytest
import torch
from helpers import assert_bytes_equal, needs_gpu
from tensor_helpers import values

from zerofp4.gemm import grouped
from zerofp4.nn import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, NVFP4Recipe, autocast
from zerofp4.optim import ZeroFP4Optimizer

ROWS, FEATURES = 120, 64
EXPERTS = 40  # more than a kernel takes in its arguments
LAYERS = {
    "Linear": lambda **options: Linear(FEATURES, 48, **options),
    "LayerNormLinear": lambda **options: LayerNormLinear(FEATURES, 48, **options),
    "LayerNormMLP": lambda **options: LayerNormMLP(FEATURES, 48, activation="swiglu", **options),
    "GroupedLinear": lambda **options: GroupedLinear(EXPERTS, FEATURES, 48, **options),
}


def captured(call):
    """The graph of a call, and the results that it writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


@needs_gpu
@pytest.mark.parametrize("primary", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_captured_call_reads_what_a_step_of_the_optimizer_has_left(name, primary):
    device, splits = torch.device("cuda", 0), ()
    if name == "GroupedLinear":
        if torch.cuda.get_device_capability(device)[0] not in grouped.CAPABILITIES:
            pytest.skip("grouped_mm is not one kernel on this GPU")
        splits = (torch.full((EXPERTS,), ROWS // EXPERTS, device=device),)
    torch.manual_seed(0)
    module = LAYERS[name](device=device, dtype=torch.bfloat16, primary_weights=primary)
    parameters = list(module.parameters())
    optimizer = ZeroFP4Optimizer(parameters, torch.optim.SGD, lr=1.0)
    x = values(ROWS, FEATURES, device=device).requires_grad_()

    def call(first):
        y = module(x, *splits, first)
        return [y, *torch.autograd.grad(y, [x, *parameters], torch.ones_like(y))]

    with autocast(NVFP4Recipe(stochastic_rounding=False)):
        before = [each.detach().clone() for each in call(True)]
        graph, results = captured(lambda: call(False))
        for parameter, gradient in zip(parameters, before[2:], strict=True):
            parameter.grad = gradient
        optimizer.step()
        with torch.no_grad():
            x.copy_(values(ROWS, FEATURES, device=device, seed=3))
        expected = [each.detach().clone() for each in call(True)]
        graph.replay()
    assert not torch.equal(expected[0], before[0])
    for index, (mine, other) in enumerate(zip(results, expected, strict=True)):
        assert_bytes_equal(mine.detach(), other, f"result {index}")
