"""What FusedAdamW refuses: a message that names the argument, the rule and the value, and nothing changed."""

import copy
import re

import pytest
import torch
from helpers import assert_bytes_equal

import zerofp4
from zerofp4.optim import FusedAdamW


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"amsgrad": True}, ValueError, "amsgrad=True is not supported"),
        ({"lr": -0.1}, ValueError, "lr must be 0 or more, got -0.1"),
        ({"lr": float("nan")}, ValueError, "lr must be 0 or more, got nan"),
        ({"lr": torch.ones(2)}, ValueError, r"lr must have one element, got shape \(2,\)"),
        ({"eps": -1e-8}, ValueError, "eps must be 0 or more, got -1e-08"),
        ({"weight_decay": -1}, ValueError, "weight_decay must be 0 or more, got -1"),
        ({"betas": (1.0, 0.9)}, ValueError, r"betas\[0\] must be at least 0 and below 1, got 1.0"),
        ({"betas": (0.9, -0.5)}, ValueError, r"betas\[1\] must be at least 0 and below 1, got -0.5"),
        ({"betas": (0.9,)}, TypeError, r"betas must be two numbers, got \(0.9,\)"),
        ({"betas": (0.9, torch.tensor(0.9))}, TypeError, r"betas must be two numbers, got \(0.9, tensor"),
    ],
)
def test_options(options, error, message):
    with pytest.raises(error, match=message):
        FusedAdamW([torch.zeros(3)], **options)
    optimizer = FusedAdamW([torch.zeros(3)])
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": [torch.zeros(4)], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: torch.zeros(4, dtype=torch.bfloat16),
            TypeError,
            "must be dense float32, got torch.bfloat16",
        ),
        (lambda: torch.zeros(4).to_sparse(), TypeError, "got torch.float32 of layout torch.sparse_coo"),
        (lambda: torch.zeros(4, 4).t()[1:], ValueError, r"must be contiguous, got shape \(3, 4\)"),
        (lambda: torch.zeros(4, device="meta"), ValueError, "must be on a CPU or CUDA device, got meta"),
        (
            lambda: zerofp4.quantize(torch.zeros(16, 16)),
            TypeError,
            "must be a plain tensor, got NVFP4Tensor: give its float32 master",
        ),
    ],
)
def test_parameters(make, error, message):
    with pytest.raises(error, match=re.escape("param_groups[0]['params'][1]") + ".*" + message):
        FusedAdamW([torch.zeros(4), make()])
    with pytest.raises(error, match=re.escape("param_groups[0]['params'][0] 'weight'") + ".*" + message):
        FusedAdamW([("weight", make())])


def test_a_parameter_twice():
    p = torch.zeros(4)
    with (
        pytest.warns(UserWarning, match="duplicate parameters"),
        pytest.raises(ValueError, match=re.escape("param_groups[0]['params'][1] is in the group twice")),
    ):
        FusedAdamW([p, p])


def test_two_devices(device):
    if device.type == "cpu":
        pytest.skip("needs a second device")
    with pytest.raises(ValueError, match=r"\['params'\]\[1\] is on cpu, the first parameter on cuda:0"):
        FusedAdamW([torch.zeros(4, device=device), torch.zeros(4)])
    p = torch.zeros(4)
    p.grad = torch.ones(4)
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['lr'\] is on cuda:0, the parameters on cpu"):
        FusedAdamW([p], lr=torch.tensor(0.1, device=device)).step()
    q = torch.zeros(4, device=device)
    q.grad = torch.ones_like(q)
    with pytest.raises(TypeError, match=r"on a GPU must be one element of float32, got torch.float64 \(\)"):
        FusedAdamW([q], lr=torch.tensor(0.1, device=device, dtype=torch.float64)).step()


def freed(gradient):
    gradient.untyped_storage().resize_(0)
    return gradient


def freed_view(gradient):
    return freed(torch.cat([gradient, gradient])[gradient.shape[0] :])


def assert_unchanged(optimizer, parameters, states, values):
    """The parameters and the states of the optimizer's state_dict are as they were."""
    for p, old in zip(parameters, values, strict=True):
        assert_bytes_equal(p, old, "parameter")
    found = optimizer.state_dict()["state"]
    assert found.keys() == states.keys()
    for i, state in found.items():
        for key, value in state.items():
            assert_bytes_equal(value, states[i][key], key)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda g: g.half(), TypeError, "must be float32 or bfloat16, got torch.float16"),
        (lambda g: g.to_sparse(), RuntimeError, "must be dense, got layout torch.sparse_coo"),
        (
            lambda g: torch._efficientzerotensor(g.shape, device=g.device),
            TypeError,
            "is an efficient zero tensor, which has no memory",
        ),
        (freed, RuntimeError, "needs 48 bytes of its storage, which has 0: it was freed"),
        (freed_view, RuntimeError, "needs 96 bytes of its storage, which has 0: it was freed"),
        (
            lambda g: g.t().contiguous().t(),
            ValueError,
            r"must be contiguous, got shape \(4, 3\) with strides",
        ),
    ],
)
def test_gradients(device, make, error, message):
    """Found before anything has changed, the parameters before it included."""
    parameters = [torch.randn(4, 3, device=device) for _ in range(2)]
    optimizer = FusedAdamW(parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"]), [p.clone() for p in parameters]
    gradient = make(torch.ones(4, 3, device=device))
    parameters[1].grad = None
    parameters[1].grad_dtype = gradient.dtype
    parameters[1].grad = gradient
    name = re.escape("the gradient of param_groups[0]['params'][1]")
    with pytest.raises(error, match=f"{name} {message}"):
        optimizer.step()
    assert_unchanged(optimizer, parameters, *before)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": torch.ones(2)}, ValueError, r"lr must have one element, got shape \(2,\)"),
        ({"lr": -1.0}, ValueError, "lr must be 0 or more, got -1.0"),
        ({"eps": float("nan")}, ValueError, "eps must be 0 or more, got nan"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\] must be at least 0 and below 1, got 1.0"),
        ({"betas": (0.9, 0.99, 0.999)}, TypeError, r"betas must be two numbers, got \(0.9, 0.99, 0.999\)"),
        ({"amsgrad": True}, ValueError, "amsgrad=True is not supported"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_options_that_were_edited(device, options, error, message, first):
    """Found before anything has changed, the groups before included; in the first step there is no state."""
    parameters = [torch.randn(20, device=device) for _ in range(2)]
    optimizer = FusedAdamW([{"params": [p]} for p in parameters])
    for p in parameters:
        p.grad = torch.randn_like(p)
    if not first:
        optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"]), [p.clone() for p in parameters]
    good = dict(optimizer.param_groups[1])
    optimizer.param_groups[1].update(options)
    with pytest.raises(error, match=re.escape("param_groups[1]: ") + message):
        optimizer.step()
    assert_unchanged(optimizer, parameters, *before)
    optimizer.param_groups[1].update(good)
    optimizer.step()
    assert optimizer.state[parameters[1]]["step"].item() == (1 if first else 2)


def test_state_that_does_not_fit(device):
    p = torch.zeros(4, device=device)
    optimizer = FusedAdamW([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    good = optimizer.state[p]
    for bad, message in (
        (
            {**good, "exp_avg": torch.zeros(5, device=device)},
            r"exp_avg must be contiguous float32 with 4 elem",
        ),
        (
            {**good, "exp_avg_sq": good["exp_avg_sq"].double()},
            r"got torch.float64 \(4,\) with strides \(1,\)",
        ),
        ({**good, "step": torch.zeros(2, device=device)}, "step must be contiguous float32 with 1 elements"),
    ):
        optimizer.state[p] = bad
        with pytest.raises(ValueError, match=message):
            optimizer.step()
    optimizer.state[p] = good
    optimizer.step()
    assert optimizer.state[p]["step"].item() == 2
    optimizer.add_param_group({"params": [torch.zeros(3, device=device)]})
    q = optimizer.param_groups[1]["params"][0]
    optimizer.param_groups.reverse()
    q.grad, optimizer.state[p] = torch.ones_like(q), {**good, "step": torch.zeros(2, device=device)}
    with pytest.raises(ValueError, match="step must be contiguous"):
        optimizer.step()
    assert list(optimizer.state) == [p], "a parameter before it got a state"


@pytest.mark.parametrize(
    ("optimizer_class", "options", "message"),
    [
        (torch.optim.AdamW, {"amsgrad": True}, "amsgrad=True is not supported"),
        (
            torch.optim.SGD,
            {"momentum": 0.9},
            r"must have step, exp_avg, exp_avg_sq, got \['momentum_buffer'\]",
        ),
    ],
)
def test_state_of_another_optimizer(optimizer_class, options, message):
    p = torch.zeros(4)
    theirs = optimizer_class([p], **options)
    p.grad = torch.ones(4)
    theirs.step()
    optimizer = FusedAdamW([p])
    optimizer.step()
    state, groups = optimizer.state, optimizer.param_groups
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.state is state and optimizer.param_groups is groups


def test_a_parameter_that_changes_its_kind(device):
    p = torch.randn(4, 4, device=device)
    optimizer = FusedAdamW([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.data = torch.randn(4, 4, device=device).t()
    with pytest.raises(ValueError, match=r"\['params'\]\[0\] must be contiguous, got shape \(4, 4\)"):
        optimizer.step()
