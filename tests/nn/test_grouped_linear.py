"""GroupedLinear: what a Linear for each group of rows gives."""

import copy

import pytest
import torch
from cases.layers import RECIPES
from cases.ops import assert_record_equals
from helpers import assert_all_equal, assert_bytes_equal
from tensor_helpers import values
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import zerofp4
from zerofp4 import reference
from zerofp4.nn import GroupedLinear, Linear, NVFP4Recipe, autocast

SPLITS = [[16, 0, 17, 3], [0, 0, 36, 0], [9, 9, 9, 9]]
NAMES = ["nvfp4", "nvfp4, no transform", "nvfp4, dequantized", "nvfp4, weights 1x16", "nvfp4, four over six"]
NAMES += ["mxfp8"]


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


def test_initial_values_are_those_of_layers():
    for mine, other in zip(*map(parameters, pair()), strict=True):
        for a, b in zip(mine, other, strict=True):
            assert_bytes_equal(a.detach(), b.detach(), "values")
    assert [tuple(p.shape) for p in pair()[1].parameters()] == [(4, 48, 64), (4, 48)]
    assert list(dict(pair(bias=False)[1].named_parameters())) == ["weight"]


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("primary", [False, True])
def test_the_bytes_of_a_list_of_layers(splits, name, primary):
    """On the CPU: a product of all groups in one launch rounds once more."""
    if primary and name not in NAMES[:3]:
        pytest.skip("a recipe for high-precision parameters")
    layers, stack = pair(primary_weights=primary)
    expected = train(layers, splits, RECIPES[name])
    for first in (None, True, False):
        assert_all_equal(train(stack, splits, RECIPES[name], first), expected)


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


def test_state_dicts_of_values_and_bad_arguments():
    stack, other = pair(primary_weights=True)[1], pair()[1]
    other.weight.data.mul_(2)
    stack.load_state_dict(other.state_dict())
    assert_record_equals(stack.weight.record, reference.quantize_experts(other.weight.detach()), "loaded")
    with autocast(RECIPES["nvfp4"]), pytest.raises(ValueError, match="x must have 64 values"):
        stack(values(36, 62), [9] * 4)
    with pytest.raises(RuntimeError, match="which is on the meta device"):
        GroupedLinear(2, 16, 16, device="meta", primary_weights=True)


def test_a_stacked_layer_needs_no_filter():
    stack = pair()[1]
    before = stack.weight.detach().clone()
    report = zerofp4.convert_model(nn.ModuleDict({"experts": stack}))
    assert report.converted == ["experts"] and report.share == 64 / 65
    assert_record_equals(stack.weight.record, reference.quantize_experts(before), "weight")
    again = zerofp4.convert_model(pair()[1], lambda module, name: False)
    assert again.converted == [] and again.skipped["weight"] == "filter_fn is false for it"


def test_state_dicts():
    """In the names of each group, and of both storages that there were before: a stack and a list."""
    module = pair()[1]
    names = [f"{name}{e}" for name in ("weight", "bias") for e in range(4)]
    assert list(module.state_dict()) == names
    assert module.state_dict()["weight2"].data_ptr() == module.weight[2].data_ptr()
    stack = {name: values(*p.shape, seed=3) for name, p in module.named_parameters()}
    of_list = {f"experts.{e}.{name}": p[e] for name, p in stack.items() for e in range(4)}
    of_groups = {f"{name}{e}": p[e] for name, p in stack.items() for e in range(4)}
    for saved in (stack, of_list, of_groups):
        module = torch.nn.ModuleDict({"moe": pair()[1]})
        module.load_state_dict({f"moe.{name}": p for name, p in saved.items()})
        for name, parameter in module["moe"].named_parameters():
            assert_bytes_equal(parameter.detach(), stack[name], name)
    assert list(get_model_state_dict(torch.nn.ModuleDict({"moe": module}))) == [f"moe.moe.{n}" for n in names]
    assert list(module["moe"].state_dict(keep_vars=True)) == ["weight", "bias"]  # the parameters
    with pytest.raises(AttributeError, match="weight4"):
        _ = module["moe"].weight4
    del of_list["experts.1.weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict({f"moe.{name}": p for name, p in of_list.items()})


def test_state_dicts_of_codes():
    """Codes come back as they are, from a list of layers too; values are quantized."""
    module = pair(primary_weights=True)[1]
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    assert isinstance(saved["weight1"], zerofp4.NVFP4Tensor)
    expected = module.weight.record.rowwise.data.clone()
    bias = {name: value for name, value in saved.items() if name.startswith("bias")}
    of_list = {f"experts.{e}.weight": saved[f"weight{e}"] for e in range(4)}
    for given in (saved, of_list | bias):
        other = pair(primary_weights=True)[1]
        with torch.no_grad():
            other.weight.copy_(values(4, 48, 64, seed=5))
        other.load_state_dict(given)
        assert_bytes_equal(other.weight.record.rowwise.data, expected, "codes")
        assert_bytes_equal(other.weight.amax, module.weight.amax, "amax")
    zerofp4.register_plain_state_dict(module)
    plain = module.state_dict()
    assert all(type(value) is torch.Tensor for value in plain.values())
    assert_bytes_equal(plain["weight3"], module.weight.detach()[3].dequantize(), "values")


@pytest.mark.parametrize(
    ("splits", "error", "message"),
    [
        ([36], ValueError, "m_splits must have 4 entries, got 1"),
        ([12, 12, 12, 1], ValueError, r"must sum to the 36 rows of x, got \[12, 12, 12, 1\]"),
        ([40, -4, 0, 0], ValueError, "m_splits must not be negative"),
        ([9.0, 9.0, 9.0, 9.0], TypeError, "m_splits must be integers"),
        (torch.ones(4) * 9, TypeError, "m_splits must be integers"),
    ],
)
def test_bad_splits(splits, error, message):
    with pytest.raises(error, match=message):
        pair()[1](values(36, 64), splits)


def test_bad_input():
    with pytest.raises(ValueError, match=r"x must be \[tokens, in_features\], got shape \(6, 6, 64\)"):
        pair()[1](values(6, 6, 64), [9] * 4)
    with pytest.raises(ValueError, match="num_gemms must be at least 1, got 0"):
        GroupedLinear(0, 4, 4)
