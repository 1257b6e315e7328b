"""What moves or is replaced under a ZeroFP4Optimizer: no step before refresh() or a new optimizer."""

import copy

import pytest
import torch
from cases.optim import (
    Net,
    assert_all_equal,
    assert_refused,
    batch,
    both,
    built,
    make_gradients,
    make_net,
    set_gradients,
    take_steps,
    unchanged,
)
from torch import nn

import zerofp4
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

DEFAULTS = {"lr": 0.01, "weight_decay": 0.1}


def share_master(optimizer, parameter):
    optimizer.state[parameter]["master"].values.share_memory_()


def replace_master(_, optimizer):
    master = optimizer._shards.masters[0]
    master.data = master.data.clone()


MOVES = {
    "codes": (lambda ps, _: setattr(ps[0], "rowwise_data", ps[0].rowwise_data.clone()), r"\['params'\]\[0\]"),
    "record": (lambda ps, _: setattr(ps[0], "data", ps[0].data.clone()), r"\['params'\]\[0\]"),
    "dense": (lambda ps, _: setattr(ps[1], "data", ps[1].data.clone()), r"\['params'\]\[1\]"),
    "own master": (lambda ps, _: setattr(ps[3], "data", ps[3].data.clone()), r"\['params'\]\[3\]"),
    "master": (replace_master, r"the master of .*\[0\]"),
}
# torch moves storages in place on the CPU only.
MOVES_IN_PLACE = {
    "shared codes": (lambda ps, _: ps[0].rowwise_data.share_memory_(), r"\['params'\]\[0\]: rowwise_data"),
    "shared dense": (lambda ps, _: ps[5].detach().share_memory_(), r"\['params'\]\[5\]"),
    "masters": (lambda ps, optimizer: share_master(optimizer, ps[0]), r"the master of .*\[0\]"),
    "found_inf": (lambda _, optimizer: optimizer.found_inf.share_memory_(), "found_inf"),
}


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, FusedAdamW])
@pytest.mark.parametrize("what", [*MOVES, *MOVES_IN_PLACE])
def test_no_step_after_a_move_and_the_same_steps_after_refresh(device, what, optimizer_class):
    if what in MOVES_IN_PLACE and device.type != "cpu":
        pytest.skip("torch does not move storages in place on a GPU")
    move, name = (MOVES | MOVES_IN_PLACE)[what]
    plain, optimizer = both(device, optimizer_class, **DEFAULTS)
    take_steps(plain, optimizer, [0])
    move(plain.parameters, optimizer)
    set_gradients(plain.parameters, make_gradients(plain.parameters, 1))
    with unchanged(plain.parameters, optimizer, optimizer.found_inf):
        assert_refused(optimizer, rf"{name}.* has moved since .* call refresh\(\)")
    if what != "master":  # a tensor of ours, whose buffer is of no more use
        optimizer.refresh()
        take_steps(plain, optimizer, [1, 2])


def test_refresh_in_inference_mode(device):
    """The parameters are those of training, as they were, whatever was assigned to them."""
    parameters, optimizer = built(device)
    with unchanged(parameters, optimizer):
        for i in (1, 3, 5):
            parameters[i].data = torch.full_like(parameters[i].data, 7)
        with torch.inference_mode():
            optimizer.refresh()
    assert not any(p.is_inference() for p in parameters)
    sum((p.dequantize() if hasattr(p, "record") else p).float().square().sum() for p in parameters).backward()
    optimizer.step()
    assert optimizer.found_inf.item() == 0


@pytest.mark.parametrize(("shape", "dtype"), [((300,), torch.float64), ((299,), torch.float16)])
def test_refresh_of_a_parameter_that_is_another(device, shape, dtype):
    parameters, optimizer = built(device)
    parameters[5].data = torch.zeros(shape, dtype=dtype, device=device)
    moved = parameters[0].rowwise_data = parameters[0].rowwise_data.clone()
    with pytest.raises(ValueError) as caught:
        optimizer.refresh()
    now = f"{str(dtype).removeprefix('torch.')} {shape}"
    assert f"['params'][5] was float16 (300,) on {device}, now it is {now} on" in str(caught.value)
    assert parameters[0].rowwise_data is moved


# Parameters that a model replaces


REPLACED = r"'params'\]\[\d\].* was replaced in its module since the optimizer was built"


def by_hand(net):
    net.first.weight = nn.Parameter(torch.zeros_like(net.first.bias).expand(32, 48).t().contiguous())


def assign(net):
    kind = type(net.first.weight.data)
    net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
    assert type(net.first.weight.data) is kind


@pytest.mark.parametrize(
    ("make", "replace"),
    [(Net, zerofp4.convert_model), (Net, assign), (make_net, assign), (make_net, by_hand)],
)
def test_a_parameter_that_is_replaced_and_put_back(device, make, replace):
    """Those that are not trained may be replaced."""
    net = Net().to(device) if make is Net else make(device)
    net.second.requires_grad_(False)
    optimizer = ZeroFP4Optimizer(net.parameters(), lr=0.1)
    net.second.bias = nn.Parameter(net.second.bias.detach().clone(), requires_grad=False)
    net(batch(device, 0)).square().mean().backward()
    optimizer.step()
    originals = dict(net.named_parameters())
    before = [master for master in optimizer.gathered_masters() if master is not None]
    replace(net)
    assert_refused(optimizer, REPLACED)
    after = [master for master in optimizer.gathered_masters() if master is not None]
    assert_all_equal(after, before, "master")
    for name, p in originals.items():
        module, _, own = name.rpartition(".")
        setattr(net.get_submodule(module), own, p)
    optimizer.step()
