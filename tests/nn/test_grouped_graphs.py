"""GroupedLinear in CUDA graphs: more experts than a kernel takes in its arguments."""

import pytest
import torch
from helpers import assert_bytes_equal, needs_gpu
from tensor_helpers import values

from zerofp4.gemm import grouped
from zerofp4.nn import GroupedLinear, NVFP4Recipe, autocast

EXPERTS, ROWS = 40, 3


@needs_gpu
@pytest.mark.parametrize("primary", [False, True])
def test_a_captured_call_reads_what_a_later_step_has_left(primary):
    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device)[0] not in grouped.CAPABILITIES:
        pytest.skip("grouped_mm is not one kernel on this GPU")
    torch.manual_seed(0)
    options = {"bias": False, "device": device, "dtype": torch.bfloat16, "primary_weights": primary}
    module = GroupedLinear(EXPERTS, 64, 48, **options)
    parameters = list(module.parameters())
    x, gradient = values(EXPERTS * ROWS, 64, device=device), values(EXPERTS * ROWS, 48, device=device, seed=1)
    x.requires_grad_()
    splits = torch.full((EXPERTS,), ROWS, device=device)

    def call(first):
        y = module(x, splits, first)
        return [y, *torch.autograd.grad(y, [x, *parameters], gradient)]

    with autocast(NVFP4Recipe(stochastic_rounding=False)):
        call(True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call(False)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(False)
        with torch.no_grad():
            for parameter in parameters:
                parameter.copy_(values(*parameter.shape, device=device, seed=2))
            x.copy_(values(*x.shape, device=device, seed=3))
        expected = [each.detach().clone() for each in call(True)]
        graph.replay()
    for index, (mine, other) in enumerate(zip(captured, expected, strict=True)):
        assert_bytes_equal(mine.detach(), other, f"result {index}")
