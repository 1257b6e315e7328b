"""ZeroFP4Optimizer over FusedAdamW on several ranks: the bytes of a plan that takes the amaxes itself."""

from __future__ import annotations

import torch
from helpers import assert_bytes_equal
from optim_cases import make_gradients, set_gradients

from distributed.checks_optim import (
    Injected,
    assert_same_on_all_ranks,
    check_weights,
    model_bytes,
    parameters_of,
)
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW


class Alone(FusedAdamW):
    """Keeps its amaxes to itself: the plan takes them."""

    def offer_parts(self, parts, present=None):
        pass


@on_ranks(1, 2, 3)
def test_the_bytes_of_a_plan_that_takes_the_amaxes_itself(world):
    """Also where a rank has pieces of some weights only, or weights have no gradient on any rank."""
    models = [parameters_of(world) for _ in range(2)]
    options = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.99)}
    classes = (FusedAdamW, Alone)
    optimizers = [Injected(ps, cls, **options) for ps, cls in zip(models, classes, strict=True)]
    for step in range(4):
        gradients = make_gradients(models[0], step)
        gradients = [g if (i + step) % 3 else None for i, g in enumerate(gradients)]
        for parameters, optimizer in zip(models, optimizers, strict=True):
            set_gradients(parameters, gradients)
            optimizer.step()
        check_weights(models[0], optimizers[0])
        for i, (mine, theirs) in enumerate(zip(*map(model_bytes, models), strict=True)):
            assert_bytes_equal(mine, theirs, f"step {step}: buffer {i}")


@on_ranks(2)
def test_a_tensor_lr(world):
    parameters = parameters_of(world)
    lr = torch.tensor(0.1, device=world.device)
    optimizer = Injected(parameters, FusedAdamW, lr=lr)
    for step in range(3):
        set_gradients(parameters, make_gradients(parameters, step))
        optimizer.step()
        lr.mul_(0.5)
        assert_same_on_all_ranks(model_bytes(parameters))
