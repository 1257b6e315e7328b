"""gradient_dtype: what p.grad is and micro-batches are added up in."""

import copy

import pytest
import torch
from cases.optim import built, keywords, make_parameters
from helpers import assert_bytes_equal
from torch import nn

import zerofp4
from zerofp4 import NVFP4Tensor
from zerofp4.optim import Communication, ZeroFP4Optimizer

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype"
)


@pytest.mark.parametrize(("dtype", "total"), [(None, 256.0), (torch.float32, 512.0)])
def test_512_micro_batches_of_1(device, dtype, total):
    """bfloat16 has no 257."""
    weight = nn.Parameter(zerofp4.quantize(torch.ones(16, 16).to(device, torch.bfloat16), columnwise=True))
    bias = nn.Parameter(torch.ones(16, device=device, dtype=torch.bfloat16))
    options = keywords(lr=1 / 512, gradient_dtype=dtype)
    optimizer = ZeroFP4Optimizer([weight, bias], torch.optim.SGD, **options)
    x = torch.ones(1, 16, device=device, dtype=torch.bfloat16)
    for _ in range(512):
        nn.functional.linear(x, weight, bias).sum().backward()
    for p in (weight, bias):
        assert p.grad.dtype == (dtype or torch.bfloat16) and p.grad.eq(total).all()
    optimizer.step()
    expected = torch.full((16,), 1 - total / 512, device=device)
    assert_bytes_equal(optimizer.gathered_masters()[1], expected, "master")


def test_a_copy_of_a_weight_has_its_gradient(device):
    parameters, _ = built(device, lr=0.1, gradient_dtype=torch.float32)
    weight = next(p for p in parameters if isinstance(p, NVFP4Tensor) and p.dtype == torch.bfloat16)
    weight.grad = torch.ones_like(weight, dtype=torch.float32)
    copied = copy.deepcopy(weight)
    assert copied.grad is not weight.grad
    assert_bytes_equal(copied.grad, weight.grad, "gradient")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, "float32", True])
def test_a_dtype_that_cannot_be_meant_or_comes_too_late(device, dtype):
    parameters = make_parameters(device)
    parameters[1].grad = torch.zeros_like(parameters[1])
    for given, message in [
        (dtype, r"gradient_dtype must be one of"),
        (torch.float32, r"\[1\] has a gradient of torch\.bfloat16 by now"),
    ]:
        with pytest.raises(ValueError, match=message):
            ZeroFP4Optimizer(parameters, communication=Communication(gradient_dtype=given))
        assert all(p.grad_dtype == p.dtype for p in parameters)


def test_a_torch_that_has_no_such_gradients(device, monkeypatch):
    monkeypatch.setattr("zerofp4.optim.build.HAS_GRAD_DTYPE", False)
    with pytest.raises(ValueError, match=r"gradient_dtype=torch.float32 .* which torch .* does not make"):
        built(device, gradient_dtype=torch.float32)
