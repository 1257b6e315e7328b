"""What FusedAdamW refuses: a message that names the argument, the rule and the value, and nothing changed."""

import contextlib
import copy
import math
import re

import pytest
import torch
from cases.fused import set_gradient, set_random_gradients
from cases.optim import assert_all_equal
from helpers import assert_bytes_equal

import zerofp4
from zerofp4.optim import FusedAdamW


@contextlib.contextmanager
def refused(optimizer, error, message):
    """Raises, and leaves parameters and the states of the optimizer's state_dict as they were."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    values, states = [p.clone() for p in parameters], copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(error, match=message):
        yield
    found = optimizer.state_dict()["state"]
    assert found.keys() == states.keys()
    assert_all_equal(parameters, values, "parameter")
    for i, state in found.items():
        for key, value in state.items():
            assert_bytes_equal(value, states[i][key], key)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"amsgrad": True}, ValueError, "amsgrad=True is not supported"),
        ({"state": "small"}, ValueError, "state must be \"full\" or \"compact\", got 'small'"),
        ({"lr": -0.1}, ValueError, "lr must be 0 or more, got -0.1"),
        ({"lr": math.inf}, ValueError, "lr must be finite, got inf"),
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
def test_options(device, options, error, message):
    """Of the constructor, of an added group, and edited before the first step or a later one: found before
    anything has changed, the groups before included.
    """
    with pytest.raises(error, match=message):
        FusedAdamW([torch.zeros(3)], **options)
    optimizer = FusedAdamW([{"params": [torch.randn(20, device=device)]} for _ in range(2)])
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": [torch.zeros(4, device=device)], **options})
    assert len(optimizer.param_groups) == 2
    group = optimizer.param_groups[1]
    set_random_gradients([*optimizer.param_groups[0]["params"], *group["params"]])
    good = dict(group)
    for step in (1, 2):
        group.update(options)
        with refused(optimizer, error, re.escape("param_groups[1]: ") + message):
            optimizer.step()
        group.update(good)
        optimizer.step()
        assert optimizer.state[group["params"][0]]["step"].item() == step


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: torch.zeros(4).bfloat16(), TypeError, "must be a torch.float32 tensor, got torch.bfloat16"),
        (lambda: torch.zeros(4).to_sparse(), TypeError, "must be dense, got layout torch.sparse_coo"),
        (lambda: torch.zeros(4, 4).t()[1:], ValueError, r"must be contiguous, got strides \(1, 4\)"),
        (lambda: torch.zeros(4, device="meta"), ValueError, "must be on a CPU or CUDA device, got meta"),
        (lambda: zerofp4.quantize(torch.zeros(16, 16)), TypeError, "must be a plain tensor, got NVFP4Tensor"),
    ],
)
def test_parameters(make, error, message):
    with pytest.raises(error, match=re.escape("param_groups[0]['params'][1]") + ".*" + message):
        FusedAdamW([torch.zeros(4), make()])
    with pytest.raises(error, match=re.escape("param_groups[0]['params'][0] 'weight'") + ".*" + message):
        FusedAdamW([("weight", make())])


def test_a_parameter_twice():
    p = torch.zeros(4)
    message = re.escape("param_groups[0]['params'][1] is in the group twice")
    with pytest.warns(UserWarning, match="duplicate parameters"), pytest.raises(ValueError, match=message):
        FusedAdamW([p, p])


def test_two_devices(device):
    if device.type == "cpu":
        pytest.skip("needs a second device")
    with pytest.raises(ValueError, match=r"\['params'\]\[1\] must be on cuda:0, got cpu"):
        FusedAdamW([torch.zeros(4, device=device), torch.zeros(4)])
    lr = torch.tensor(0.1, device=device)
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['lr'\] is on cuda:0, the parameters on cpu"):
        FusedAdamW([torch.zeros(4)], lr=lr).step()
    with pytest.raises(TypeError, match=r"on a GPU must be one element of float32, got torch.float64 \(\)"):
        FusedAdamW([torch.zeros(4, device=device)], lr=lr.double()).step()


def freed(gradient):
    gradient.untyped_storage().resize_(0)
    return gradient


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (torch.Tensor.half, TypeError, "must be float32 or bfloat16, got torch.float16"),
        (torch.Tensor.to_sparse, RuntimeError, "must be dense, got layout torch.sparse_coo"),
        (lambda g: torch._efficientzerotensor(g.shape, device=g.device), TypeError, "is an efficient zero"),
        (torch._neg_view, ValueError, "has its negative bit set, which kernels do not see"),
        (freed, RuntimeError, "needs 48 bytes of its storage, which has 0: it was freed"),
        (lambda g: freed(torch.cat([g, g])[4:]), RuntimeError, "needs 96 bytes of its storage, which has 0"),
        (lambda g: g.t().contiguous().t(), ValueError, r"must be contiguous, got strides \(1, 4\)"),
    ],
)
def test_gradients(device, make, error, message):
    parameters = [torch.randn(4, 3, device=device) for _ in range(2)]
    optimizer = FusedAdamW(parameters)
    set_random_gradients(parameters)
    optimizer.step()
    set_gradient(parameters[1], make(torch.ones(4, 3, device=device)))
    with refused(optimizer, error, re.escape("the gradient of param_groups[0]['params'][1] ") + message):
        optimizer.step()


def test_state_that_does_not_fit(device):
    p, q = torch.zeros(4, device=device), torch.zeros(3, device=device)
    optimizer = FusedAdamW([p])
    set_random_gradients([p, q])
    optimizer.step()
    good = optimizer.state[p]
    two = torch.zeros(2, device=device)
    for bad, error, message in (
        ({"exp_avg": torch.zeros(5, device=device)}, ValueError, r"exp_avg must have shape \(4,\), got"),
        ({"exp_avg_sq": good["exp_avg_sq"].double()}, TypeError, "exp_avg_sq must be a torch.float32 tensor"),
        ({"step": two}, ValueError, r"step must have shape \(\), got \(2,\)"),
    ):
        optimizer.state[p] = good | bad
        with refused(optimizer, error, message):
            optimizer.step()
    optimizer.add_param_group({"params": [q]})
    optimizer.param_groups.reverse()
    optimizer.state[p] = good | {"step": two}
    with pytest.raises(ValueError, match="step must have shape"):
        optimizer.step()
    assert list(optimizer.state) == [p], "a parameter before it got a state"


def test_state_that_comes_back_after_an_error(device):
    """The first part takes other state, the second refuses its own: a step with the state from before updates
    what is there then.
    """
    params = [torch.randn(20, device=device) for _ in range(2)]
    expected = [p.clone() for p in params]
    optimizer, other = FusedAdamW(params), FusedAdamW(expected)
    optimizer.offer_parts([([p], None) for p in params])
    for p, q in zip(params, expected, strict=True):
        p.grad = q.grad = torch.randn(20, device=device)
    for _ in range(2):
        optimizer.step()
        other.step()
    good = [optimizer.state[p] for p in params]
    optimizer.state[params[0]] = {key: value.clone() for key, value in good[0].items()}
    optimizer.state[params[1]] = good[1] | {"exp_avg": torch.zeros(3, device=device)}
    with refused(optimizer, ValueError, r"exp_avg must have shape \(20,\), got \(3,\)"):
        optimizer.step()
    optimizer.state.update(zip(params, good, strict=True))
    optimizer.step()
    other.step()
    assert_all_equal(params, expected, "parameter")
    moments = [other.state[q]["exp_avg"] for q in expected]
    assert_all_equal([optimizer.state[p]["exp_avg"] for p in params], moments, "moment")



def test_state_of_another_optimizer():
    p = torch.zeros(4)
    p.grad = torch.ones(4)
    optimizer = FusedAdamW([p])
    optimizer.step()
    state, groups = optimizer.state, optimizer.param_groups
    for theirs, message in (
        (torch.optim.AdamW([p], amsgrad=True), "amsgrad=True is not supported"),
        (torch.optim.SGD([p], momentum=0.9), r"exp_avg_sq, or .*, got \['momentum_buffer'\]"),
    ):
        theirs.step()
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(theirs.state_dict())
        assert optimizer.state is state and optimizer.param_groups is groups


def test_a_parameter_that_changes_its_kind(device):
    p = torch.randn(4, 4, device=device)
    optimizer = FusedAdamW([p])
    optimizer.step()
    p.data = p.data.t()
    with pytest.raises(ValueError, match=r"\['params'\]\[0\] must be contiguous, got strides \(1, 4\)"):
        optimizer.step()
