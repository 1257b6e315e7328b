"""Gradients in one process: their norms, a NaN or Inf in them, and the dtype that they are added up in."""

import copy
import math
import os
import subprocess
import sys

import pytest
import torch
from cases.optim import (
    Plain,
    assert_all_equal,
    batch,
    built,
    check,
    everything,
    make_gradients,
    make_net,
    set_gradients,
    turn_gradients,
)
from helpers import assert_bytes_equal
from torch import nn

from zerofp4 import NVFP4Tensor
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

has_grad_dtype = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype"
)

STEPS = """
import math, torch
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer
net = torch.nn.Linear(64, 64, device="cuda")
optimizer = ZeroFP4Optimizer(net.named_parameters(), FusedAdamW)
for norm_type in (2.0, 1.0, math.inf):
    net(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.clip_grad_norm_(1.0, norm_type)
    optimizer.step()
"""


@pytest.mark.heavy
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch compiles for GPUs alone")
def test_no_kernel_of_torch_is_compiled_at_run_time(tmp_path):
    """Ranks that do so at once warn that the folder of such kernels could not be created."""
    kept = {**os.environ, "PYTORCH_KERNEL_CACHE_PATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", STEPS], env=kept, check=True)
    assert not list(tmp_path.iterdir())


def test_gradients_that_change_after_clipping(device):
    net = make_net(device)
    optimizer = ZeroFP4Optimizer(net.parameters(), torch.optim.SGD, lr=0.01)
    backward = lambda: net(batch(device, 0)).square().mean().backward()  # noqa: E731
    backward()
    optimizer.clip_grad_norm_(1.0)
    backward()
    before = optimizer.gathered_masters()
    with pytest.raises(RuntimeError, match=r"changed after clip_grad_norm_.*zero_grad"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="gradients were added to clipped ones"):
        optimizer.clip_grad_norm_(1.0)
    net.zero_grad()
    with pytest.raises(RuntimeError, match="changed after clip_grad_norm_"):
        optimizer.step()
    assert_all_equal(optimizer.gathered_masters(), before, "master")
    optimizer.zero_grad()
    backward()
    optimizer.clip_grad_norm_(torch.tensor(0.0), "inf")
    optimizer.step()
    assert all(map(torch.equal, optimizer.gathered_masters(), before))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 0.0), "norm_type must be positive, got 0.0"),
        ((1.0, math.nan), "norm_type must be positive, got nan"),
        ((-1.0,), "max_norm must be 0 or more, got -1.0"),
        ((math.nan,), "max_norm must be 0 or more, got nan"),
        (("one",), "could not convert string to float: 'one'"),
    ],
)
def test_arguments_of_clip_must_be_norms(device, arguments, message):
    _, optimizer = built(device, torch.optim.SGD, seed=0, lr=0.1)
    with pytest.raises(ValueError, match=message):
        optimizer.clip_grad_norm_(*arguments)
    optimizer.step()


# A NaN or Inf: the step is skipped before anything changes, or raises

DEFAULTS = {"lr": 0.01, "weight_decay": 0.1}
VALUES = [math.nan, math.inf, -math.inf]
# The first two find out on the device, for the others the host reads. Where fused SGD with momentum skips its
# first step, its momentum buffers stay uninitialized.
INNER = {
    "FusedAdamW": (FusedAdamW, DEFAULTS),
    "fused AdamW": (torch.optim.AdamW, DEFAULTS | {"fused": True}),
    "AdamW": (torch.optim.AdamW, DEFAULTS),
    "fused SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
}


@pytest.mark.parametrize("first", [0, 1], ids=["a good step", "a bad step"])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("turned", [False, True])
def test_a_step_is_skipped_and_the_next_one_goes_on(device, turned, name, clip, first):
    """As if the step had not been called: masters, moments and step counts are those of the steps taken. In
    any case gradients stay where and as they are.
    """
    optimizer_class, defaults = INNER[name]
    parameters, optimizer = built(device, optimizer_class, **defaults)
    plain, skipped = Plain(parameters, optimizer_class, **defaults), 0
    for step in range(first, 6):
        set_gradients(parameters, make_gradients(parameters, step))
        bad = step % 2 == 1
        if bad:
            i = (0, 3, 5)[step // 2]
            parameters[i].grad.view(-1)[-1] = VALUES[step // 2]
            skipped += 1
        if turned:
            turn_gradients(parameters)
        given = [(p.grad, p.grad.data_ptr(), p.grad.clone()) for p in parameters]
        before = optimizer.gathered_masters() if step == first else everything(parameters, optimizer)
        if clip is not None:
            total = optimizer.clip_grad_norm_(1e30)  # scales by 1
            assert total.isfinite().item() == (not bad)
        assert optimizer.step(lambda: 7) == 7
        for p, (grad, place, values) in zip(parameters, given, strict=True):
            assert p.grad is grad and grad.data_ptr() == place
            assert_bytes_equal(grad, values, "gradient")
        assert (optimizer.found_inf.item(), optimizer.skipped_steps) == (bad, skipped)
        if step == 3:  # nothing but a step changes what is told
            optimizer.zero_grad()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if bad:
            assert optimizer.first_nonfinite() == f"param_groups[0]['params'][{i}]"
            # Before the first step there may be no moments yet.
            now = optimizer.gathered_masters() if step == first else everything(parameters, optimizer)
            assert_all_equal(now, before, "tensor")
        else:
            assert optimizer.first_nonfinite() is None
            plain.step()
            check(optimizer, plain, f"step {step}:")


@has_grad_dtype
def test_a_gradient_that_is_infinite_in_fp32(device):
    """A gradient of any other dtype becomes FP32 before anything is done with it."""
    p = nn.Parameter(torch.zeros(2, device=device))
    p.grad_dtype = torch.float64
    optimizer = ZeroFP4Optimizer([p], torch.optim.SGD, lr=0.1)
    for value in (1e300, 1e30):
        p.grad = torch.tensor([1.0, value], dtype=torch.float64, device=device)
        optimizer.step()
        assert optimizer.skipped_steps == 1


@has_grad_dtype
def test_a_copy_of_a_weight_has_its_gradient(device):
    parameters, _ = built(device, lr=0.1, gradient_dtype=torch.float32)
    weight = next(p for p in parameters if isinstance(p, NVFP4Tensor) and p.dtype == torch.bfloat16)
    weight.grad = torch.ones_like(weight, dtype=torch.float32)
    copied = copy.deepcopy(weight)
    assert copied.grad is not weight.grad
    assert_bytes_equal(copied.grad, weight.grad, "gradient")
