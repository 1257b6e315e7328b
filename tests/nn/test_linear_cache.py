"""The weight cache of zerofp4.nn.Linear: the same bytes, fewer quantizations, never a stale weight."""

import pytest
import torch
from cases.layers import RECIPES
from helpers import assert_all_equal, assert_bytes_equal
from tensor_helpers import values
from torch import nn

from zerofp4.nn import GroupedLinear, Linear, autocast
from zerofp4.nn.quantizers import WeightCache


def layer(in_features=64, out_features=48, **options):
    torch.manual_seed(0)
    return Linear(in_features, out_features, dtype=torch.bfloat16, **options)


def step(module, batches, recipe, cached):
    """Outputs and gradients of a step of micro-batches, as bytes to compare."""
    torch.manual_seed(7)
    module.zero_grad()
    results = []
    for index, (x, grad) in enumerate(batches):
        x = x.clone().requires_grad_()
        with autocast(recipe):
            y = module(x, index == 0 if cached else None)
        y.backward(grad)
        results += [y.detach(), x.grad]
    return [*results, module.weight.grad.clone(), module.bias.grad.clone()]


@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize("name", RECIPES)
def test_bytes_are_the_same_with_and_without(name, count):
    rows = [2 * ((5 * i) % 17 + 1) for i in range(count)]
    batches = [(values(n, 50, seed=n), values(n, 34, seed=n + 1)) for n in rows]
    module, recipe = layer(50, 34), RECIPES[name]
    expected = step(module, batches, recipe, False)
    for cached in (True, False, True):  # also when switching between both
        assert_all_equal(step(module, batches, recipe, cached), expected)


def test_the_weight_is_quantized_once_per_step(monkeypatch, quantized):
    filled, fill = [], WeightCache._fill
    monkeypatch.setattr(WeightCache, "_fill", lambda self, *given: filled.append(1) or fill(self, *given))
    batches = [(values(16, 64, seed=i), values(16, 48, seed=i)) for i in range(4)]
    recipe = RECIPES["nvfp4, dequantized"]  # which Python quantizes for
    step(layer(), batches, recipe, True)
    assert len(filled) == 1 and quantized.count((16, 64)) == 4 and quantized.count((48, 64)) <= 1
    quantized.clear()
    step(layer(), batches, recipe, False)
    assert len(filled) == 1 and quantized.count((48, 64)) == 4


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_buffers_stay_where_they_are(name):
    module, x = layer(), values(16, 64)

    def addresses():
        return [buffer.data_ptr() for _, buffer in module._weight_cache._tensors[0].record.buffers()]

    with autocast(RECIPES[name]), torch.no_grad():
        module(x, True)
        before = addresses()
        module.weight.mul_(1.5)
        first = module(x, True)
        assert addresses() == before
        assert_bytes_equal(module(x, False), first, "y")
        assert_bytes_equal(module(x), first, "y")


def test_a_weight_that_was_written_to_is_never_used_stale():
    module, x, recipe = layer(), values(16, 64), RECIPES["nvfp4"]
    with torch.no_grad(), autocast(recipe):
        module(x, True)
        for write in (
            lambda: module.weight.mul_(2),
            lambda: module.load_state_dict({k: v * 3 for k, v in module.state_dict().items()}),
            lambda: setattr(module, "weight", nn.Parameter(values(48, 64, seed=9))),
            lambda: setattr(module.weight, "data", values(48, 64, seed=10)),
            lambda: module.float(),
        ):
            write()
            assert_bytes_equal(module(x, False), module(x), "y")


def test_another_recipe_is_not_served_from_the_cache():
    module, x = layer(), values(16, 64)
    for name in ("nvfp4", "mxfp8", "nvfp4, weights 1x16", "nvfp4"):
        with autocast(RECIPES[name]), torch.no_grad():
            module(x, True) if name == "nvfp4" else None
            assert_bytes_equal(module(x, False), module(x), name)


def test_without_a_cache_backward_has_the_weight_of_its_forward():
    module, x = layer(), values(16, 64)
    grad = values(16, 48)
    gradients = []
    for change in (False, True):
        inner = x.clone().requires_grad_()
        with autocast(RECIPES["mxfp8"]):
            y = module(inner)
        if change:
            with torch.no_grad():
                module.weight.zero_()
        y.backward(grad)
        gradients.append(inner.grad)
    assert_bytes_equal(*gradients, "dx")


@pytest.mark.parametrize("first", [True, False])
def test_what_inference_mode_made_serves_no_training(first):
    module, x = layer(), values(16, 64)
    with autocast(RECIPES["nvfp4"]):
        with torch.inference_mode():
            expected = module(x, True).clone()
        y = module(x.clone().requires_grad_(), first)
        y.backward(values(16, 48))
        with torch.inference_mode():
            assert_bytes_equal(module(x, False), expected, "inference again")
    assert_bytes_equal(y.detach(), expected, "y")


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4, weights 1x16", "mxfp8"])
def test_a_layer_that_moves_drops_its_cache(name):
    """And nothing of one that stays where it is: captured graphs read it there."""
    for module, splits in ((layer(), ()), (GroupedLinear(2, 64, 48, dtype=torch.bfloat16), ([8, 8],))):
        x, recipe = values(16, 64), RECIPES[name]
        with torch.no_grad(), autocast(recipe):
            module(x, *splits, True)
            kept = module._weight_cache._tensors
            module.to("cpu", torch.bfloat16)
            assert module._weight_cache._tensors is kept
            module.float()
            assert not module._weight_cache._tensors
            x = x.float()
            assert_bytes_equal(module(x, *splits, False), module(x, *splits), "y")
