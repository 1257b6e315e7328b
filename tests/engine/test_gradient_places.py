"""Products that write a weight's gradient to where it travels from: when they do, when they must not, and
that p.grad has the bytes that autograd gives a model without such memory, whatever happens in between.
"""

from __future__ import annotations

import copy
import threading
from typing import NamedTuple

import pytest
import torch
from helpers import assert_bytes_equal
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zerofp4
from zerofp4.engine import DenseBuffer, GradientPlaces, GradientViews
from zerofp4.nn import NVFP4Recipe, autocast
from zerofp4.tensors import GradientPlace

BF16 = torch.bfloat16
RECIPES = {
    "quantized": NVFP4Recipe(stochastic_rounding=False),
    "dequantized": NVFP4Recipe(backward="dequantized"),
    "outside": None,
}


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Models(NamedTuple):
    """A model, the same one whose gradients have places, and these."""

    plain: nn.Module
    placed: nn.Module
    memory: GradientViews
    places: GradientPlaces

    def check(self):
        for (name, expected), p in zip(self.plain.named_parameters(), self.placed.parameters(), strict=True):
            assert (p.grad is None) == (expected.grad is None), name
            if p.grad is not None:
                assert_bytes_equal(p.grad.detach(), expected.grad.detach(), name)
        parameters = list(self.placed.parameters())
        gradients = self.places.keep_apart(parameters, [p.grad for p in parameters])
        self.memory.check(gradients, [name for name, _ in self.placed.named_parameters()])
        self.memory.take([None if g is None else g.detach() for g in gradients])
        for (name, expected), view in zip(self.plain.named_parameters(), self.memory._views, strict=True):
            grad = torch.zeros_like(view) if expected.grad is None else expected.grad.detach()
            assert_bytes_equal(view, grad, f"what travels of {name}")

    def are_there(self):
        views = self.memory._views
        return [
            p.grad.data_ptr() == v.data_ptr() for p, v in zip(self.placed.parameters(), views, strict=True)
        ]


def made(model, device, dtype=BF16):
    plain = model.to(device)
    placed = copy.deepcopy(plain)
    parameters = list(placed.parameters())
    places = GradientPlaces()
    return Models(plain, placed, memory_of(parameters, places, dtype), places)


def memory_of(parameters, places, dtype=BF16):
    buffer = DenseBuffer(range(len(parameters)), parameters, None)
    shape = buffer.world_size, buffer.slice_numel
    return GradientViews(buffer, torch.zeros(shape, dtype=dtype, device=buffer.device), places)


class Twice(nn.Module):
    """A weight in NVFP4, and what it is for: one product, or more."""

    def __init__(self, bias=True):
        super().__init__()
        self.weight = nn.Parameter(zerofp4.quantize(values(32, 32).to(BF16), columnwise=True))
        self.bias = nn.Parameter(values(32, seed=1).to(BF16)) if bias else None

    def forward(self, x, times=1):
        for _ in range(times):
            x = F.linear(x, self.weight, self.bias)
        return x


class Square(nn.Module):
    """Layers that are used twice."""

    def __init__(self, pairs=1):
        super().__init__()
        options = {"bias": False, "dtype": BF16, "primary_weights": True}
        self.layers = nn.ModuleList([zerofp4.nn.Linear(32, 32, **options) for _ in range(pairs)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(layer(x))
        return x


@pytest.fixture
def models(device):
    return made(Twice(bias=False), device)


def inputs(device, seed=0):
    return values(8, 32, seed=seed + 5).to(device, BF16).requires_grad_()


def back(model, device, seed=0, **options):
    model(inputs(device, seed), **options).float().square().mean().backward()


@pytest.fixture
def given(monkeypatch):
    """Whether each product that asked was given the place."""
    found = []
    give = GradientPlace.give

    def spy(place, *arguments):
        memory = give(place, *arguments)
        found.append(memory is not None)
        return memory

    monkeypatch.setattr(GradientPlace, "give", spy)
    return found


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
                if RECIPES[recipe] is None:
                    back(model, device, 2 * step + micro_batch)
                else:
                    with autocast(RECIPES[recipe]):
                        y = model(inputs(device, 2 * step + micro_batch))
                    y.float().square().mean().backward()
            expected += [micro_batch == 0] * products if asks else []
            models.check()
            assert all(models.are_there())
        for model in models[:2]:
            model.zero_grad()
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
        for model in models[:2]:
            back(model, device, step, times=3)
        models.check()
        for model in models[:2]:
            model.zero_grad()
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


@pytest.mark.parametrize("scales", [True, False])
def test_a_hook_of_the_tensor_may_keep_its_gradient(device, models, given, scales):
    seen = []

    def hook(grad):
        seen.append(grad)
        return 2 * grad if scales else None

    for model in models[:2]:
        handle = model.weight.register_hook(hook)
        back(model, device)
        model.zero_grad()
        handle.remove()
        back(model, device, 1)
    assert_bytes_equal(*seen, "what the hook has kept")
    models.check()
    assert given == [True]


def test_a_hook_after_accumulation_sees_the_gradient(device, models):
    seen = []
    for model in models[:2]:
        model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for step in range(2):
            back(model, device, step)
    assert_bytes_equal(seen[2], seen[0], "first")
    assert_bytes_equal(seen[3], seen[1], "second")


@pytest.mark.parametrize("assigned", ["other memory", "turned", "its own"])
def test_what_a_user_assigned_is_added_to(device, models, given, assigned):
    for model in models[:2]:
        back(model, device)
        grad = model.weight.grad
        if assigned == "other memory":
            model.weight.grad = grad.clone()
        elif assigned == "turned":
            model.weight.grad = grad.t()
        else:
            model.weight.grad = grad.detach()
        back(model, device, 1)
    models.check()
    assert given == [True, False]


def test_gradients_that_moved_and_were_exchanged(device):
    """On a CPU share_memory_() of one takes the memory of all along."""
    models = made(Square(pairs=2), device)
    for model in models[:2]:
        back(model, device)
        first, second = model.parameters()
        first.grad.share_memory_()
        first.grad, second.grad = second.grad, first.grad
    models.check()


@pytest.mark.parametrize("moved", [False, True])
def test_a_gradient_that_was_handed_on_is_not_written_over(device, given, moved):
    """moved: it was in other memory when it was made."""
    models = made(nn.Sequential(Twice(False), Twice(False)), device)
    for model in models.plain, models.placed:
        if moved:
            for p in model.parameters():
                p.grad = torch.ones(32, 32, dtype=BF16, device=device)
        back(model, device)
        first, second = model.parameters()
        second.grad, first.grad = first.grad, None
        back(model, device, seed=1)
    assert moved or given[-2:] == [False, False]
    models.check()
    for model in models.plain, models.placed:
        for p in model.parameters():
            p.grad = None
        back(model, device, seed=2)
    assert given[-2:] == [True, True]
    models.check()


def test_a_gradient_of_another_dtype(device, given):
    models = made(Twice(bias=False), device, torch.float32)
    for model in models[:2]:
        back(model, device)
    assert given == [False]
    assert_bytes_equal(models.placed.weight.grad, models.plain.weight.grad, "weight")


def test_autocast_in_the_backward_pass(device, models, given):
    for model in models[:2]:
        with torch.autocast(device.type, torch.bfloat16):
            back(model, device)
    models.check()
    assert given == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(device, models, given, reentrant):
    for model in models[:2]:
        for seed in range(2):
            y = checkpoint(model, inputs(device, seed), 2, use_reentrant=reentrant)
            y.float().square().mean().backward()
    models.check()
    assert given[:2] == [True, False] and not any(given[2:])


@pytest.mark.parametrize("outside", [1, 2])
def test_a_backward_pass_inside_of_another(device, models, outside):
    """A reentrant checkpoint accumulates while a gradient of the same weight is on its way outside of it."""
    for model in models[:2]:
        x = inputs(device)
        if outside == 2:
            x = model(x)
        x = checkpoint(model, x, 2, use_reentrant=True)
        model(x).float().square().mean().backward()
    models.check()
    for model in models[:2]:
        model.zero_grad()
        back(model, device, 1)
    models.check()
    assert models.are_there() == [True]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in between")


@pytest.mark.parametrize("keeps", [True, False])
def test_after_an_error_in_between(device, models, given, keeps):
    kept = []
    for model in models[:2]:
        loss = model(Fails.apply(model(inputs(device)))).float().square().mean()
        try:
            loss.backward()
        except ArithmeticError as error:
            kept += [error] * keeps
        del loss
        back(model, device, 1)
    models.check()
    assert models.are_there() == [True] and given == [True, True]


def test_a_step_in_the_middle_of_a_gradient_raises(device, models):
    _, placed, memory, _ = models
    errors = []

    def step(grad):
        try:
            memory.check([placed.weight.grad], ["weight"])
        except RuntimeError as error:
            errors.append(str(error))

    hidden = placed(inputs(device))
    hidden.register_hook(step)
    placed(hidden).float().square().mean().backward()
    assert len(errors) == 1 and "has made part of the gradient of weight" in errors[0]
    handle = placed.weight.register_post_accumulate_grad_hook(lambda p: step(None))
    placed.zero_grad()
    back(placed, device, times=2)
    handle.remove()
    assert len(errors) == 1


def test_memory_that_was_lent_is_given_back_before(device, models, given):
    seen = []
    lent = models.memory.lend(lambda: seen.append(lent.clone()))
    lent.fill_(5)
    for model in models[:2]:
        back(model, device)
    assert len(seen) == 1 and (seen[0] == 5).all() and given == [True]
    models.check()


def test_threads(device, models):
    """Two gradients at a time: their sum does not depend on who comes first."""
    for _ in range(20):
        for model in models[:2]:
            model.zero_grad()
            threads = [threading.Thread(target=back, args=(model, device, seed)) for seed in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        models.check()


def test_places_end_with_their_owner(device, given):
    plain, placed, memory, places = made(Twice(bias=False), device)
    second = memory_of([placed.weight], places)
    del memory
    for model in (plain, placed):
        back(model, device)
    assert given == [True]
    models = Models(plain, placed, second, places)
    models.check()
    del second, models
    for model in (plain, placed):
        model.zero_grad()
        back(model, device, 1)
    assert given == [True]
    assert_bytes_equal(placed.weight.grad, plain.weight.grad, "weight")
