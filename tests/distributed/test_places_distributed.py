"""p.grad that lie in the memory of another parameter's gradient: a step takes what each parameter has."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import assert_bytes_equal
from torch import nn
from torch.nn import functional as F

import zerofp4
from distributed.cases import raised_by
from distributed.run import on_ranks
from zerofp4.engine import places
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


def own_memory(model):
    """The same gradients, each in memory that nobody else has."""
    for p in model.parameters():
        p.grad = p.grad.clone()


def assert_same(model, optimizer, expected, expected_optimizer, what):
    grads = [[p.grad for p in one.parameters()] for one in (model, expected)]
    for i, (mine, theirs) in enumerate(zip(*grads, strict=True)):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert_bytes_equal(mine.contiguous(), theirs.contiguous(), f"{what}: p.grad {i}")
    masters = [one.gathered_masters() for one in (optimizer, expected_optimizer)]
    for i, (mine, theirs) in enumerate(zip(*masters, strict=True)):
        assert_bytes_equal(mine, theirs, f"{what}: master {i}")


@on_ranks(2)
@pytest.mark.parametrize("bucket_mb", [TOGETHER, APART])
@pytest.mark.parametrize("change", list(CHANGES))
def test_a_step_takes_what_each_parameter_has(world, change, bucket_mb):
    """In buckets and in sequence, clipped or not; p.grad are as they were assigned, after the step too."""
    for cls, clip in ((FusedAdamW, False), (FusedAdamW, True), (torch.optim.AdamW, False)):
        pairs = [build(world, cls, bucket_mb) for _ in range(2)]
        for step in range(2):
            for one, its_optimizer in pairs:
                its_optimizer.zero_grad()
                backward(world, one, step)
                if one is pairs[1][0]:
                    own_memory(one)
                CHANGES[change](one)
                if clip:
                    its_optimizer.clip_grad_norm_(0.3)
                its_optimizer.step()
            assert_same(*pairs[0], *pairs[1], f"{cls.__name__}, clip {clip}, step {step}")


@on_ranks(2, 3)
@pytest.mark.parametrize("bucket_mb", [TOGETHER, APART])
@pytest.mark.parametrize("change", ["exchanged", "rotated"])
def test_a_backward_pass_adds_to_what_was_exchanged(world, change, bucket_mb):
    pairs = [build(world, FusedAdamW, bucket_mb) for _ in range(2)]
    for one, its_optimizer in pairs:
        for step in range(3):
            backward(world, one, step)
            if one is pairs[1][0]:
                own_memory(one)
            if step == 0:
                CHANGES[change](one)
        its_optimizer.step()
    assert_same(*pairs[0], *pairs[1], change)


@on_ranks(2)
def test_memory_that_a_clone_lacks_ends_the_step_on_every_rank(world):
    """Before anything has changed."""
    model, optimizer = build(world, FusedAdamW, APART)
    masters = optimizer.gathered_masters()
    backward(world, model, 0)
    exchanged(model)
    kept = [p.grad.clone() for p in model.parameters()]
    error = torch.OutOfMemoryError("no memory today")
    lacking = mock.patch.object(places.GradientPlaces, "hold", side_effect=error)
    with lacking if world.rank == 1 else contextlib.nullcontext():
        raised = raised_by(optimizer.step)
    dist.barrier()
    if world.rank == 1:
        assert raised is error
    else:
        assert isinstance(raised, RuntimeError) and "rank 1 found an error" in str(raised)
    for i, (now, before) in enumerate(zip(optimizer.gathered_masters(), masters, strict=True)):
        assert_bytes_equal(now, before, f"master {i}")
    for i, (p, before) in enumerate(zip(model.parameters(), kept, strict=True)):
        assert_bytes_equal(p.grad, before, f"gradient {i}")
    optimizer.step()
