"""Tensors for the tests of FusedAdamW, and what it must make of them."""

from __future__ import annotations

import torch
from helpers import assert_values_equal

from zerofp4 import reference

OPTIONS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
STATE = ("exp_avg", "exp_avg_sq")


def set_gradient(p: torch.Tensor, gradient: torch.Tensor | None) -> None:
    p.grad = None
    if gradient is not None:
        p.grad_dtype = gradient.dtype
        p.grad = gradient


class Expected:
    """What reference.adamw_step makes of copies of an optimizer's parameters, option by option."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.masters = [p.detach().clone() for p in self.parameters]
        self.moments = [[torch.zeros_like(p) for _ in STATE] for p in self.masters]
        self.steps = [0] * len(self.masters)

    def step(self) -> None:
        """Before the optimizer's: with the gradients and options as they are then."""
        groups = [group for group in self.optimizer.param_groups for _ in group["params"]]
        for i, (p, group) in enumerate(zip(self.parameters, groups, strict=True)):
            if p.grad is None:
                continue
            self.steps[i] += 1
            options = {name: group[name] for name in (*OPTIONS, "maximize")}
            self.masters[i], *self.moments[i] = reference.adamw_step(
                self.masters[i],
                p.grad,
                *self.moments[i],
                self.steps[i],
                **options | {"lr": float(group["lr"])},
            )

    def check(self, what: str = "") -> None:
        for i, p in enumerate(self.parameters):
            assert_values_equal(p.detach(), self.masters[i], f"{what} parameter {i}")
            state = self.optimizer.state.get(p)
            assert (state is None) == (self.steps[i] == 0)
            if state is not None:
                assert state["step"].item() == self.steps[i]
                assert state["step"].device == p.device and state["step"].dtype == torch.float32
                for name, moment in zip(STATE, self.moments[i], strict=True):
                    assert_values_equal(state[name], moment, f"{what} {name} {i}")
