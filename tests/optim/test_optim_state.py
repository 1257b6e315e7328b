"""Saving and loading the state of ZeroFP4Optimizer, in one process."""

import copy
import io

import pytest
import torch
from optim_cases import (
    OPTIMIZERS,
    assert_all_equal,
    assert_weights_follow,
    batch,
    make_net,
    make_parameters,
)
from torch.testing._internal.two_tensor import TwoTensor

from zerofp4.optim import ZeroFP4Optimizer


def run_steps(net, optimizer, scheduler, steps):
    for step in steps:
        net(batch(net.first.bias.device, step)).square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def build(device, seed, name="adamw"):
    net = make_net(device, seed)
    optimizer_class, defaults = OPTIMIZERS[name]
    groups = [{"params": [p for p in net.parameters() if p.dim() > 1]}]
    groups.append({"params": [p for p in net.parameters() if p.dim() < 2], "lr": 0.02})
    optimizer = ZeroFP4Optimizer(groups, optimizer_class, **defaults)
    return net, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adagrad", "nadam"])
def test_a_resumed_run_is_the_same_run(device, name):
    through = build(device, 0, name)
    run_steps(*through, range(6))
    stopped = build(device, 0, name)
    run_steps(*stopped, range(3))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in stopped[1:]], file)
    file.seek(0)
    resumed = build(device, 1, name)
    for part, state in zip(resumed[1:], torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert_weights_follow(list(resumed[0].parameters()), optimizer_order(resumed))
    run_steps(*resumed, range(3, 6))
    assert_all_equal(resumed[1].gathered_masters(), through[1].gathered_masters(), "master")
    assert_all_equal(parameter_values(resumed[0]), parameter_values(through[0]), "weight")
    assert [g["lr"] for g in resumed[1].param_groups] == [g["lr"] for g in through[1].param_groups]
    assert resumed[1].state is resumed[1].inner.state and len(resumed[1].state) == 6


def optimizer_order(built):
    """The gathered masters in the order of the net's parameters."""
    net, optimizer, _ = built
    order = [id(p) for group in optimizer.param_groups for p in group["params"]]
    by_parameter = dict(zip(order, optimizer.gathered_masters(), strict=True))
    return [by_parameter[id(p)] for p in net.parameters()]


def parameter_values(net):
    return [p.detach().float() for p in net.parameters()]


def test_load_before_the_first_backward_restores_written_weights(device):
    net, optimizer, _ = build(device, 0)
    state = copy.deepcopy(optimizer.state_dict())
    expected = parameter_values(net)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.ones(p.shape, device=device))
    optimizer.load_state_dict(state)
    assert_all_equal(parameter_values(net), expected, "weight")
    optimizer.step()


def test_saved_masters_are_no_larger_than_they_have_to_be(device):
    _, optimizer, _ = build(device, 0)
    for kind, masters in optimizer.state_dict()["masters"].items():
        assert masters.untyped_storage().nbytes() == 4 * masters.numel(), kind


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("masters"), "it has no masters"),
        (lambda s: s["fingerprint"].update(world_size=2), "saved by rank 0 of 2 and this is rank 0 of 1"),
        (lambda s: s["fingerprint"].update(rank=1), "saved by rank 1 of 1 and this is rank 0 of 1"),
        (lambda s: s["fingerprint"].update(layout="x"), "other parameters, groups or another optimizer"),
        (lambda s: s["masters"].pop("nvfp4"), "masters of kind 'nvfp4' must have"),
        (lambda s: s["param_groups"].pop(), r"param_groups have \[2\] parameters"),
        (lambda s: s.update(state=[]), "state must be a dict, got list"),
        (
            lambda s: s["masters"].update(nvfp4=torch.zeros(3)),
            r"elements of float32, got torch.float32 \[3\]",
        ),
        (lambda s: s["masters"].update(nvfp4=s["masters"]["nvfp4"].half()), "got torch.float16"),
        (lambda s: s["masters"].update(nvfp4=s["masters"]["nvfp4"].to("meta")), "on meta"),
        (lambda s: s["param_groups"][0].update(params=[1, 0]), "must number the parameters 0, 1, 2"),
        (lambda s: s["param_groups"][0].pop("params"), "cannot be loaded: KeyError: 'params'"),
        (lambda s: s["state"].update({6: {}}), r"state\[6\] is of no parameter, there are 6 here"),
        (lambda s: s["state"].update({"0": {}}), r"state\['0'\] is of no parameter"),
        (lambda s: s["state"].update({2: []}), r"state\[2\] must be a dict, got list"),
        (
            lambda s: s["state"][1].update(exp_avg=torch.zeros(5)),
            r"state\[1\]\['exp_avg'\] must be one element or 1D with the 288 of its master, got",
        ),
        (
            lambda s: s["masters"].update(nvfp4=s["masters"]["nvfp4"].to_sparse()),
            r"elements of float32, got torch.float32 \[2048\] on \S+ of layout torch.sparse_coo",
        ),
        (
            lambda s: s["masters"].update(nvfp4=TwoTensor(s["masters"]["nvfp4"], s["masters"]["nvfp4"])),
            r"got torch.float32 \[2048\] on \S+ in a TwoTensor",
        ),
        (lambda s: s["masters"].update(float32=None), "elements of float32, got NoneType"),
        (lambda s: s["state"][1].update(exp_avg=None), r"state\[1\]\['exp_avg'\] must be .*, got NoneType"),
        (lambda s: s["state"][0].update(exp_avg_sq="0.5"), r"state\[0\]\['exp_avg_sq'\] must be .*, got str"),
        (
            lambda s: s["state"][1].update(exp_avg=s["state"][1]["exp_avg"].to_sparse()),
            r"with the 288 of its master, got torch.float32 \[288\] on \S+ of layout torch.sparse_coo",
        ),
        (
            lambda s: s["state"][1].update(exp_avg=s["state"][1]["exp_avg"].to("meta")),
            r"got torch.float32 \[288\] on meta",
        ),
        (lambda s: s.update(steps=-1), "steps must be an int, 0 or more, got -1"),
        (lambda s: s.update(steps="1"), "steps must be an int, 0 or more, got '1'"),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(device, change, message):
    net, optimizer, scheduler = build(device, 0)
    run_steps(net, optimizer, scheduler, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    for masters in state["masters"].values():
        masters.fill_(7)
    for group in state["param_groups"]:
        group["lr"] = 7.0
    change(state)
    before = parameter_values(net)
    inner, groups = optimizer.inner.state, optimizer.inner.param_groups
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert_all_equal(parameter_values(net), before, "weight")
    assert optimizer.state is optimizer.inner.state is inner and optimizer.inner.param_groups is groups
    assert all(group["lr"] != 7 for group in [*optimizer.param_groups, *groups])
    run_steps(net, optimizer, scheduler, range(1))


def test_load_into_parameters_that_were_moved(device):
    net, optimizer, _ = build(device, 0)
    state = copy.deepcopy(optimizer.state_dict())
    net.norm.weight.data = net.norm.weight.data.clone()
    with pytest.raises(ValueError, match=r"param_groups\[1\]\['params'\]\[\d\] has moved since"):
        optimizer.load_state_dict(state)


def test_an_exception_of_the_inner_optimizers_load_changes_nothing(device):
    class Failing(torch.optim.SGD):
        def __setstate__(self, state):
            super().__setstate__(state)
            raise KeyError("momentum")

    optimizer = ZeroFP4Optimizer(make_parameters(device), Failing, lr=0.1)
    state, groups = optimizer.inner.state, optimizer.inner.param_groups
    with pytest.raises(ValueError, match="state_dict cannot be loaded: KeyError: 'momentum'"):
        optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.inner.state is state and optimizer.inner.param_groups is groups


def test_state_of_another_model_or_class(device):
    _, optimizer, _ = build(device, 0)
    other = ZeroFP4Optimizer(make_parameters(device))
    with pytest.raises(ValueError, match="other parameters, groups or another optimizer class"):
        optimizer.load_state_dict(other.state_dict())
    _, sgd, _ = build(device, 0, "sgd")
    with pytest.raises(ValueError, match="other parameters, groups or another optimizer class"):
        optimizer.load_state_dict(sgd.state_dict())
    with pytest.raises(ValueError, match="not one of a ZeroFP4Optimizer: it has no masters, fingerprint"):
        optimizer.load_state_dict(optimizer.inner.state_dict())


def test_a_state_dict_must_be_a_dict(device):
    with pytest.raises(TypeError, match="state_dict must be a dict, got list"):
        build(device, 0)[1].load_state_dict([])


def test_hooks(device):
    net, optimizer, _ = build(device, 0)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre step"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post step"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(f"load {state['extra']}"))
    run_steps(net, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer), range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre step", "post step", "load 1"]


def test_steps_are_counted_over_a_restart(device):
    net, optimizer, scheduler = build(device, 0)
    run_steps(net, optimizer, scheduler, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    assert state["steps"] == 2
    _, resumed, _ = build(device, 1)
    resumed.load_state_dict(state)
    assert resumed.state_dict()["steps"] == 2
    del state["steps"]  # saved before they were counted
    resumed.load_state_dict(state)
    assert resumed.state_dict()["steps"] == 0
