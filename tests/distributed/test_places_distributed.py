"""p.grad that lie in the memory of another parameter's gradient: no step takes them."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_bytes_equal
from torch import nn
from torch.nn import functional as F

import zerofp4
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

SIZE = 32
TOGETHER, APART = None, 1e-4
"""bucket_mb: all weights of a kind in one bucket, each in its own."""


class Model(nn.Module):
    """Four NVFP4 weights of one shape and two bf16 vectors."""

    def __init__(self, device):
        super().__init__()
        generator = torch.Generator().manual_seed(5)

        def values(*shape):
            return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

        self.weights = nn.ParameterList(
            nn.Parameter(zerofp4.quantize(values(SIZE, SIZE), columnwise=True)) for _ in range(4)
        )
        self.vectors = nn.ParameterList(nn.Parameter(values(SIZE)) for _ in range(2))

    def forward(self, x):
        for weight in self.weights:
            x = F.linear(x, weight).relu() + x
        return x * self.vectors[0] + self.vectors[1]


def exchanged(model):
    a, b, *_ = model.weights
    a.grad, b.grad = b.grad, a.grad


def exchanged_backwards(model):
    *_, a, b = model.weights
    b.grad, a.grad = a.grad, b.grad


def rotated(model):
    a, b, c, _ = model.weights
    a.grad, b.grad, c.grad = b.grad, c.grad, a.grad


def shared(model):
    a, b, c, d = model.weights
    b.grad, d.grad = a.grad, c.grad


def handed_on(model):
    """One place is the next one's, and its own parameter has another gradient or none."""
    a, b, c, d = model.weights
    b.grad, a.grad = a.grad, torch.ones_like(a.grad)
    c.grad, d.grad = d.grad, None


def turned(model):
    for weight in model.weights:
        weight.grad = weight.grad.t()


def parts(model):
    weight, one, other = model.weights[2], *model.vectors
    one.grad, other.grad = weight.grad[3], weight.grad[:, 5]
    weight.grad = None


CHANGES = {c.__name__: c for c in (exchanged, exchanged_backwards, rotated, shared, handed_on, turned, parts)}


def build(world, cls, bucket_mb):
    model = Model(world.device)
    options = {"lr": 0.02, "betas": (0.9, 0.99), "weight_decay": 0.1}
    return model, ZeroFP4Optimizer(model.parameters(), cls, bucket_mb=bucket_mb, **options)


def backward(world, model, step):
    generator = torch.Generator().manual_seed(10 * step + world.rank)
    x = torch.randn(8, SIZE, generator=generator).to(world.device, torch.bfloat16)
    model(x).float().square().mean().backward()


@on_ranks(2)
@pytest.mark.parametrize("bucket_mb", [TOGETHER, APART])
@pytest.mark.parametrize("change", list(CHANGES))
def test_gradients_in_the_memory_of_another_are_refused(world, change, bucket_mb):
    """By every rank, before anything has changed; clones of the same gradients are taken."""
    model, optimizer = build(world, FusedAdamW, bucket_mb)
    masters = optimizer.gathered_masters()
    backward(world, model, 0)
    if world.rank == 1:
        CHANGES[change](model)
    others = "rank 1 found an error, and no rank takes this step"
    found = "exchanged, shared or transposed" if world.rank == 1 else others
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(0.3)):
        with pytest.raises(RuntimeError, match=found):
            call()
    for i, (now, before) in enumerate(zip(optimizer.gathered_masters(), masters, strict=True)):
        assert_bytes_equal(now, before, f"master {i}")
    for p in model.parameters():
        p.grad = None if p.grad is None else p.grad.clone()
    optimizer.step()
    assert optimizer.skipped_steps == 0
