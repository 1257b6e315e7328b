"""Models whose gradients lie in flat memory, beside the same ones without."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from helpers import assert_bytes_equal
from torch import nn
from torch.nn import functional as F

import zerofp4
from zerofp4.engine import Bucket, GradientMemory

BF16 = torch.bfloat16


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
        self.memory.check(gradients, names)
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


def memory_of(parameters, dtype=BF16):
    buffer = Bucket(range(len(parameters)), parameters)
    shape = buffer.world_size, buffer.slice_numel
    return GradientMemory(buffer, torch.zeros(shape, dtype=dtype, device=buffer.device), set())


class Twice(nn.Module):
    """A weight in NVFP4, and what it is for: one product, or more."""

    def __init__(self, bias=True, dtype=BF16):
        super().__init__()
        self.weight = nn.Parameter(zerofp4.quantize(values(32, 32).to(dtype), columnwise=True))
        self.bias = nn.Parameter(values(32, seed=1).to(dtype)) if bias else None

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


def inputs(device, seed=0):
    return values(8, 32, seed=seed + 5).to(device, BF16).requires_grad_()


def back(model, device, seed=0, **options):
    model(inputs(device, seed), **options).float().square().mean().backward()
