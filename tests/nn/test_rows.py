"""Models whose weights are in blocks of 1x16."""

from __future__ import annotations

import pytest
import torch
from cases.layers import Conv1D, step
from helpers import assert_all_equal, assert_bytes_equal
from torch import nn

import zerofp4
from zerofp4 import reference
from zerofp4.nn import NVFP4Recipe, autocast, quantizers

RECIPE = NVFP4Recipe(weight_block=(1, 16), backward="dequantized")


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 32, 32))


def mlp(device, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 50)).to(device, dtype)


def values(rows):
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))


def test_report_and_bytes(device):
    model = nn.ModuleDict({"linear": nn.Linear(50, 34), "conv": Conv1D(32, 64), "experts": Experts()})
    model.to(device)
    before = model["linear"].weight.detach().clone()
    report = zerofp4.convert_model(model, lambda module, name: True, block=(1, 16))
    weight = model["linear"].weight
    assert report.converted == ["linear", "experts.weight"]
    assert model["experts"].weight.amax.shape == model["experts"].weight.shape[:1]
    assert weight.block == (1, 16) and weight.columnwise_data is None
    assert report.skipped == {
        "conv.weight": "blocks of 1x16 lie along the inputs of a layer, and its weight is [inputs, outputs]",
    }
    expected = reference.quantize(before, 1)
    assert_bytes_equal(weight.rowwise_data, expected.rowwise_data, "codes")
    assert_bytes_equal(weight.rowwise_scale, expected.rowwise_scale, "scale")
    assert torch.equal(weight.get_high_precision_init_val(), before.cpu())
    assert sum(b.nbytes for _, b in weight.record.buffers()) == 34 * 25 + 34 * 4 + 4


def test_groups_are_those_of_a_layer_each(device):
    torch.manual_seed(0)
    stack = zerofp4.nn.GroupedLinear(3, 64, 32, bias=False, device=device, dtype=torch.bfloat16)
    alone = [nn.Linear(64, 32, bias=False, device=device, dtype=torch.bfloat16) for _ in range(3)]
    for layer, weight in zip(alone, stack.weight.unbind(), strict=True):
        layer.weight.data.copy_(weight)
    model = nn.ModuleList([stack, *alone])
    report = zerofp4.convert_model(model, layers=True, block=(1, 16))
    assert report.converted == ["0", "1", "2", "3"] and stack.weight.block == (1, 16)
    sizes, x = [5, 0, 11], values(16).to(device, torch.bfloat16)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with zerofp4.nn.autocast(RECIPE):
        y = stack(mine, sizes)
        expected = torch.cat([layer(part) for layer, part in zip(alone, theirs.split(sizes), strict=True)])
    assert_bytes_equal(y, expected, "outputs")
    for each in (y, expected):
        each.float().square().sum().backward()
    assert_bytes_equal(mine.grad, theirs.grad, "gradient of x")
    for e, layer in enumerate(alone):
        gradient, own = stack.weight.grad[e], layer.weight.grad
        assert_bytes_equal(gradient, torch.zeros_like(gradient) if own is None else own, f"weight {e}")


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_layers_by_a_recipe(device, backend):
    """As those with high-precision weights, which the same recipe quantizes."""
    converted, plain = mlp(device), mlp(device)
    zerofp4.convert_model(converted, layers=True, block=(1, 16))
    for i in (0, 2):
        made = zerofp4.nn.Linear(plain[i].in_features, plain[i].out_features, device=device)
        plain[i] = made.to(torch.bfloat16)
    plain.load_state_dict(mlp(device).state_dict())
    x = values(32).to(device, torch.bfloat16)
    models = [converted, plain]
    if backend is not None:
        models = [torch.compile(model, backend=backend) for model in models]
    found, expected = (step(model, model, RECIPE, x) for model in models)
    assert_all_equal(found, expected)


@pytest.mark.parametrize("choice", [None, zerofp4.FourOverSix()])
def test_a_quantized_backward_pass_multiplies_the_rows(device, choice):
    """In exact products, which need no blocks along the contraction."""
    layer = nn.Sequential(nn.Linear(64, 96, bias=False)).to(device)
    zerofp4.convert_model(layer, layers=True, block=(1, 16), four_over_six=choice)
    weight, x = layer[0].weight, values(32).to(device).requires_grad_()
    grad = torch.randn(32, 96, generator=torch.Generator().manual_seed(3)).to(device)
    with autocast(NVFP4Recipe(weight_block=(1, 16), stochastic_rounding=False, backend="exact")):
        layer(x).backward(grad)
    expected = zerofp4.quantize(grad, block=(1, 16)).dequantize().double() @ weight.dequantize().double()
    torch.testing.assert_close(x.grad, expected.float(), rtol=1e-5, atol=1e-5)  # sums of another order


@pytest.mark.parametrize("columnwise", [True, False])
def test_exact_products_read_no_columns(device, monkeypatch, columnwise):
    """Of tiles: neither those that a weight has, nor ones that are made for the product."""
    models = [mlp(device), mlp(device)]
    for model, keeps in zip(models, (True, columnwise), strict=True):
        zerofp4.convert_model(model, layers=True, columnwise=keeps)
    x = values(32).to(device, torch.bfloat16)
    recipe = NVFP4Recipe(backend="exact", stochastic_rounding=False)
    expected = step(models[0], models[0], recipe, x)
    if columnwise:
        for i in (0, 2):
            models[1][i].weight.columnwise_data.fill_(0x77)
    monkeypatch.setattr(quantizers.ops, "derived_side", None)
    found = step(models[1], models[1], recipe, x)
    assert_all_equal(found, expected)


def test_a_quantized_backward_pass_is_refused_on_fp4_tensor_cores(device, monkeypatch, request):
    model = mlp(device)
    zerofp4.convert_model(model, layers=True, block=(1, 16))
    x = values(32).to(device, torch.bfloat16)
    with autocast(NVFP4Recipe()), pytest.raises(ValueError, match=r"NVFP4Recipe\(weight_block=\(1, 16\)\)"):
        model(x)
    monkeypatch.setattr(quantizers, "chosen_backend", lambda device, backend: "native")
    quantizers.quantizers_of.cache_clear()
    request.addfinalizer(quantizers.quantizers_of.cache_clear)
    with (
        autocast(NVFP4Recipe(weight_block=(1, 16))),
        pytest.raises(ValueError, match="has no columns for a quantized backward pass on FP4 tensor cores"),
    ):
        model(x)


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_four_over_six(device, block):
    """The bytes of quantize; products take its values."""
    choice = zerofp4.FourOverSix()
    model, plain = mlp(device, torch.float32), mlp(device, torch.float32)
    before = plain[0].weight.detach()
    zerofp4.convert_model(model, block=block, four_over_six=choice)
    weight = model[0].weight
    expected = reference.quantize(before, block[0], four_over_six=choice)
    assert weight.four_over_six == choice
    assert_bytes_equal(weight.rowwise_scale, expected.rowwise_scale, "scale")
    plain.load_state_dict(model.state_dict())
    x = values(8).to(device)
    assert_bytes_equal(model(x).detach(), plain(x).detach(), "outputs")


def test_what_convert_model_refuses():
    model = mlp("cpu")
    for options, message in (
        ({"block": (1, 16), "columnwise": True}, r"columnwise=True needs block \(16, 16\)"),
        ({"block": (1, 32)}, r"block must be \(16, 16\) or \(1, 16\), got \(1, 32\)"),
    ):
        with pytest.raises(ValueError, match=message):
            zerofp4.convert_model(model, **options)
    assert not any(isinstance(p, zerofp4.NVFP4Tensor) for p in model.parameters())
