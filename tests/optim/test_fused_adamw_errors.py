"""What FusedAdamW refuses: a message that names the argument, the rule and the value, and nothing changed."""

import contextlib
import copy
import math
import re

import pytest
import torch
from cases.optim import assert_all_equal
from distributed.optim.fused_cases import each_state, set_gradient, set_random_gradients
from helpers import assert_bytes_equal, freed

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
    ("options", "message"),
    [
        ({"amsgrad": True}, "amsgrad=True is not supported"),
        ({"state": "small"}, 'state must be "full" or "compact", got \'small\''),
        ({"lr": -0.1}, "lr must be finite and 0 or more, got -0.1"),
        ({"lr": float("nan")}, "lr must be finite and 0 or more, got nan"),
        ({"eps": math.inf}, "eps must be finite and 0 or more, got inf"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers of at least 0 and below 1, got \(0.9, 1.0\)"),
        ({"betas": (0.9, torch.tensor(0.9))}, r"betas must be two numbers .*, got \(0.9, tensor"),
    ],
)
def test_options(device, options, message):
    """Of the constructor, of an added group, and edited before a step: found before anything has changed, the
    groups before included.
    """
    with pytest.raises(ValueError, match=message):
        FusedAdamW([torch.zeros(3)], **options)
    optimizer = FusedAdamW([{"params": [torch.randn(20, device=device)]} for _ in range(2)])
    group = optimizer.param_groups[1]
    set_random_gradients([*optimizer.param_groups[0]["params"], *group["params"]])
    optimizer.step()
    good = dict(group)
    group.update(options)
    with refused(optimizer, ValueError, re.escape("param_groups[1]: ") + message):
        optimizer.step()
    group.update(good)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [torch.zeros(4, device=device)], **options})
    optimizer.step()  # without the group


@pytest.mark.parametrize("name", ["clip_factor", "found_inf"])
def test_scalars_that_kernels_cannot_read(device, name):
    optimizer = FusedAdamW([torch.ones(3, device=device)])
    set_random_gradients(optimizer.param_groups[0]["params"])
    for scalar, error, message in (
        (1.0, TypeError, "must be a torch.float32 tensor, got float"),
        (torch.zeros(2, device=device), ValueError, r"must have shape \(\), got \(2,\)"),
        (torch.zeros(1, device="meta"), ValueError, "must be on .*, got meta"),
    ):
        setattr(optimizer, name, scalar)
        with refused(optimizer, error, f"{name} {message}"):
            optimizer.step()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: torch.zeros(4).bfloat16(), TypeError, "must be a torch.float32 tensor, got torch.bfloat16"),
        (lambda: torch.zeros(4).to_sparse(), TypeError, "must be a dense tensor, got layout"),
        (lambda: torch.zeros(4, device="meta"), ValueError, "must be on a CPU or CUDA device, got meta"),
        (lambda: zerofp4.quantize(torch.zeros(16, 16)), TypeError, "must be a plain tensor, got NVFP4Tensor"),
    ],
)
def test_parameters(make, error, message):
    with pytest.raises(error, match=re.escape("param_groups[0]['params'][0] 'weight'") + ".*" + message):
        FusedAdamW([("weight", make())])


def test_a_parameter_twice_or_that_changes_its_kind(device):
    p = torch.randn(4, 4, device=device)
    message = re.escape("param_groups[0] has a parameter twice")
    with pytest.warns(UserWarning, match="duplicate parameters"), pytest.raises(ValueError, match=message):
        FusedAdamW([p, p])
    optimizer = FusedAdamW([p])
    optimizer.step()
    p.data = p.data.t()
    with pytest.raises(ValueError, match=r"\['params'\]\[0\] must be contiguous, got strides \(1, 4\)"):
        optimizer.step()


def test_two_devices(device):
    if device.type == "cpu":
        pytest.skip("needs a second device")
    with pytest.raises(ValueError, match=r"\['params'\]\[1\] must be on cuda:0, got cpu"):
        FusedAdamW([torch.zeros(4, device=device), torch.zeros(4)])
    lr = torch.tensor(0.1, device=device)
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['lr'\] must be on cpu, got cuda:0"):
        FusedAdamW([torch.zeros(4)], lr=lr).step()
    with pytest.raises(TypeError, match=r"\['lr'\] must be a torch.float32 tensor, got torch.float64"):
        FusedAdamW([torch.zeros(4, device=device)], lr=lr.double()).step()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (torch.Tensor.half, TypeError, "must be float32 or bfloat16, got torch.float16"),
        (torch.Tensor.to_sparse, TypeError, "must be a dense tensor, got layout torch.sparse_coo"),
        (torch._neg_view, ValueError, "has its negative bit set, which kernels do not see"),
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
    name = re.escape("the gradient of param_groups[0]['params'][1]")
    with refused(optimizer, error, f"{name}.* {message}"):
        optimizer.step()


def bad_states(good, state):
    """(entry that does not fit, its value, error, message)"""
    yield "step", good["step"].expand(2), ValueError, r"must have shape \(\), got \(2,\)"
    if state == "compact":
        yield "scales", good["scales"][:, :2], ValueError, r"must have shape \(8, 3, 2\), got"
        yield "exp_avg_codes", good["exp_avg_codes"].float(), TypeError, "must be a torch.int8"
    else:
        yield "exp_avg", good["exp_avg"][1:], ValueError, r"must have shape \(8, 130\), got"
        yield "exp_avg_sq", good["exp_avg_sq"].double(), TypeError, "must be a torch.float32"


@each_state
def test_state_that_does_not_fit(device, state):
    """A parameter before it gets no state, and another part keeps what it has; so does who loads it."""
    params = [torch.randn(8, 130, device=device) for _ in range(3)]
    optimizer = FusedAdamW(params, state=state)
    optimizer.offer_parts([(params[:2], None), (params[2:], None)])
    set_random_gradients(params[1:])
    optimizer.step()
    set_random_gradients(params[:1])
    good = {p: optimizer.state[p] for p in params[1:]}
    loaders = [FusedAdamW(params, state=loader) for loader in ("full", "compact")]
    for name, bad, error, message in bad_states(good[params[2]], state):
        optimizer.state[params[2]] = good[params[2]] | {name: bad}
        with refused(optimizer, error, f"{name} {message}"):
            optimizer.step()
        for loader in loaders if name not in ("step", "exp_avg_sq") else ():  # which a load converts
            with pytest.raises(error, match=f"{name} in the state of AdamW {message}"):
                loader.load_state_dict(optimizer.state_dict())
            assert not loader.state
    optimizer.state.update(good)
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [1, 2, 2]
    assert all(optimizer.state[p] is entries for p, entries in good.items())


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
