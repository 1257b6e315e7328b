"""Layers in CUDA graphs that were captured with is_first_microbatch=False."""

import pytest
import torch
from cases.gemm import skip_without_grouped_mm
from helpers import assert_all_equal, captured, needs_gpu
from tensor_helpers import values

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


@needs_gpu
@pytest.mark.parametrize("primary", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_captured_call_reads_what_a_step_of_the_optimizer_has_left(name, primary):
    device, splits = torch.device("cuda", 0), ()
    if name == "GroupedLinear":
        skip_without_grouped_mm(device)
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
        results = []
        graph = captured(lambda: results.append(call(False)))
        for parameter, gradient in zip(parameters, before[2:], strict=True):
            parameter.grad = gradient
        optimizer.step()
        with torch.no_grad():
            x.copy_(values(ROWS, FEATURES, device=device, seed=3))
        expected = [each.detach().clone() for each in call(True)]
        graph.replay()
    assert not torch.equal(expected[0], before[0])
    assert_all_equal([each.detach() for each in results[-1]], expected)
