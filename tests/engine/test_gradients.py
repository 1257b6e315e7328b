"""Gradients in flat memory: what p.grad holds, and what travels, after every way to make one."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from helpers import assert_bytes_equal
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zerofp4
from zerofp4.engine import DenseBuffer, GradientMemory


class Model(nn.Module):
    """Two products of one NVFP4 weight, a bias, and a weight that only some inputs reach."""

    def __init__(self, device):
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def values(*shape):
            return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

        self.shared = nn.Parameter(zerofp4.quantize(values(32, 32), columnwise=True))
        self.bias = nn.Parameter(values(32))
        self.rare = nn.Parameter(zerofp4.quantize(values(32, 32), columnwise=True))

    def forward(self, x, rare=True):
        x = F.linear(F.linear(x, self.shared, self.bias).relu(), self.shared)
        return F.linear(x, self.rare) if rare else x


@pytest.fixture
def models(device):
    """A model, the same one whose gradients lie in flat memory, and that."""
    plain = Model(device)
    flat = copy.deepcopy(plain)
    parameters = list(flat.parameters())
    return plain, flat, views_of(parameters)


def views_of(parameters):
    buffer = DenseBuffer(range(len(parameters)), parameters)
    flat = torch.zeros(1, buffer.slice_numel, dtype=torch.bfloat16, device=buffer.device)
    return GradientMemory(buffer, flat, set())


def inputs(device, step):
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).to(device, torch.bfloat16)


def assert_same(models):
    plain, flat, memory = models
    expected = [p.grad for p in plain.parameters()]
    found = [p.grad for p in flat.parameters()]
    for name, e, f in zip(dict(plain.named_parameters()), expected, found, strict=True):
        assert (e is None) == (f is None), name
        if e is not None:
            assert_bytes_equal(f.detach(), e.detach(), name)
    memory.take([None if f is None else f.detach() for f in found])
    end = 0
    for e, p in zip(expected, plain.parameters(), strict=True):
        begin, end = end, end + p.numel()
        here = memory.flat.view(-1)[begin:end].view(p.shape)
        assert_bytes_equal(here, torch.zeros_like(here) if e is None else e.detach(), "what travels")
        end = -(-end // 256) * 256  # every parameter begins at a multiple


def are_views(models):
    _, flat, memory = models
    first = memory.flat.data_ptr()
    last = first + memory.flat.nbytes
    return [p.grad is not None and first <= p.grad.data_ptr() < last for p in flat.parameters()]


def backward(model, x, **options):
    model(x, **options).float().square().mean().backward()


def test_micro_batches_add_up_in_place(device, models):
    for step in range(3):
        for model in models[:2]:
            backward(model, inputs(device, step))
        assert_same(models)
        assert are_views(models) == [True] * 3


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_is_not_there_again(device, models, set_to_none):
    """What an earlier step left is not sent."""
    for step, rare in enumerate([True, False, True]):
        for model in models[:2]:
            backward(model, inputs(device, step), rare=rare)
        assert_same(models)
        for model in models[:2]:
            model.zero_grad(set_to_none)


def test_each_backward_pass_leaves_a_gradient_of_its_own(device, models):
    """After zero_grad(), so that what was reduced before is not taken for it."""
    _, flat, _ = models
    backward(flat, inputs(device, 0))
    before = flat.bias.grad
    version = before._version
    flat.zero_grad()
    backward(flat, inputs(device, 1))
    assert flat.bias.grad is not before and before._version == version


def test_autograd_grad_leaves_it_alone(device, models):
    for model in models[:2]:
        backward(model, inputs(device, 0))
        loss = model(inputs(device, 1)).float().square().mean()
        torch.autograd.grad(loss, list(model.parameters()))
    assert_same(models)


def test_checkpointing(device, models):
    for model in models[:2]:
        x = inputs(device, 0).requires_grad_()
        checkpoint(model, x, use_reentrant=False).float().square().mean().backward()
    assert_same(models)
    assert all(are_views(models))


def test_a_gradient_with_a_graph_is_the_users(device, models):
    _, flat, _ = models
    weights = []
    for model in models[:2]:
        loss = (model.bias.float() ** 3).sum()
        loss.backward(create_graph=True)
        weights.append(torch.autograd.grad(model.bias.grad.float().sum(), model.bias)[0])
    assert_bytes_equal(*weights, "second derivative")
    assert flat.bias.grad.requires_grad and not any(are_views(models))
    assert_same(models)


def test_what_a_user_assigns_is_copied_and_never_written(device, models):
    kept = []
    for model in models[:2]:
        backward(model, inputs(device, 0))
        assigned = torch.ones_like(model.bias).t()
        model.bias.grad = assigned
        model.shared.grad = torch.full((32, 32), 2.0, dtype=torch.bfloat16, device=device).t()
        kept.append(assigned)
    assert_same(models)
    assert are_views(models) == [False, False, True]
    assert kept[1].eq(1).all()
    for model in models[:2]:
        backward(model, inputs(device, 1))
    assert_same(models)


def test_a_copy_of_the_model_has_gradients_of_its_own(device, models):
    _, flat, memory = models
    backward(flat, inputs(device, 0))
    before = memory.flat.clone()
    other = copy.deepcopy(flat)
    backward(other, inputs(device, 1))
    assert_bytes_equal(memory.flat, before, "flat")


def test_compiled(device, models):
    for model in models[:2]:
        compiled = torch.compile(model, backend="aot_eager")
        for step in range(2):
            backward(compiled, inputs(device, step))
    assert_same(models)
    assert all(are_views(models))


def test_two_optimizers_of_the_same_parameters(device, models):
    """As while a second one is built from the masters of the first."""
    plain, flat, _ = models
    parameters = list(flat.parameters())
    second = views_of(parameters)
    for step in range(2):
        for model in models[:2]:
            backward(model, inputs(device, step))
        assert_same(models)
        assert_same((plain, flat, second))


def test_the_memory_ends_with_its_owner(device):
    model = Model(device)
    parameters = list(model.parameters())
    memory = views_of(parameters)
    alive = weakref.ref(memory.flat)
    del memory
    gc.collect()
    assert alive() is None
    backward(model, inputs(device, 0))
    assert all(p.grad is not None for p in parameters)
    assert not model.bias._post_accumulate_grad_hooks
