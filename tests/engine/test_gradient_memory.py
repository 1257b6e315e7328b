"""p.grad that aliases flat memory: it has the bytes that autograd gives a model without such memory, and so
has what travels, whatever users, hooks, checkpoints, errors and threads do in between. Products write a
weight's gradient there where they may.
"""

from __future__ import annotations

import contextlib
import copy
from typing import NamedTuple

import pytest
import torch
from cases.gradient_places import memory_of
from helpers import assert_bytes_equal
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zerofp4
from zerofp4.engine import GradientMemory
from zerofp4.nn import NVFP4Recipe, autocast
from zerofp4.tensors import GradientPlace

BF16 = torch.bfloat16
RECIPES = {
    "quantized": NVFP4Recipe(stochastic_rounding=False),
    "dequantized": NVFP4Recipe(backward="dequantized"),
    "outside": None,
}
LAYERS = {
    "F.linear": lambda: Product(),
    "Linear": lambda: zerofp4.nn.Linear(32, 48, dtype=BF16),  # of a bfloat16 weight
    "LayerNormMLP": lambda: zerofp4.nn.LayerNormMLP(32, 48, dtype=BF16, primary_weights=True),
}


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Models(NamedTuple):
    """A model, the same one whose gradients lie in flat memory, and that memory."""

    plain: nn.Module
    placed: nn.Module
    memory: GradientMemory

    def both(self, call):
        for model in self[:2]:
            call(model)

    def back(self, seed=0, **options):
        """The same backward pass of both."""
        device = next(self.plain.parameters()).device
        self.both(lambda model: back(model, device, seed, **options))

    def check(self):
        """p.grad has the bytes that autograd gives, and so has what travels."""
        names, gradients = [], []
        for (name, expected), p in zip(self.plain.named_parameters(), self.placed.parameters(), strict=True):
            assert (p.grad is None) == (expected.grad is None), name
            if p.grad is not None:
                assert_bytes_equal(p.grad.detach(), expected.grad.detach(), name)
            names.append(name)
            gradients.append(None if p.grad is None else p.grad.detach())
        self.memory.check(gradients)
        self.memory.take(gradients)
        for name, expected, view in zip(names, self.plain.parameters(), self.memory.views, strict=True):
            grad = torch.zeros_like(view) if expected.grad is None else expected.grad.detach()
            assert_bytes_equal(view, grad, f"what travels of {name}")

    def are_there(self):
        pairs = zip(self.placed.parameters(), self.memory.views, strict=True)
        return [p.grad is not None and p.grad.data_ptr() == view.data_ptr() for p, view in pairs]


def made(model, device, dtype=BF16):
    plain = model.to(device)
    placed = copy.deepcopy(plain)
    return Models(plain, placed, memory_of(list(placed.parameters()), dtype))


class Product(nn.Module):
    """A weight in NVFP4, and what it is for: one product, or more."""

    def __init__(self, bias=True):
        super().__init__()
        self.weight = nn.Parameter(zerofp4.quantize(values(32, 32).to(BF16), columnwise=True))
        self.bias = nn.Parameter(values(32, seed=1).to(BF16)) if bias else None

    def forward(self, x, times=1):
        for _ in range(times):
            x = F.linear(x, self.weight, self.bias)
        return x


def inputs(device, seed=0):
    return values(8, 32, seed=seed + 5).to(device, BF16).requires_grad_()


def loss_of(model, x, **options):
    return model(x, **options).float().square().mean()


def back(model, device, seed=0, **options):
    loss_of(model, inputs(device, seed), **options).backward()


@pytest.fixture
def models(device):
    return made(Product(bias=False), device)


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


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layer", LAYERS)
def test_products_write_there_once_an_accumulation(device, given, layer, recipe):
    torch.manual_seed(0)
    models = made(LAYERS[layer](), device)
    products = 2 if layer == "LayerNormMLP" else 1
    asks = recipe != "outside" or layer != "Linear"
    expected = []
    for step in range(2):
        for micro_batch in range(2):
            for model in models[:2]:
                with contextlib.nullcontext() if RECIPES[recipe] is None else autocast(RECIPES[recipe]):
                    loss = loss_of(model, inputs(device, 2 * step + micro_batch))
                loss.backward()
            expected += [micro_batch == 0] * products if asks else []
            models.check()
            assert all(models.are_there())
        models.both(nn.Module.zero_grad)
    assert given == expected


# What a pass may be: a function of a model and a device


def with_values(model, device):
    """The gradient of another operation is added to what lies in the place, or comes first."""
    for order in (1, -1):
        parts = [loss_of(model, inputs(device)), model.weight.dequantize().float().square().sum()]
        sum(parts[::order]).backward()


def one_graph_twice(model, device):
    loss = loss_of(model, inputs(device))
    loss.backward(retain_graph=True)
    loss.backward()


def under_autocast(model, device):
    with torch.autocast(device.type, BF16):
        back(model, device)


def checkpointed(model, device, reentrant):
    for seed in range(2):
        y = checkpoint(model, inputs(device, seed), 2, use_reentrant=reentrant)
        y.float().square().mean().backward()


def inside_of_another(model, device):
    """A reentrant checkpoint accumulates while a gradient of the same weight is on its way outside of it."""
    loss_of(model, checkpoint(model, model(inputs(device)), 2, use_reentrant=True)).backward()


def after_an_error(model, device):
    def fail(grad):
        raise ArithmeticError("in between")

    hidden = model(inputs(device))
    hidden.register_hook(fail)
    with pytest.raises(ArithmeticError):
        loss_of(model, hidden).backward()
    back(model, device, 1)


def assigned(model, device, change):
    back(model, device)
    model.weight.grad = change(model.weight.grad)
    back(model, device, 1)


PASSES = {
    "a weight used thrice": (lambda m, d: back(m, d, times=3), [True, False, False]),
    "values, too": (with_values, None),
    "of the weight": (lambda m, d: loss_of(m, inputs(d)).backward(inputs=[m.weight]), [True]),
    "of the input": (lambda m, d: loss_of(m, x := inputs(d)).backward(inputs=[x]), []),
    "autograd.grad": (lambda m, d: torch.autograd.grad(loss_of(m, inputs(d)), [m.weight]), []),
    "create_graph": (lambda m, d: loss_of(m, inputs(d), times=2).backward(create_graph=True), []),
    "one graph twice": (one_graph_twice, [True, False]),
    "autocast": (under_autocast, []),
    "checkpoint": (lambda m, d: checkpointed(m, d, False), None),
    "reentrant checkpoint": (lambda m, d: checkpointed(m, d, True), None),
    "inside of another": (inside_of_another, None),
    "after an error": (after_an_error, [True, True]),
    "compiled": (lambda m, d: back(torch.compile(m, backend="aot_eager"), d), []),
    "behind a clone": (lambda m, d: assigned(m, d, torch.clone), [True, False]),
    "behind its detach": (lambda m, d: assigned(m, d, torch.Tensor.detach), [True, False]),
}


@pytest.mark.parametrize("what", PASSES)
def test_passes(device, models, given, what):
    """And the pass behind each writes to the memory again."""
    one_pass, expected = PASSES[what]
    models.both(lambda model: one_pass(model, device))
    models.check()
    assert expected is None or given == expected
    both = [[p.grad is not None and p.grad.requires_grad for p in model.parameters()] for model in models[:2]]
    assert both[0] == both[1]
    models.both(nn.Module.zero_grad)
    models.back(1)
    models.check()
    assert models.are_there() == [True]


def test_gradients_of_another_dtype_are_not_written_there(device, given):
    models = made(Product(bias=False), device, torch.float32)
    models.back()
    assert given == [False]
    assert_bytes_equal(models.placed.weight.grad, models.plain.weight.grad, "weight")


# Hooks, and what users assign


@pytest.mark.parametrize("scales", [True, False])
def test_hooks(device, models, given, scales):
    """One of the tensor may keep its gradient; one behind the accumulation sees p.grad."""
    kept, seen = [], []

    def hook(grad):
        kept.append(grad)
        return 2 * grad if scales else None

    for model in models[:2]:
        model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        handle = model.weight.register_hook(hook)
        back(model, device)
        model.zero_grad()
        handle.remove()
        back(model, device, 1)
    models.check()
    assert_bytes_equal(*kept, "what the hook has kept")
    for plain, placed in zip(seen[:2], seen[2:], strict=True):
        assert_bytes_equal(placed, plain, "behind the accumulation")
    assert given == [True]


def test_what_a_user_assigned_is_copied_and_never_written(device, models):
    kept = torch.full((32, 32), 2.0, dtype=BF16, device=device)
    back(models.placed, device)
    models.plain.weight.grad = models.placed.weight.grad = kept.t()
    models.check()
    assert models.are_there() == [False] and kept.eq(2).all()


def exchanged(first, second):
    first.grad, second.grad = second.grad, first.grad


def handed_on(first, second):
    second.grad, first.grad = first.grad, None


def turned(first, second):
    first.grad = first.grad.t()


@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize("change", [exchanged, handed_on, turned])
def test_a_gradient_in_the_memory_of_another_is_refused(device, change, passes):
    """Also where a backward pass has added to it since, which moves nothing out of that memory."""
    models = made(nn.Sequential(Product(False), Product(False)), device)
    back(models.placed, device)
    change(*models.placed.parameters())
    for seed in range(passes):
        back(models.placed, device, seed=seed + 1)
    with pytest.raises(RuntimeError, match="exchanged, shared or transposed"):
        models.memory.check([p.grad for p in models.placed.parameters()])
    models.placed.zero_grad()
    models.back(seed=2)
    models.check()
