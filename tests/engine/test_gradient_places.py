"""Products that write a weight's gradient to where it travels from: when they do, when they must not, and
that p.grad has the bytes that autograd gives a model without such memory, whatever happens in between.
"""

import contextlib
import copy

import pytest
import torch
from cases.gradient_places import BF16, Square, Twice, back, inputs, made
from helpers import assert_bytes_equal
from torch import nn

import zerofp4
from zerofp4.nn import NVFP4Recipe, autocast

RECIPES = {
    "quantized": NVFP4Recipe(stochastic_rounding=False),
    "dequantized": NVFP4Recipe(backward="dequantized"),
    "outside": None,
}
LAYERS = {
    "F.linear": lambda: Twice(),
    "Linear": lambda: zerofp4.nn.Linear(32, 48, dtype=BF16, primary_weights=True),
    "Linear, no bias": lambda: zerofp4.nn.Linear(32, 48, bias=False, dtype=BF16, primary_weights=True),
    "Linear, bfloat16 weight": lambda: zerofp4.nn.Linear(32, 48, dtype=BF16),
    "LayerNormMLP": lambda: zerofp4.nn.LayerNormMLP(32, 48, dtype=BF16, primary_weights=True),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layer", LAYERS)
def test_products_write_there_once_an_accumulation(device, given, layer, recipe):
    torch.manual_seed(0)
    models = made(LAYERS[layer](), device)
    products = 2 if layer == "LayerNormMLP" else 1
    asks = layer == "F.linear" or recipe != "outside" or "bfloat16" not in layer
    expected = []
    for step in range(2):
        for micro_batch in range(2):
            for model in models[:2]:
                with contextlib.nullcontext() if RECIPES[recipe] is None else autocast(RECIPES[recipe]):
                    y = model(inputs(device, 2 * step + micro_batch))
                y.float().square().mean().backward()
            expected += [micro_batch == 0] * products if asks else []
            models.check()
            assert all(models.are_there())
        models.both(nn.Module.zero_grad)
    assert given == expected


def test_nothing_but_the_gradient_of_the_bias_is_copied(device):
    models, copied = made(Twice(), device), []

    class Copies(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.copy_.default:
                copied.append(tuple(args[0].shape))
            return func(*args, **(kwargs or {}))

    loss = models.placed(inputs(device)).float().square().mean()
    with Copies():
        loss.backward()
    assert copied == [(32,)] and all(models.are_there())


def test_a_weight_used_twice(device, models, given):
    for step in range(2):
        models.back(step, times=3)
        models.check()
        models.both(nn.Module.zero_grad)
    assert given == [True, False, False] * 2


@pytest.mark.parametrize("values_first", [True, False])
def test_a_weight_whose_values_are_used_too(device, models, values_first):
    """The gradient of another operation is added to what lies in the place."""
    for model in models[:2]:
        x = inputs(device)
        parts = [model(x).float().square().mean(), model.weight.dequantize().float().square().sum()]
        sum(parts[::-1] if values_first else parts).backward()
    models.check()


def test_autograd_grad_leaves_memory_alone(device, models, given):
    back(models.placed, device)
    models.placed.zero_grad()
    before = models.memory.flat.clone()
    found = []
    for model in models[:2]:
        loss = model(inputs(device, 1), times=2).float().square().mean()
        found.append(torch.autograd.grad(loss, list(model.parameters()))[0])
    assert_bytes_equal(*found, "autograd.grad")
    assert_bytes_equal(models.memory.flat, before, "flat")
    assert given == [True] and models.placed.weight.grad is None


@pytest.mark.parametrize("named", ["weight", "x"])
def test_backward_of_some_inputs(device, models, given, named):
    for model in models[:2]:
        x = inputs(device)
        loss = model(x).float().square().mean()
        loss.backward(inputs=[{"weight": model.weight, "x": x}[named]])
    models.check()
    assert given == ([True] if named == "weight" else [])


def test_create_graph(device, models, given):
    for model in models[:2]:
        model(inputs(device)).float().square().mean().backward(create_graph=True)
    assert given == [] and models.placed.weight.grad.requires_grad
    models.check()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("recipe", ["quantized", "dequantized"])
def test_create_graph_of_a_layer(device, given, recipe, times):
    models = made(LAYERS["Linear, no bias"](), device) if times == 1 else made(Square(), device)
    for model in models[:2]:
        with autocast(RECIPES[recipe]):
            y = model(inputs(device))
        y.float().square().mean().backward(create_graph=True)
    assert given == [] and all(p.grad.requires_grad for p in models.placed.parameters())
    models.check()


def as_other_tensors(grads, _):
    return tuple(grad if grad is None else grad.detach() for grad in grads)


def test_a_hook_of_the_product_gives_the_same_memory_in_another_tensor(device, models, given):
    for model in models[:2]:
        hidden = model(inputs(device))
        y = model(hidden)
        for product in (hidden, y):
            product.grad_fn.register_hook(as_other_tensors)
        y.float().square().mean().backward()
    models.check()
    assert given == [True, False]


def test_one_graph_twice(device, models, given):
    for model in models[:2]:
        loss = model(inputs(device)).float().square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    models.check()
    assert given == [True, False]


def test_a_copy_of_the_model(device, models, given):
    back(models.placed, device)
    before = models.memory.flat.clone()
    back(copy.deepcopy(models.placed), device, 1)
    assert_bytes_equal(models.memory.flat, before, "flat")
    assert given == [True]


def test_compiled(device, models, given):
    for model in models[:2]:
        compiled = torch.compile(model, backend="aot_eager")
        for step in range(2):
            back(compiled, device, step)
    models.check()
    assert models.are_there() == [True] and given == []
