"""Parameters that a model replaces under its optimizer: the conversion or the next step says so."""

import copy
import gc

import pytest
import torch
from helpers import assert_bytes_equal
from optim_cases import Net, batch, make_net
from torch import nn

import zerofp4
from zerofp4 import NVFP4Tensor
from zerofp4.optim import ZeroFP4Optimizer

REPLACED = r"'params'\]\[\d\].* was replaced in its module since the optimizer was built"


def run_backward(net, device):
    net(batch(device, 0)).square().mean().backward()


def test_convert_model_refuses_parameters_of_an_optimizer(device):
    net = Net().to(device)
    optimizer = ZeroFP4Optimizer(net.parameters())
    before = dict(net.named_parameters())
    with pytest.raises(RuntimeError, match="the weight of 'first' is held by a ZeroFP4Optimizer, which"):
        zerofp4.convert_model(net)
    assert all(now is before[name] for name, now in net.named_parameters())
    run_backward(net, device)
    optimizer.step()
    report = zerofp4.convert_model(net, lambda module, name: False)
    assert not report.converted
    optimizer.cycle = optimizer
    del optimizer
    assert zerofp4.convert_model(net).converted == ["first", "second"]


def test_convert_model_converts_what_the_optimizer_does_not_hold(device):
    net = Net().to(device)
    optimizer = ZeroFP4Optimizer([*net.first.parameters(), *net.norm.parameters(), net.second.bias])
    assert zerofp4.convert_model(net, lambda module, name: name == "second").converted == ["second"]
    run_backward(net, device)
    optimizer.step()


@pytest.mark.parametrize("converted", [False, True])
def test_load_state_dict_with_assign(device, converted):
    net = make_net(device) if converted else Net().to(device)
    optimizer = ZeroFP4Optimizer(net.parameters(), lr=0.1)
    run_backward(net, device)
    optimizer.step()
    before = optimizer.gathered_masters()
    net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
    assert isinstance(net.first.weight, NVFP4Tensor) == converted
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0), optimizer.step):
        with pytest.raises(RuntimeError, match=REPLACED):
            call()
    for master, old in zip(optimizer.gathered_masters(), before, strict=True):
        assert_bytes_equal(master, old, "master")
    optimizer = ZeroFP4Optimizer(net.parameters(), lr=0.1)
    run_backward(net, device)
    optimizer.step()


def test_a_parameter_that_is_put_back_or_is_in_another_module(device):
    net = make_net(device)
    tied = nn.Module()
    tied.bias = net.norm.bias
    optimizer = ZeroFP4Optimizer(net.parameters())
    weight = net.first.weight
    net.first.weight = nn.Parameter(torch.zeros(48, 32, dtype=torch.bfloat16, device=device))
    run_backward(net, device)
    with pytest.raises(RuntimeError, match=REPLACED):
        optimizer.step()
    net.first.weight = weight
    optimizer.step()
    net.norm.bias = nn.Parameter(torch.zeros(48, device=device))
    optimizer.step()
    del tied
    gc.collect()
    optimizer.step()  # nothing tells of a module that goes


def test_frozen_parameters_may_be_replaced(device):
    """The optimizer does nothing with them."""
    net = Net().to(device)
    net.first.requires_grad_(False)
    optimizer = ZeroFP4Optimizer(net.named_parameters())
    net.first.bias = nn.Parameter(net.first.bias.detach().clone(), requires_grad=False)
    assert zerofp4.convert_model(net, lambda module, name: name == "first").converted == ["first"]
    run_backward(net, device)
    optimizer.step()
    net.norm.bias = nn.Parameter(net.norm.bias.detach().clone())
    with pytest.raises(RuntimeError, match=r"\['params'\]\[\d\] 'norm.bias' was replaced"):
        optimizer.step()
