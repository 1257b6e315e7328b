"""ZeroFP4Optimizer over FusedAdamW, whose steps leave the amaxes that publishing the weights needs."""

import copy
from unittest import mock

import pytest
import torch
from cases.optim import (
    Plain,
    assert_all_equal,
    assert_weights_follow,
    built,
    check,
    make_gradients,
    set_gradients,
)
from distributed.optim.fused_cases import Alone, stages_of_plans

from zerofp4.cast import CastPlan
from zerofp4.optim import FusedAdamW

DEFAULTS = {"lr": 0.01, "weight_decay": 0.1}


@pytest.fixture
def stages():
    """The stages that plans run: begin_amax where they compute amaxes themselves."""
    with stages_of_plans() as names:
        yield names


def take_step(parameters, optimizer, step, factor=1):
    set_gradients(parameters, [factor * gradient for gradient in make_gradients(parameters, step)])
    optimizer.step()


@pytest.mark.parametrize(("optimizer_class", "passes"), [(FusedAdamW, 0), (Alone, 5)])
def test_the_same_bytes_without_the_amax_pass(device, stages, optimizer_class, passes):
    parameters, optimizer = built(device, optimizer_class, **DEFAULTS)
    plain = Plain(parameters, FusedAdamW, **DEFAULTS)
    stages.clear()
    for step in range(5):
        gradients = make_gradients(parameters, step)
        set_gradients(parameters, [g if (i + step) % 4 else None for i, g in enumerate(gradients)])
        plain.step()
        optimizer.step()
        check(optimizer, plain, f"step {step}:")
    assert stages.count("begin_amax") == passes
    assert optimizer.found_inf.item() == 0


def test_loaded_masters_are_not_cast_with_amaxes_left_before(device):
    """An error after the update leaves amaxes which belong to masters that are then loaded over."""
    parameters, optimizer = built(device, FusedAdamW, **DEFAULTS)
    take_step(parameters, optimizer, 0)
    state, masters = copy.deepcopy(optimizer.state_dict()), optimizer.gathered_masters()
    with mock.patch.object(CastPlan, "start_step", side_effect=RuntimeError("no step today")):
        with pytest.raises(RuntimeError, match="no step today"):
            take_step(parameters, optimizer, 1, factor=10)
    optimizer.load_state_dict(state)
    assert_all_equal(optimizer.gathered_masters(), masters, "master")
    assert_weights_follow(parameters, masters)


class Multiplied(FusedAdamW):
    """Writes to its masters after it has left their amaxes."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for master in self.param_groups[0]["params"]:
            master.mul_(3)
        return loss


def test_masters_written_after_the_update_are_not_cast_with_its_amaxes(device, stages):
    parameters, optimizer = built(device, Multiplied, **DEFAULTS)
    stages.clear()
    for step in range(3):
        take_step(parameters, optimizer, step)
        assert_weights_follow(parameters, optimizer.gathered_masters())
    assert stages.count("begin_amax") == 3
