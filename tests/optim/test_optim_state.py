"""Saving and loading the state of ZeroFP4Optimizer, in one process."""

import collections
import copy
import io
import math

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
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
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
    assert len(resumed[1].inner.state) == len(resumed[1].state) == 6


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


def test_saved_pieces_are_no_larger_than_they_have_to_be(device):
    _, optimizer, _ = build(device, 0)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    elements = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert file.tell() < 3 * 4 * elements + 40000


def rename(state, name):
    for group in state["param_groups"]:
        group["param_names"] = [f"{name}{i}" for i in group["params"]]


def entry(i, name, value):
    """A change to one entry of the state."""
    return lambda s: s["state"][i].update({name: value(s["state"][i][name])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("state"), "it has no state"),
        (lambda s: s.pop("param_groups"), "it has no param_groups"),
        (
            lambda s: s.update(param_groups=s["param_groups"][:1]),
            r"param_groups have \[2\] parameters, and these \[2, 4\]",
        ),
        (lambda s: s.update(state=[]), "state is a list"),
        (lambda s: s.update(param_groups={}), "param_groups is a dict"),
        (
            lambda s: s["param_groups"][0].pop("params"),
            r"param_groups\[0\] must be a dict with a list of params",
        ),
        (lambda s: s["param_groups"][0].update(param_names=["a"]), "has 2 params, 1 param_names"),
        (lambda s: s["param_groups"][0].update(lr=-1.0), "Invalid learning rate: -1.0"),
        (lambda s: s["param_groups"][0].update(lr=torch.zeros(3)), "must have one element"),
        (lambda s: s["param_groups"][0].update(lr=b"x"), "must be a number, got bytes"),
        (lambda s: s["state"].update({6: {}}), r"state\[6\] is of no parameter"),
        (lambda s: s["state"].update({2: []}), r"state\[2\] must be a dict, got list"),
        (
            entry(1, "master", lambda _: torch.zeros(5)),
            r"other shapes: param_groups\[0\].*\.master \(\(5,\), here",
        ),
        (
            entry(1, "master", lambda _: torch.zeros(6, 48, dtype=torch.int32)),
            "no dense tensor of floating dtype",
        ),
        (entry(1, "master", lambda _: torch.zeros(6, 48, device="meta")), r"\[6, 48\] on meta"),
        (entry(1, "master", lambda _: torch.zeros(6, 48).to_sparse()), "of layout torch.sparse_coo"),
        (entry(1, "master", lambda m: TwoTensor(m.clone() + 0, m.clone() + 0)), "in a TwoTensor"),
        (entry(1, "exp_avg", lambda _: torch.zeros(5)), r"\.exp_avg \(\(5,\), here \(6, 48\)\)"),
        (entry(1, "exp_avg", lambda _: None), r"missing: param_groups\[0\]\['params'\]\[1\].*\.exp_avg"),
        (entry(0, "exp_avg_sq", lambda _: "0.5"), r"\.exp_avg_sq \(str\)"),
        (entry(0, "step", lambda _: torch.zeros(2)), r"no scalar: .*\.step"),
        (entry(0, "step", lambda s: s * math.nan), r"no whole number, 0 or more: .*\.step \(nan\)"),
        (entry(0, "step", lambda s: s * math.inf), r"no whole number, 0 or more: .*\.step \(inf\)"),
        (entry(0, "step", lambda s: -s), r"no whole number, 0 or more: .*\.step \(-1\.0\)"),
        (entry(0, "step", lambda _: 0.5), r"no whole number, 0 or more: .*\.step \(0\.5\)"),
        (lambda s: s["state"][0].pop("step"), r"missing: .*\.step"),
        (lambda s: s["param_groups"][0].update(lr=math.nan), r"\[.lr.\] must be finite, got nan"),
        (lambda s: s.update(steps=-1), "steps must be an int, 0 or more, got -1"),
        (lambda s: s.update(steps="1"), "steps must be an int, 0 or more, got '1'"),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(device, change, message):
    net, optimizer, scheduler = build(device, 0)
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


def test_load_into_parameters_that_were_moved(device):
    """Trainers move a model and have its optimizer load its own state. Without masters in that state, the
    parameters' values would be lost.
    """
    net, optimizer, scheduler = build(device, 0)
    run_steps(net, optimizer, scheduler, range(1))
    before, state = parameter_values(net), copy.deepcopy(optimizer.state_dict())
    for p in (net.norm.weight, net.norm.bias):
        p.data = torch.full_like(p.data, 7)
    for entries in state["state"].values():
        del entries["master"]
    with pytest.raises(ValueError, match=r"no master of .*\['params'\]\[\d\] has moved since"):
        optimizer.load_state_dict(state)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_all_equal(parameter_values(net), before, "weight")
    run_steps(net, optimizer, scheduler, range(1))


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
    with pytest.raises(ValueError, match=r"param_groups have \[9\] parameters, and these \[2, 4\]"):
        optimizer.load_state_dict(other.state_dict())
    net, sgd, scheduler = build(device, 0, "sgd")
    run_steps(net, sgd, scheduler, range(1))
    with pytest.raises(ValueError, match=r"does not fit: missing: .*\.step, .*\.exp_avg, .*\.exp_avg_sq"):
        optimizer.load_state_dict(sgd.state_dict())


def test_damaged_files_are_refused(device):
    """Every flipped bit in what torch.save wrote of the values, and every cut."""
    net, optimizer, scheduler = build(device, 0)
    run_steps(net, optimizer, scheduler, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    content, expected = file.getvalue(), parameter_values(net)
    generator = torch.Generator().manual_seed(0)
    refused = 0
    for place in torch.randint(len(content), (600,), generator=generator).tolist():
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        for blob in (bytes(damaged), content[:place]):
            try:
                state = torch.load(io.BytesIO(blob), weights_only=True)
            except Exception:
                refused += 1
                continue
            try:
                optimizer.load_state_dict(state)
            except (TypeError, ValueError):
                refused += 1
            assert_all_equal(parameter_values(net), expected, f"weight, byte {place}")
    assert refused > 900  # others are in what no reader looks at: padding, the archive's checksums and dates


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


class Looks(collections.defaultdict):
    """State that counts how often somebody looks into it."""

    count = 0

    def __contains__(self, key):
        self.count += 1
        return super().__contains__(key)


class Counting(torch.optim.SGD):
    """made, steps: how many optimizers of the class there were, and how many steps they took."""

    made = steps = 0

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        type(self).made += 1
        self.state = Looks(dict, self.state)

    def step(self, closure=None):
        type(self).steps += 1
        return super().step(closure)


def test_state_of_one_parameter_takes_work_for_that_one(device):
    found = []
    for count in (3, 30):
        parameters = [torch.nn.Parameter(torch.zeros(4, device=device)) for _ in range(count)]
        optimizer = ZeroFP4Optimizer(parameters, Counting, lr=0.1)
        optimizer.state_dict()
        looks, pieces = optimizer.inner.state, []
        made, looks.count = Counting.made, 0
        for p in (parameters[-1], parameters[0]):
            pieces.append(optimizer.state[p]["master"])
        found.append((looks.count, Counting.made - made))
        assert [piece.shape for piece in pieces] == [(4,)] * 2
    assert found[0] == found[1] and found[0][0] > 0 == found[0][1], found


def test_what_is_kept_is_found_out_once_and_again_where_an_option_changes_it(device):
    """By a trial step, of which global hooks of torch know nothing."""
    optimizer, steps = ZeroFP4Optimizer(make_parameters(device), Counting, lr=0.1), Counting.steps
    hooked = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: hooked.append("before")),
        register_optimizer_step_post_hook(lambda *_: hooked.append("after")),
    ]
    try:
        for lr in (0.1, 0.2):
            optimizer.param_groups[0]["lr"] = lr
            assert "momentum_buffer" not in optimizer.state_dict()["state"][0]
        assert Counting.steps == steps + 1
        optimizer.param_groups[0]["momentum"] = 0.9
        for _ in range(2):
            assert "momentum_buffer" in optimizer.state_dict()["state"][0]
        assert Counting.steps == steps + 2 and hooked == []
        optimizer.step()
        assert set(hooked) == {"before", "after"}
    finally:
        for handle in handles:
            handle.remove()
