"""Saving and loading the state of ZeroFP4Optimizer, in one process."""

import copy
import io
import math
from unittest import mock

import pytest
import torch
from cases.optim import (
    SPECIFICATIONS,
    assert_all_equal,
    assert_weights_follow,
    batch,
    built,
    make_net,
    make_parameters,
    take_step,
    through_a_file,
    unchanged,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer
from zerofp4.optim.state_dict import CODES, SavedState


def run_steps(net, optimizer, scheduler, steps):
    for step in steps:
        net(batch(net.first.bias.device, step)).square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def build(device):
    net = make_net(device)
    groups = [{"params": [p for p in net.parameters() if p.dim() > 1]}]
    groups.append({"params": [p for p in net.parameters() if p.dim() < 2], "lr": 0.02})
    optimizer = ZeroFP4Optimizer(groups, torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    return net, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def parameter_values(net):
    return [p.detach().float() for p in net.parameters()]


def entry(i, name, value):
    """A change to one entry of the state."""
    return lambda s: s["state"][i].update({name: value(s["state"][i][name])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(param_groups=s["param_groups"][:1]), r"does not fit: first\.bias is missing"),
        (lambda s: s["param_groups"][0].pop("params"), "state_dict cannot be loaded: KeyError: 'params'"),
        (lambda s: s["param_groups"][0].update(lr=-1.0), "Invalid learning rate: -1.0"),
        (lambda s: s["param_groups"][0].update(lr=math.nan), r"\[.lr.\] must be finite, got nan"),
        (entry(1, "master", lambda _: torch.zeros(5)), r"\.master has shape \(5,\), here \(6, 48\)"),
        (lambda s: s["state"][0]["master"].__create_chunk_list__(), r"\.master is not whole in the check"),
        (entry(1, "exp_avg", lambda _: None), r"second\.weight\.exp_avg is missing"),
        (entry(0, "exp_avg_sq", lambda _: "0.5"), "state_dict cannot be loaded: AttributeError"),
        (entry(0, "step", lambda _: torch.zeros(2)), r"\.step has shape \(2,\), here \(\)"),
        (entry(0, "step", lambda _: math.nan), r"\.step must be finite and not negative, got nan"),
        (entry(0, "step", lambda _: math.inf), r"\.step must be finite and not negative, got inf"),
        (entry(0, "step", lambda step: -step.whole()), r"\.step must be finite and not negative, got -1\.0"),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(device, change, message):
    net, optimizer, scheduler = build(device)
    run_steps(net, optimizer, scheduler, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    for entries in state["state"].values():
        entries["master"].values.fill_(7)
    for group in state["param_groups"]:
        group["lr"] = 7.0
    change(state)
    before = parameter_values(net)
    inner, groups = optimizer.inner.state, optimizer.inner.param_groups
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert_all_equal(parameter_values(net), before, "weight")
    assert optimizer.inner.state is inner and optimizer.inner.param_groups is groups
    assert all(group["lr"] != 7 for group in [*optimizer.param_groups, *groups])
    run_steps(net, optimizer, scheduler, range(1))


def test_other_groups_are_refused_without_names(device):
    parameters, optimizer = built(device)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["params"].pop()
    message = r"param_groups have \[8\] parameters, and these \[9\]; .* with named_parameters\(\)"
    with unchanged(parameters, optimizer), pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("plane", ["master_high", "master_low"])
def test_half_of_a_master_of_24_bits_is_refused(device, plane):
    parameters = [torch.nn.Parameter(torch.randn(4, 64, device=device, dtype=torch.bfloat16))]
    optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, lr=0.1, state="compact")
    take_step(parameters, optimizer, 0)
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][0][plane]
    with unchanged(parameters, optimizer), pytest.raises(ValueError, match=rf"\.{plane} is missing"):
        optimizer.load_state_dict(state)
    assert set(optimizer.state[parameters[0]]) == {"master_high", "master_low", "step", *CODES}


def test_its_own_state_must_have_every_parameter(device):
    """Only the state of another optimizer may lack one, which is new in this one."""
    net = make_net(device)
    optimizer = ZeroFP4Optimizer(net.named_parameters(), lr=0.1)
    state = optimizer.state_dict()
    for key in ("params", "param_names"):
        state["param_groups"][0][key].pop()
    with pytest.raises(ValueError, match=r"state_dict does not fit: second\.bias is missing"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("lacks", ["all of its entries", "its master"])
def test_masters_of_some_parameters_alone_are_refused(device, lacks):
    """They would be trained beside those of another model."""
    net, optimizer, scheduler = build(device)
    run_steps(net, optimizer, scheduler, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    if lacks == "its master":
        del state["state"][1]["master"]
    else:
        del state["state"][1]
    message = r"does not fit: second\.weight\.master is missing"
    with unchanged(list(net.parameters()), optimizer), pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)


def test_load_into_parameters_that_were_moved(device):
    """Trainers move a model and have its optimizer load its own state. Without masters in that state, the
    parameters' values would be lost; of parameters that stay, masters follow what was written.
    """
    net, optimizer, scheduler = build(device)
    run_steps(net, optimizer, scheduler, range(1))
    before, state = parameter_values(net), copy.deepcopy(optimizer.state_dict())
    for p in (net.norm.weight, net.norm.bias):
        p.data = torch.full_like(p.data, 7)
    for entries in state["state"].values():
        del entries["master"]
    with pytest.raises(ValueError, match=r"no master of .*'norm\.weight' has moved since"):
        optimizer.load_state_dict(state)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_all_equal(parameter_values(net), before, "weight")
    with torch.no_grad():
        net.first.weight.fill_(1)
    optimizer.load_state_dict(state)
    assert (net.first.weight.dequantize() == 1).all()
    run_steps(net, optimizer, scheduler, range(1))


def test_its_own_state_brings_masters_back_and_a_saved_one_what_was_written(device):
    """FP32 parameters are their own masters: what was written to them stays."""
    parameters, optimizer = built(device, seed=0)
    optimizer.step()
    masters = optimizer.gathered_masters()
    with torch.no_grad():
        for p in parameters:
            p.zero_()
    own, saved = copy.deepcopy(optimizer.state_dict()), through_a_file(optimizer.state_dict())
    optimizer.load_state_dict(own)
    kept = [dtype == torch.float32 and not is_quantized for _, dtype, is_quantized in SPECIFICATIONS]
    expected = [torch.zeros_like(m) if stays else m for stays, m in zip(kept, masters, strict=True)]
    assert_all_equal(optimizer.gathered_masters(), expected, "master")
    assert_weights_follow(parameters, expected)
    for state in (own, saved):  # a load has made the first one that of an earlier moment
        take_step(parameters, optimizer, 1)
        optimizer.load_state_dict(state)
        assert not any(master.any() for master in optimizer.gathered_masters())


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [(torch.optim.NAdam, {}), (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5})],
)
def test_a_state_from_before_the_first_step(device, optimizer_class, options):
    """It is saved as zeros, with which these classes do not begin."""
    pairs = []
    for _ in range(2):
        parameters = make_parameters(device)
        pairs.append((parameters, ZeroFP4Optimizer(parameters, optimizer_class, lr=0.1, **options)))
    (_, first), (_, second) = pairs
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for parameters, optimizer in pairs:
        take_step(parameters, optimizer, 0)
    assert_all_equal(second.gathered_masters(), first.gathered_masters(), "master")


def test_options_come_as_what_they_are_here(device):
    """An lr as a tensor; initial_lr is for a scheduler that goes on."""
    first = ZeroFP4Optimizer(make_parameters(device), lr=0.125)
    torch.optim.lr_scheduler.ExponentialLR(first, 0.5)
    lr = torch.tensor(0.5, device=device)
    second = ZeroFP4Optimizer(make_parameters(device), FusedAdamW, lr=lr)
    second.load_state_dict(first.state_dict())
    (group,) = second.param_groups
    assert torch.is_tensor(group["lr"]) and group["lr"] == group["initial_lr"] == 0.125


class WithANumber(torch.optim.SGD):
    """Keeps a Python number for each parameter."""

    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["count"] = self.state[p].get("count", 0) + 1


def test_a_python_number_stays_one(device):
    parameters = make_parameters(device)
    optimizer = ZeroFP4Optimizer(parameters, WithANumber, lr=0.1)
    for seed in range(2):
        take_step(parameters, optimizer, seed)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    counts = [state["count"] for state in optimizer.inner.state.values()]
    assert counts and all(type(count) is int and count == 2 for count in counts)


def test_torch_save_writes_nothing_else(device):
    net, optimizer, scheduler = build(device)
    run_steps(net, optimizer, scheduler, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    assert file.tell() < 3 * 4 * sum(p.numel() for p in net.parameters()) + 40000


def test_hooks(device):
    net, optimizer, scheduler = build(device)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre step"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post step"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(f"load {state['extra']}"))
    run_steps(net, optimizer, scheduler, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre step", "post step", "load 1"]


class Counting(torch.optim.SGD):
    """steps: how many all optimizers of the class took."""

    steps = 0

    def step(self, closure=None):
        type(self).steps += 1
        return super().step(closure)


def test_what_is_kept_is_found_out_once_and_again_where_an_option_changes_it(device):
    """By a trial step, of which global hooks know nothing. A look at one parameter makes its pieces alone."""
    parameters = make_parameters(device)
    optimizer, steps = ZeroFP4Optimizer(parameters, Counting, lr=0.1), Counting.steps
    hooked, original = [], SavedState.piece
    handles = [
        register_optimizer_step_pre_hook(lambda *_: hooked.append("before")),
        register_optimizer_step_post_hook(lambda *_: hooked.append("after")),
    ]
    try:
        for _ in range(2):
            assert "momentum_buffer" not in optimizer.state_dict()["state"][0]
        assert Counting.steps == steps + 1
        optimizer.param_groups[0]["momentum"] = 0.9
        for _ in range(2):
            assert "momentum_buffer" in optimizer.state_dict()["state"][0]
        with mock.patch.object(SavedState, "piece", autospec=True, side_effect=original) as made:
            assert set(optimizer.state[parameters[-1]]) == {"master", "momentum_buffer", "started"}
        assert made.call_count == 3
        assert Counting.steps == steps + 2 and hooked == []
        optimizer.step()
        assert set(hooked) == {"before", "after"}
    finally:
        for handle in handles:
            handle.remove()
