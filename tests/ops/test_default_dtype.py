"""Buffers are float32 where kernels read and write float32, whatever torch's default dtype is."""

import pytest
import torch
from cases.cast import check as check_cast
from cases.cast import make
from cases.optim import Plain, check, make_gradients, make_parameters, set_gradients
from helpers import assert_bytes_equal

import zerofp4
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


@pytest.fixture(autouse=True)
def bfloat16_by_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


def test_cast(device):
    weights, masters, starts = make(device)
    masters = [master.float() for master in masters]
    plan = zerofp4.CastPlan(weights, masters, starts)
    assert plan.staged.reduced.dtype == plan.found_inf.dtype == torch.float32
    plan.step()
    check_cast(weights, masters)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, FusedAdamW])
def test_optimizer(device, optimizer_class):
    parameters = make_parameters(device)
    plain, optimizer = Plain(parameters, optimizer_class), ZeroFP4Optimizer(parameters, optimizer_class)
    for step in range(2):
        set_gradients(parameters, make_gradients(parameters, step))
        plain.step()
        optimizer.step()
        check(optimizer, plain, f"step {step}")


def test_full_state_that_becomes_compact(device):
    p = torch.randn(40, 200, device=device, dtype=torch.float32)
    saved, states = FusedAdamW([p]), []
    p.grad = torch.randn_like(p)
    saved.step()
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        loaded = FusedAdamW([p], state="compact")
        loaded.load_state_dict(saved.state_dict())
        loaded.step()
        back = FusedAdamW([p])
        back.load_state_dict(loaded.state_dict())
        states.append((loaded.state[p], back.state[p]))
    for state in states[1:]:
        for mine, expected in zip(state, states[0], strict=True):
            for name, value in expected.items():
                assert_bytes_equal(mine[name], value, name)
