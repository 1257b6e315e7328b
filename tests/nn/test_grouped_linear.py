"""GroupedLinear: what a Linear for each group of rows gives."""

import functools

import pytest
import torch
from cases.layers import RECIPES
from helpers import assert_bytes_equal
from tensor_helpers import values
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import zerofp4
from zerofp4.nn import GroupedLinear, Linear, NVFP4Recipe, autocast

SPLITS = [[16, 0, 17, 3], [0, 0, 36, 0], [9, 9, 9, 9]]
SOME = ["nvfp4", "nvfp4, no transform", "nvfp4, dequantized", "mxfp8"]


def experts(**options):
    torch.manual_seed(0)
    return GroupedLinear(4, 64, 48, dtype=torch.bfloat16, **options)


def train(call, parameters, recipe, seed=7):
    for parameter in parameters:
        parameter.grad = None
    x = values(36, 64).requires_grad_()
    with autocast(recipe):
        y = call(x)
    torch.manual_seed(seed)
    y.backward(values(36, 48, seed=1))
    return [y.detach(), x.grad, *(p.grad for p in parameters)]


def layers(module) -> list[Linear]:
    """A layer for each group, with its weight and its bias."""
    made = []
    for e in range(module.num_gemms):
        layer = Linear(64, 48, dtype=torch.bfloat16)
        layer.weight = torch.nn.Parameter(module.weight.detach()[e].clone())
        layer.bias = torch.nn.Parameter(module.bias.detach()[e].clone())
        made.append(layer)
    return made


def by_layers(module, splits, recipe):
    """What train() gives of those. The last group goes back first, as autograd does it."""
    experts = layers(module)

    def call(x):
        return torch.cat([e(piece) for e, piece in zip(experts, x.split(splits), strict=True)])

    y, grad, *grads = train(call, [*(e.weight for e in experts), *(e.bias for e in experts)], recipe)
    return [y, grad, torch.stack(grads[:4]), torch.stack(grads[4:])]


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("primary", [False, True])
def test_each_group_has_its_layer(splits, name, primary):
    if primary and name == "mxfp8":
        pytest.skip("MXFP8 does not multiply NVFP4 weights")
    module = experts(primary_weights=primary)
    parameters = list(module.parameters())
    expected = by_layers(module, splits, RECIPES[name])
    for given in (splits, tuple(splits), torch.tensor(splits)):
        for first in (None, True, False):
            call = functools.partial(module, m_splits=given, is_first_microbatch=first)
            for index, pair in enumerate(zip(train(call, parameters, RECIPES[name]), expected, strict=True)):
                assert_bytes_equal(*pair, f"result {index}")


def test_a_group_is_quantized_alone():
    """Its amax is its own: large values of another group do not reach it."""
    module, x = experts(), values(36, 64)
    large = x.clone()
    large[:16] *= 1000
    with autocast(NVFP4Recipe()), torch.no_grad():
        assert_bytes_equal(module(large, [16, 0, 17, 3])[16:], module(x, [16, 0, 17, 3])[16:], "other groups")


def test_experts_without_tokens_get_gradients_of_zeros():
    module = experts()
    train(lambda x: module(x, [0, 36, 0, 0]), list(module.parameters()), NVFP4Recipe())
    for index, (weight, bias) in enumerate(zip(module.weight.grad, module.bias.grad, strict=True)):
        assert weight.any() == (index == 1) and bias.any() == (index == 1)


@pytest.mark.parametrize("count", [1, 4, 16])
def test_micro_batches_with_and_without_the_cache(count):
    module, results = experts(), []
    for cached in (True, False):
        module.zero_grad()
        torch.manual_seed(1)
        for index in range(count):
            splits = [index, 3, 0, 2 * index + 1]
            with autocast(NVFP4Recipe()):
                y = module(values(sum(splits), 64, seed=index), splits, index == 0 if cached else None)
            y.backward(values(*y.shape, seed=index + 50))
        results.append([y.detach(), *(p.grad.clone() for p in module.parameters())])
    for index, pair in enumerate(zip(*results, strict=True)):
        assert_bytes_equal(*pair, f"result {index}")


def test_outside_it_is_an_ordinary_layer():
    module, x = experts(), values(36, 64)
    expected = [
        torch.nn.functional.linear(piece, weight, bias)
        for piece, weight, bias in zip(x.split(9), module.weight, module.bias, strict=True)
    ]
    assert torch.equal(module(x, [9] * 4), torch.cat(expected))
    assert zerofp4.convert_model(torch.nn.ModuleDict({"experts": module})).converted == ["experts"]


def test_state_dicts():
    """In the names of each group, and of both storages that there were before: a stack and a list."""
    module, other = experts(), experts()
    names = [f"{name}{e}" for name in ("weight", "bias") for e in range(4)]
    assert list(module.state_dict()) == names
    assert module.state_dict()["weight2"].data_ptr() == module.weight[2].data_ptr()
    stack = {name: values(*p.shape, seed=3) for name, p in module.named_parameters()}
    of_list = {f"experts.{e}.{name}": p[e] for name, p in stack.items() for e in range(4)}
    of_groups = {f"{name}{e}": p[e] for name, p in stack.items() for e in range(4)}
    for saved in (stack, of_list, of_groups):
        module = torch.nn.ModuleDict({"moe": experts()})
        module.load_state_dict({f"moe.{name}": p for name, p in saved.items()})
        for name, parameter in module["moe"].named_parameters():
            assert_bytes_equal(parameter.detach(), stack[name], name)
    assert list(get_model_state_dict(torch.nn.ModuleDict({"moe": module}))) == [f"moe.moe.{n}" for n in names]
    assert list(other.state_dict(keep_vars=True)) == ["weight", "bias"]  # the parameters
    with pytest.raises(AttributeError, match="weight4"):
        _ = other.weight4
    del of_list["experts.1.weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(of_list)


def test_state_dicts_of_codes():
    """Codes come back as they are, from a list of layers too; values are quantized."""
    module = experts(primary_weights=True)
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    assert isinstance(saved["weight1"], zerofp4.NVFP4Tensor)
    expected = module.weight.record.rowwise.data.clone()
    bias = {name: value for name, value in saved.items() if name.startswith("bias")}
    of_list = {f"experts.{e}.weight": saved[f"weight{e}"] for e in range(4)}
    for given in (saved, of_list | bias):
        other = experts(primary_weights=True)
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
        experts()(values(36, 64), splits)


def test_bad_input():
    with pytest.raises(ValueError, match=r"x must be \[tokens, in_features\], got shape \(6, 6, 64\)"):
        experts()(values(6, 6, 64), [9] * 4)
    with pytest.raises(ValueError, match="num_gemms must be at least 1, got 0"):
        GroupedLinear(0, 4, 4)
