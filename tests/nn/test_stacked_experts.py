"""Experts in one parameter [E, N, K]: GroupedLinear, and convert_model of such parameters."""

import copy

import pytest
import torch
from cases.layers import RECIPES
from cases.ops import assert_record_equals
from helpers import assert_bytes_equal
from tensor_helpers import values
from torch import nn
from torch.nn import functional as F

import zerofp4
from zerofp4 import reference
from zerofp4.nn import GroupedLinear, Linear, NVFP4Recipe, autocast
from zerofp4.optim import ZeroFP4Optimizer

SPLITS = [[16, 0, 17, 3], [0, 0, 36, 0], [9, 9, 9, 9]]
NAMES = ["nvfp4", "nvfp4, dequantized", "nvfp4, weights 1x16", "nvfp4, four over six", "mxfp8"]


class Layers(nn.Module):
    """A layer for each group."""

    def __init__(self, count, *arguments, **options):
        super().__init__()
        self.experts = nn.ModuleList(Linear(*arguments, **options) for _ in range(count))

    def forward(self, x, splits, first=None):
        pieces = zip(self.experts, x.split(splits), strict=True)
        return torch.cat([layer(piece, first) for layer, piece in pieces])


def pair(device="cpu", **options):
    """A list of layers and a layer of groups, with the same values."""
    modules = []
    for kind in (Layers, GroupedLinear):
        torch.manual_seed(0)
        modules.append(kind(4, 64, 48, dtype=torch.bfloat16, **options).to(device))
    return modules


def parameters(module) -> list[list[torch.Tensor]]:
    """Weights and biases of the experts."""
    if isinstance(module, GroupedLinear):
        return [list(module.weight), list(module.bias)]
    return [[e.weight for e in module.experts], [e.bias for e in module.experts]]


def gradients(module) -> list[torch.Tensor]:
    if isinstance(module, GroupedLinear):
        return [module.weight.grad, module.bias.grad]
    return [torch.stack([p.grad for p in some]) for some in parameters(module)]


def train(module, splits, recipe, first=None, seed=7):
    module.zero_grad()
    device = next(module.parameters()).device
    x = values(36, 64, device=device).requires_grad_()
    with autocast(recipe):
        y = module(x, splits, first)
    torch.manual_seed(seed)
    y.backward(values(36, 48, device=device, seed=1))
    return [y.detach(), x.grad, *gradients(module)]


def assert_all_equal(results, expected):
    for index, both in enumerate(zip(results, expected, strict=True)):
        assert_bytes_equal(*both, f"result {index}")


def test_initial_values_are_those_of_layers():
    for mine, other in zip(*map(parameters, pair()), strict=True):
        for a, b in zip(mine, other, strict=True):
            assert_bytes_equal(a.detach(), b.detach(), "values")
    assert [tuple(p.shape) for p in pair()[1].parameters()] == [(4, 48, 64), (4, 48)]
    assert list(dict(pair(bias=False)[1].named_parameters())) == ["weight"]


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("primary", [False, True])
def test_the_bytes_of_a_list_of_layers(device, splits, name, primary):
    if primary and name not in ("nvfp4", "nvfp4, dequantized"):
        pytest.skip("a recipe for high-precision parameters")
    layers, stack = pair(device, primary_weights=primary)
    expected = train(layers, splits, RECIPES[name])
    for first in (None, True, False):
        assert_all_equal(train(stack, splits, RECIPES[name], first), expected)


def test_primary_weights_have_an_amax_for_each():
    layers, stack = pair(primary_weights=True)
    assert isinstance(stack.weight, zerofp4.NVFP4Tensor) and stack.weight.amax.shape == (4,)
    with torch.no_grad():
        layers.experts[1].weight.copy_(values(48, 64))
        stack.weight[1].copy_(values(48, 64))
    amaxes = torch.cat([e.weight.amax for e in layers.experts])
    assert len(set(amaxes.tolist())) > 1
    assert_bytes_equal(stack.weight.amax, amaxes, "amax")


def test_outside_autocast(device):
    for primary in (False, True):
        layers, stack = pair(device, primary_weights=primary)
        x = values(36, 64, device=device)
        layers(x, SPLITS[0]).sum().backward()
        stack(x, SPLITS[0]).sum().backward()
        assert_bytes_equal(stack(x, SPLITS[0]).detach(), layers(x, SPLITS[0]).detach(), "y")
        assert_all_equal(gradients(stack), gradients(layers))


def test_gradients_are_added_to_main_grad():
    recipe = NVFP4Recipe(stochastic_rounding=False)
    layers, stack = pair(fuse_wgrad_accumulation=True)
    for e, layer in enumerate(layers.experts):
        layer.weight.main_grad = torch.full((48, 64), float(e))
    stack.weight.main_grad = torch.arange(4.0).view(4, 1, 1).expand(4, 48, 64).contiguous()
    for module in (layers, stack):
        with autocast(recipe):
            module(values(36, 64), SPLITS[0]).backward(values(36, 48, seed=1))
    assert stack.weight.grad is None
    expected = torch.stack([layer.weight.main_grad for layer in layers.experts])
    assert_bytes_equal(stack.weight.main_grad, expected, "main_grad")
    stack.weight.grad_added_to_main_grad = False
    with autocast(recipe):
        stack(values(36, 64), SPLITS[0]).sum().backward()
    assert stack.weight.grad_added_to_main_grad is True and not stack.weight.grad.any()
    del stack.weight.main_grad
    with autocast(recipe), pytest.raises(RuntimeError, match=r"which is not there: make it .* shape"):
        stack(values(36, 64), SPLITS[0]).sum().backward()


def test_the_cache_of_a_step():
    stack, recipe = pair()[1], RECIPES["nvfp4"]
    x = values(36, 64)
    with autocast(recipe), torch.no_grad():
        with pytest.raises(RuntimeError, match="there is none"):
            stack(x, SPLITS[0], False)
        stack(x, SPLITS[0], True)
        buffer, filled = stack._weight_cache._tensors[0].rowwise_data, []
        codes, fill = buffer.clone(), stack._weight_cache._fill
        stack._weight_cache._fill = lambda *arguments: (filled.append(1), fill(*arguments))
        stack(x, SPLITS[0], False)
        assert not filled
        stack.weight[2].mul_(-3)  # written to in between
        y = stack(x, SPLITS[0], False)
        assert len(filled) == 1 and stack._weight_cache._tensors[0].rowwise_data is buffer
        assert_bytes_equal(y, stack(x, SPLITS[0]), "y")
    same = [torch.equal(a, b) for a, b in zip(buffer, codes, strict=True)]
    assert same == [True, True, False, True]
    assert copy.deepcopy(stack)._weight_cache._tensors is None


def test_a_weight_that_is_cast_into_before_backward():
    stack = pair(primary_weights=True)[1]
    with autocast(RECIPES["nvfp4"]):
        y = stack(values(36, 64).requires_grad_(), SPLITS[0])
    with torch.no_grad():
        stack.weight.copy_(torch.ones(4, 48, 64))
    with pytest.raises(RuntimeError, match="was written to between its forward and its backward"):
        y.sum().backward()


def test_state_dicts_and_bad_arguments():
    stack, other = pair(primary_weights=True)[1], pair()[1]
    other.weight.data.mul_(2)
    saved = copy.deepcopy(stack.state_dict())
    stack.load_state_dict(other.state_dict())
    assert_record_equals(stack.weight.record, reference.quantize_experts(other.weight.detach()), "loaded")
    stack.load_state_dict(saved)
    assert_bytes_equal(stack.weight.amax[2:3], saved["weight2"].amax, "amax")
    with pytest.raises(ValueError, match="m_splits must have 4 entries, got 1"):
        stack(values(36, 64), [36])
    with autocast(RECIPES["nvfp4"]), pytest.raises(ValueError, match="x must have 64 values"):
        stack(values(36, 62), [9] * 4)
    with pytest.raises(RuntimeError, match="which is on the meta device"):
        GroupedLinear(2, 16, 16, device="meta", primary_weights=True)


# convert_model


class Experts(nn.Module):
    """As model libraries write them: one parameter for all experts, indexed or multiplied in one batch."""

    def __init__(self, device="cpu", dtype=torch.bfloat16):
        super().__init__()
        options = {"device": device, "dtype": dtype}
        self.up = nn.Parameter(
            0.1 * torch.randn(3, 48, 32, **options) * torch.tensor([1.0, 5.0, 0.2], **options).view(3, 1, 1)
        )
        self.down = nn.Parameter(0.1 * torch.randn(3, 32, 48, **options))
        self.odd = nn.Parameter(torch.randn(3, 5, 32, **options))
        self.deep = nn.Parameter(torch.randn(1, 3, 4, 32, **options))
        self.mixing = nn.Conv1d(32, 32, 2, **options)

    def forward(self, x):
        """x [3, tokens, 32]"""
        hidden = torch.stack([F.linear(x[e], self.up[e]) for e in range(3)])
        return torch.bmm(F.gelu(hidden), self.down.transpose(1, 2))


def is_expert(module, name):
    return name.endswith(("up", "down", "odd", "deep", "mixing"))


def test_only_a_filter_takes_stacks():
    model = nn.ModuleDict({"mlp": Experts()})
    report = zerofp4.convert_model(model)
    assert report.converted == [] and "is no matrix" in report.skipped["mlp.up"]
    seen = []

    def choose(module, name):
        seen.append(name)
        return is_expert(module, name) and name != "mlp.down"

    report = zerofp4.convert_model(model, choose)
    assert seen == ["mlp.up", "mlp.down"] and report.converted == ["mlp.up"]
    assert report.skipped["mlp.down"] == "filter_fn is false for it"
    assert report.skipped["mlp.odd"] == "a weight of shape (3, 5, 32) does not have two even sizes"
    for name in ("mlp.deep", "mlp.mixing.weight"):
        assert "is no matrix" in report.skipped[name]
    total = sum(p.numel() for p in model.parameters())
    assert report.share == 3 * 48 * 32 / total


def test_converted_experts_train(device):
    torch.manual_seed(0)
    model = Experts(device)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert zerofp4.convert_model(model, is_expert).converted == ["up", "down"]
    for name in ("up", "down"):
        weight = model.get_parameter(name)
        assert isinstance(weight, nn.Parameter) and weight.record.name == name and weight.amax.shape == (3,)
        assert_record_equals(weight.record, reference.quantize_experts(before[name]), name)
        assert_bytes_equal(weight.get_high_precision_init_val(), before[name].cpu(), "initial value")
    optimizer = ZeroFP4Optimizer(model.named_parameters(), lr=1e-2)
    for e in (0, 1, 2):
        masters = dict(zip(dict(model.named_parameters()), optimizer.gathered_masters(), strict=True))
        assert_bytes_equal(masters["up"][e], before["up"][e].float(), "masters")
    x, losses = torch.randn(3, 8, 32, device=device, dtype=torch.bfloat16), []
    for _ in range(10):
        loss = (model(x).float() - x.float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    masters = dict(zip(dict(model.named_parameters()), optimizer.gathered_masters(), strict=True))
    for name in ("up", "down"):
        expected = reference.quantize_experts(masters[name].bfloat16())
        assert_record_equals(model.get_parameter(name).record, expected, name)
    assert model.up.grad is None or model.up.grad.shape == (3, 48, 32)


def test_a_stacked_layer_needs_no_filter():
    stack = pair()[1]
    before = stack.weight.detach().clone()
    report = zerofp4.convert_model(nn.ModuleDict({"experts": stack}))
    assert report.converted == ["experts"] and report.share == 64 / 65
    assert_record_equals(stack.weight.record, reference.quantize_experts(before), "weight")
    again = zerofp4.convert_model(pair()[1], lambda module, name: False)
    assert again.converted == [] and again.skipped["weight"] == "filter_fn is false for it"
