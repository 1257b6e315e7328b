"""Parameters that a model replaces under its optimizer: the conversion or the next step says so."""

import copy

import pytest
import torch
from cases.optim import Net, assert_all_equal, batch, make_net
from helpers import collect_garbage
from torch import nn

import zerofp4
from zerofp4 import NVFP4Tensor
from zerofp4.optim import ZeroFP4Optimizer

REPLACED = r"'params'\]\[\d\].* was replaced in its module since the optimizer was built"


def train(net, optimizer, device):
    net(batch(device, 0)).square().mean().backward()
    optimizer.step()


def test_convert_model_after_the_optimizer(device):
    """Weights that are not trained may still be converted."""
    net = Net().to(device)
    net.second.requires_grad_(False)
    optimizer = ZeroFP4Optimizer(net.parameters())
    assert zerofp4.convert_model(net, lambda module, name: name == "second").converted == ["second"]
    train(net, optimizer, device)
    assert zerofp4.convert_model(net).converted == ["first"]
    with pytest.raises(RuntimeError, match=REPLACED):
        train(net, optimizer, device)


@pytest.mark.parametrize("converted", [False, True])
def test_load_state_dict_with_assign(device, converted):
    net = make_net(device) if converted else Net().to(device)
    optimizer = ZeroFP4Optimizer(net.parameters(), lr=0.1)
    train(net, optimizer, device)
    before = optimizer.gathered_masters()
    net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
    assert isinstance(net.first.weight, NVFP4Tensor) == converted
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0), optimizer.step):
        with pytest.raises(RuntimeError, match=REPLACED):
            call()
    assert_all_equal(optimizer.gathered_masters(), before, "master")
    train(net, ZeroFP4Optimizer(net.parameters(), lr=0.1), device)


def test_a_parameter_that_is_put_back_or_was_frozen(device):
    net = make_net(device)
    net.second.bias.requires_grad_(False)
    optimizer = ZeroFP4Optimizer(net.named_parameters())
    weight = net.first.weight
    net.first.weight = nn.Parameter(torch.zeros(48, 32, dtype=torch.bfloat16, device=device))
    with pytest.raises(RuntimeError, match=r"\['params'\]\[0\] 'first.weight' was replaced"):
        train(net, optimizer, device)
    net.first.weight = weight
    optimizer.step()
    net.second.bias = nn.Parameter(net.second.bias.detach().clone(), requires_grad=False)
    optimizer.step()
    gone = nn.Module()
    gone.bias = net.norm.bias
    gone.bias = nn.Parameter(torch.zeros(48, device=device))
    del gone
    collect_garbage()
    optimizer.step()
