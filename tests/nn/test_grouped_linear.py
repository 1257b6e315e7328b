"""GroupedLinear: what a Linear for each group of rows gives."""

import functools

import pytest
import torch
from cases.layers import RECIPES
from helpers import assert_bytes_equal
from tensor_helpers import values

import zerofp4
from zerofp4.nn import GroupedLinear, NVFP4Recipe, autocast

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


def one_by_one(module, splits, first=None):
    """The last group goes back first, as autograd does it."""
    return lambda x: torch.cat(
        [e(piece, first) for e, piece in zip(module.experts, x.split(splits), strict=True)]
    )


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("primary", [False, True])
def test_each_group_has_its_layer(splits, name, primary):
    if primary and name == "mxfp8":
        pytest.skip("MXFP8 does not multiply NVFP4 weights")
    module = experts(primary_weights=primary)
    parameters = list(module.parameters())
    expected = train(one_by_one(module, splits), parameters, RECIPES[name])
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
    for index, expert in enumerate(module.experts):
        assert expert.weight.grad.any() == (index == 1) and expert.bias.grad.any() == (index == 1)


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
        torch.nn.functional.linear(p, e.weight, e.bias)
        for e, p in zip(module.experts, x.split(9), strict=True)
    ]
    assert torch.equal(module(x, [9] * 4), torch.cat(expected))
    assert zerofp4.convert_model(module).converted == [f"experts.{i}" for i in range(4)]


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
