"""What the tests of FusedAdamW share: options, gradients, and what its updates must be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from unittest import mock

import pytest
import torch
from helpers import assert_bytes_equal, assert_values_equal
from hypothesis import strategies as st

from zerofp4 import ops, reference
from zerofp4.optim import FusedAdamW

OPTIONS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
HYPERS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.0, 1e-3, 0.3]),
        "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.95), (0.5, 0.0), (0.95, 0.9999), (0.0, 0.0)]),
        "eps": st.sampled_from([1e-8, 1e-15, 0.1, 0.0]),
        "weight_decay": st.sampled_from([0.0, 0.01, 1.0]),
        "maximize": st.booleans(),
    }
)
STATE = ("exp_avg", "exp_avg_sq")
COMPACT_STATE = ("exp_avg_codes", "exp_avg_sq_codes", "scales")
each_state = pytest.mark.parametrize("state", ["full", "compact"])


def is_compact(p: torch.Tensor) -> bool:
    """Whether state="compact" keeps codes of it."""
    return p.dim() > 1 and p.shape[-1] >= 64


class Alone(FusedAdamW):
    """Keeps its amaxes to itself: plans compute them."""

    def offer_parts(self, parts, present=None):
        super().offer_parts([(params, None) for params, _ in parts], present)


def set_gradient(p: torch.Tensor, gradient: torch.Tensor | None) -> None:
    p.grad = None
    if gradient is not None:
        p.grad_dtype = gradient.dtype
        p.grad = gradient


def set_random_gradients(parameters: Iterable[torch.Tensor]) -> None:
    for p in parameters:
        set_gradient(p, torch.randn_like(p))


def step_alike(one: FusedAdamW, parameters: list[torch.Tensor], other, copies: list[torch.Tensor]) -> None:
    """A step of both optimizers with the same gradients, from the values of one."""
    for p, q in zip(parameters, copies, strict=True):
        q.copy_(p)
        q.grad = p.grad = torch.randn_like(p)
    one.step()
    other.step()


@contextlib.contextmanager
def stages_of_plans():
    """The names of the stages that plans of the extension run meanwhile."""
    names, run = [], ops.NativePlan.run

    def note(plan, stage, *arguments):
        names.append(stage)
        run(plan, stage, *arguments)

    with mock.patch.object(ops.NativePlan, "run", note):
        yield names


class Expected:
    """What reference.adamw_step makes of copies of an optimizer's parameters, option by option, and
    reference.compact_adamw_step of those that are large enough in a group with state="compact".
    """

    def __init__(self, optimizer: FusedAdamW):
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.masters = [p.detach().clone() for p in self.parameters]
        groups = [optimizer.defaults | group for group in optimizer.param_groups for _ in group["params"]]
        pairs = zip(self.parameters, groups, strict=True)
        self.compact = [group["state"] == "compact" and is_compact(p) for p, group in pairs]
        self.moments = [
            reference.no_moments(p.shape[:-1].numel(), p.shape[-1])
            if compact
            else [torch.zeros_like(p) for _ in STATE]
            for p, compact in zip(self.masters, self.compact, strict=True)
        ]
        self.steps = [0] * len(self.masters)

    def compare_steps(self, steps=range(1), gradient=lambda step, i, p: torch.randn_like(p)) -> None:
        """Steps of both; gradients, made of step, number of the parameter and parameter, stay as they are."""
        for step in steps:
            for i, p in enumerate(self.parameters):
                set_gradient(p, gradient(step, i, p))
            before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
            self.step()
            self.optimizer.step()
            self.check(f"step {step}:")
            for i, (p, old) in enumerate(zip(self.parameters, before, strict=True)):
                if old is not None:
                    assert_bytes_equal(p.grad, old, f"step {step}: gradient {i}")

    def step(self) -> None:
        """Before the optimizer's: with the gradients and options as they are then."""
        groups = [group for group in self.optimizer.param_groups for _ in group["params"]]
        for i, (p, group) in enumerate(zip(self.parameters, groups, strict=True)):
            if p.grad is None:
                continue
            self.steps[i] += 1
            options = {name: group[name] for name in (*OPTIONS, "maximize")} | {"lr": float(group["lr"])}
            factor = self.optimizer.clip_factor
            self.update(i, p.grad if factor is None else p.grad.float() * factor, **options)

    def update(self, i: int, gradient: torch.Tensor, **options) -> None:
        master, moments, step = self.masters[i], self.moments[i], self.steps[i]
        if not self.compact[i]:
            self.masters[i], *self.moments[i] = reference.adamw_step(
                master, gradient, *moments, step, **options
            )
            return
        rows = (tensor.cpu().reshape(-1, master.shape[-1]) for tensor in (master, gradient))
        updated, self.moments[i] = reference.compact_adamw_step(*rows, moments, step, number=None, **options)
        self.masters[i] = updated.view(master.shape).to(master.device)

    def check(self, what: str = "") -> None:
        for i, p in enumerate(self.parameters):
            assert_values_equal(p.detach(), self.masters[i], f"{what} parameter {i}")
            state = self.optimizer.state.get(p)
            assert (state is None) == (self.steps[i] == 0)
            if state is not None:
                assert state["step"].item() == self.steps[i]
                assert state["step"].device == p.device and state["step"].dtype == torch.float32
                self.check_moments(i, state, what)

    def check_moments(self, i: int, state: dict[str, torch.Tensor], what: str) -> None:
        names = COMPACT_STATE if self.compact[i] else STATE
        assert state.keys() == {"step", *names}
        for name, moment in zip(names, self.moments[i], strict=True):
            if not self.compact[i]:
                assert_values_equal(state[name], moment, f"{what} {name} {i}")
                continue
            assert state[name].shape == (*self.parameters[i].shape[:-1], *moment.shape[1:]), name
            assert_bytes_equal(state[name].cpu().view(moment.shape), moment, f"{what} {name} {i}")
