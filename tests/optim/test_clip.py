"""clip_grad_norm_ of ZeroFP4Optimizer, in one process."""

import math
import os
import subprocess
import sys

import pytest
import torch
from cases.optim import (
    assert_all_equal,
    batch,
    built,
    make_gradients,
    make_net,
    make_parameters,
    set_gradients,
)
from helpers import assert_bytes_equal
from torch import nn

from zerofp4.optim import ZeroFP4Optimizer

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


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_clip_of_nonfinite_gradients_is_what_torch_says(device, norm_type, value):
    parameters = [p for p in make_parameters(device) if p.numel()]
    optimizer = ZeroFP4Optimizer(parameters, torch.optim.SGD, lr=0.1)
    set_gradients(parameters, make_gradients(parameters, 0))
    parameters[1].grad[3] = value
    expected = nn.utils.get_total_norm([p.grad.float() for p in parameters], norm_type)
    total = optimizer.clip_grad_norm_(1.0, norm_type)
    assert_bytes_equal(total.isnan(), expected.isnan(), "isnan")
    assert_bytes_equal(total.isinf(), expected.isinf(), "isinf")


def test_gradients_that_change_after_clipping(device):
    net = make_net(device)
    optimizer = ZeroFP4Optimizer(net.parameters(), lr=0.01)
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
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()


def test_clipped_gradients_that_are_dropped_are_reduced_anew(device):
    parameters, optimizer = built(device, torch.optim.SGD, seed=0, lr=0.1)
    optimizer.clip_grad_norm_(1e-3)
    gradients = make_gradients(parameters, 1)
    set_gradients(parameters, gradients)
    expected = max(p.grad.abs().max().item() for p in parameters if p.numel())
    assert optimizer.clip_grad_norm_(1.0, math.inf).item() == expected > 1
    for max_norm, clipped in ((0.5, 1.0), (9.0, 0.5)):  # of what is clipped already
        assert optimizer.clip_grad_norm_(max_norm, math.inf).item() == pytest.approx(clipped)
    optimizer.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 0.0), "norm_type must be positive, got 0.0"),
        ((1.0, -1.0), "norm_type must be positive, got -1.0"),
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
    assert optimizer._clipped is None


@pytest.mark.parametrize("max_norm", [0, torch.tensor(0.0), -0.0])
def test_clip_to_zero(device, max_norm):
    parameters, optimizer = built(device, torch.optim.SGD, lr=0.1)
    before = optimizer.gathered_masters()
    set_gradients(parameters, make_gradients(parameters, 0))
    optimizer.clip_grad_norm_(max_norm, "inf")
    optimizer.step()
    for master, old in zip(optimizer.gathered_masters(), before, strict=True):
        assert master.equal(old)
