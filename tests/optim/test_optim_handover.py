"""masters_from: a new optimizer begins with the masters of the one before it."""

import copy

import pytest
import torch
from helpers import assert_bytes_equal
from optim_cases import Plain, assert_all_equal, check, make_gradients, make_parameters, set_gradients

from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


def trained(device, frozen=(), steps=3):
    parameters = make_parameters(device)
    for i in frozen:
        parameters[i].requires_grad_(False)
    optimizer = ZeroFP4Optimizer(parameters, lr=0.1, weight_decay=0.1)
    for step in range(steps):
        gradients = make_gradients(parameters, step)
        set_gradients(parameters, [None if i in frozen else g for i, g in enumerate(gradients)])
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, FusedAdamW])
def test_masters_are_those_of_the_optimizer_before(device, optimizer_class):
    """Also in another order, and with parameters that were frozen: these begin with their values."""
    parameters, old = trained(device, frozen=(1, 4))
    masters = old.gathered_masters()
    masters[1], masters[4] = (parameters[i].detach().float().clone() for i in (1, 4))
    assert not masters[0].equal(parameters[0].detach().float())  # the weight alone would not do
    for i in (1, 4):
        parameters[i].requires_grad_(True)
    order = [*range(4, 9), *range(4)]
    reordered = [parameters[i] for i in order]
    optimizer = ZeroFP4Optimizer(reordered, optimizer_class, masters_from=old, lr=0.1)
    assert_all_equal(optimizer.gathered_masters(), [masters[i] for i in order], "master")
    plain = Plain(reordered, optimizer_class, lr=0.1)
    with torch.no_grad():
        for master, i in zip(plain.masters, order, strict=True):
            master.copy_(masters[i])
    for step in range(3):
        set_gradients(reordered, make_gradients(reordered, step))
        plain.step()
        optimizer.step()
        check(optimizer, plain, f"step {step}:")


def test_every_bit_is_handed_over(device):
    values = torch.tensor([-0.0, 0.0, 1e-45, -1e-45, 3.4e38, 1.1], device=device)
    parameter = torch.nn.Parameter(values.to(torch.bfloat16))
    old = ZeroFP4Optimizer([parameter], torch.optim.SGD, lr=0.1)
    old.inner.param_groups[0]["params"][0].copy_(values)
    optimizer = ZeroFP4Optimizer([parameter], torch.optim.SGD, lr=0.1, masters_from=old)
    assert_bytes_equal(optimizer.gathered_masters()[0], values, "master")


def test_the_optimizer_before_takes_no_further_step(device):
    parameters, old = trained(device)
    optimizer = ZeroFP4Optimizer(parameters, masters_from=old)
    before = optimizer.gathered_masters()
    with pytest.raises(RuntimeError, match="has moved since the optimizer was built"):
        old.step()
    assert_all_equal(optimizer.gathered_masters(), before, "master")


def test_sources_that_are_refused(device):
    parameters, old = trained(device)
    strangers = make_parameters(device, seed=1)
    before = copy.deepcopy([p.detach().float() for p in parameters])
    with pytest.raises(TypeError, match="masters_from must be a ZeroFP4Optimizer, got AdamW"):
        ZeroFP4Optimizer(parameters, masters_from=old.inner)
    with pytest.raises(ValueError, match="masters_from has the master of none of the trainable parameters"):
        ZeroFP4Optimizer(strangers, masters_from=old)
    with torch.no_grad():
        parameters[4].zero_()
    with pytest.raises(
        ValueError, match=r"\['params'\]\[4\] was written to since the last step of masters_from"
    ):
        ZeroFP4Optimizer(parameters, masters_from=old)
    ZeroFP4Optimizer([*parameters[:4], *parameters[5:]], masters_from=old)
    assert_all_equal([p.detach().float() for p in parameters[:4]], before[:4], "parameter")
