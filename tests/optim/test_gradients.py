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
    keywords,
    make_gradients,
    make_net,
    make_parameters,
    set_gradients,
    turn_gradients,
)
from helpers import assert_bytes_equal
from torch import nn

import zerofp4
from zerofp4 import NVFP4Tensor
from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer

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
    _, optimizer = built(device, torch.optim.SGD, seed=0, lr=0.1)
    before = optimizer.gathered_masters()
    optimizer.clip_grad_norm_(max_norm, "inf")
    optimizer.step()
    assert all(master.equal(old) for master, old in zip(optimizer.gathered_masters(), before, strict=True))


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
    """As if the step had not been called: masters, moments and step counts are those of the steps taken."""
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
        before = optimizer.gathered_masters() if step == first else everything(parameters, optimizer)
        if clip is not None:
            total = optimizer.clip_grad_norm_(1e30)  # scales by 1
            assert total.isfinite().item() == (not bad)
        assert optimizer.step(lambda: 7) == 7
        assert (optimizer.found_inf.item(), optimizer.skipped_steps) == (bad, skipped)
        if bad:
            assert optimizer.first_nonfinite() == f"param_groups[0]['params'][{i}]"
            # Before the first step there may be no moments yet.
            now = optimizer.gathered_masters() if step == first else everything(parameters, optimizer)
            assert_all_equal(now, before, "tensor")
        else:
            assert optimizer.first_nonfinite() is None
            plain.step()
            check(optimizer, plain, f"step {step}:")


def test_what_was_found_is_told_until_the_next_step_looks(device):
    """Which may find another, or none; loads in between change nothing of it."""
    parameters, optimizer = built(device, FusedAdamW, **DEFAULTS)
    for step, bad in enumerate([(4, 3), (2,), ()]):
        set_gradients(parameters, make_gradients(parameters, step))
        for i in bad:
            parameters[i].grad.view(-1)[-1] = math.nan
        optimizer.step()
        optimizer.zero_grad()
        state_dict = copy.deepcopy(optimizer.state_dict())
        for _ in range(2):
            first = f"param_groups[0]['params'][{min(bad)}]" if bad else None
            assert optimizer.first_nonfinite() == first
            assert optimizer.skipped_steps == min(step + 1, 2)
            optimizer.load_state_dict(state_dict)


def test_a_sum_of_squares_that_overflows_is_no_reason_to_skip(device):
    parameters, optimizer = built(device, torch.optim.SGD, seed=0, lr=0.1)
    for value in (3e38, -3e38):
        parameters[3].grad[0, 0] = value
        optimizer.step()
        assert optimizer.skipped_steps == 0


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


# gradient_dtype


@has_grad_dtype
@pytest.mark.parametrize(("dtype", "total"), [(None, 256.0), (torch.float32, 512.0)])
def test_512_micro_batches_of_1(device, dtype, total):
    """bfloat16 has no 257."""
    weight = nn.Parameter(zerofp4.quantize(torch.ones(16, 16).to(device, torch.bfloat16), columnwise=True))
    bias = nn.Parameter(torch.ones(16, device=device, dtype=torch.bfloat16))
    options = keywords(lr=1 / 512, gradient_dtype=dtype)
    optimizer = ZeroFP4Optimizer([weight, bias], torch.optim.SGD, **options)
    x = torch.ones(1, 16, device=device, dtype=torch.bfloat16)
    for _ in range(512):
        nn.functional.linear(x, weight, bias).sum().backward()
    for p in (weight, bias):
        assert p.grad.dtype == (dtype or torch.bfloat16) and p.grad.eq(total).all()
    optimizer.step()
    expected = torch.full((16,), 1 - total / 512, device=device)
    assert_bytes_equal(optimizer.gathered_masters()[1], expected, "master")


@has_grad_dtype
def test_a_copy_of_a_weight_has_its_gradient(device):
    parameters, _ = built(device, lr=0.1, gradient_dtype=torch.float32)
    weight = next(p for p in parameters if isinstance(p, NVFP4Tensor) and p.dtype == torch.bfloat16)
    weight.grad = torch.ones_like(weight, dtype=torch.float32)
    copied = copy.deepcopy(weight)
    assert copied.grad is not weight.grad
    assert_bytes_equal(copied.grad, weight.grad, "gradient")


@has_grad_dtype
@pytest.mark.parametrize("dtype", [torch.float64, "float32", True])
def test_a_dtype_that_cannot_be_meant_or_comes_too_late(device, dtype):
    parameters = make_parameters(device)
    parameters[1].grad = torch.zeros_like(parameters[1])
    for given, message in [
        (dtype, r"gradient_dtype must be one of"),
        (torch.float32, r"\[1\] has a gradient of torch\.bfloat16 by now"),
    ]:
        with pytest.raises(ValueError, match=message):
            ZeroFP4Optimizer(parameters, communication=Communication(gradient_dtype=given))
        assert all(p.grad_dtype == p.dtype for p in parameters)


def test_a_torch_that_has_no_such_gradients(device, monkeypatch):
    monkeypatch.setattr("zerofp4.optim.build.HAS_GRAD_DTYPE", False)
    with pytest.raises(ValueError, match=r"gradient_dtype=torch.float32 .* which torch .* does not make"):
        built(device, gradient_dtype=torch.float32)
