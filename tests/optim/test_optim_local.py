"""ZeroFP4Optimizer in a world of one, whose update reads gradients where a backward pass left them."""

import math

import pytest
import torch
from helpers import assert_bytes_equal
from optim_cases import Plain, check, make_gradients, make_parameters, set_gradients

from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

DEFAULTS = {"lr": 0.01, "weight_decay": 0.1}


def have_slices(optimizer):
    return [buffer.has_gradients for buffer in optimizer._shards.buffers]


@pytest.mark.parametrize("wire", [None, torch.float32])
def test_gradients_in_any_order_of_memory(device, wire):
    """p.grad stays as it is; what is missing is left alone."""
    parameters = make_parameters(device)
    plain = Plain(parameters, FusedAdamW, **DEFAULTS)
    optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, gradient_wire=wire, **DEFAULTS)
    assert optimizer.describe()["in_buckets"] and optimizer.describe()["transport"] == "none"
    for step in range(4):
        gradients = make_gradients(parameters, step)
        gradients[step] = None
        set_gradients(parameters, gradients)
        plain.step()
        for i, p in enumerate(parameters):
            if p.grad is not None and p.ndim == 2 and (i + step) % 2:
                p.grad = p.grad.t().contiguous().t()
        before = [None if p.grad is None else (p.grad.data_ptr(), p.grad.clone()) for p in parameters]
        optimizer.step()
        check(optimizer, plain, f"step {step}:")
        for p, found in zip(parameters, before, strict=True):
            if found is not None:
                assert p.grad.data_ptr() == found[0] and p.grad.equal(found[1])


def test_there_are_fp32_slices_where_somebody_needs_them(device):
    """Of gradients of a dtype that FusedAdamW does not read; clipping needs none."""
    specifications = [
        ((48, 64), torch.bfloat16, True),
        ((5, 3), torch.bfloat16, False),
        ((7,), torch.float32, False),
        ((6,), torch.float16, False),
    ]
    parameters = make_parameters(device, specifications=specifications)
    plain = Plain(parameters, FusedAdamW, **DEFAULTS)
    optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, **DEFAULTS)
    read_there = [buffer.kind != "float16" for buffer in optimizer._shards.buffers]
    assert sum(read_there) == 3
    for step in range(4):
        set_gradients(parameters, make_gradients(parameters, step))
        if step == 2:
            optimizer.clip_grad_norm_(1e9)  # which changes none
        optimizer.step()
        plain.step()
        check(optimizer, plain, f"step {step}:")
        assert have_slices(optimizer) == [not there for there in read_there]


class NotPlain(FusedAdamW):
    """Not FusedAdamW itself: its step() is called, with gradients in FP32 slices."""


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("name", ["FusedAdamW", "AdamW"])
def test_clipped_where_they_are_and_in_slices(device, name, norm_type):
    """Once and twice: the same norms and the same bytes, with gradients in any order of memory."""
    classes = {"FusedAdamW": (FusedAdamW, NotPlain), "AdamW": (torch.optim.AdamW,) * 2}[name]
    models = [make_parameters(device) for _ in classes]
    wires = None, torch.float32  # the latter copies what is bfloat16
    optimizers = [
        ZeroFP4Optimizer(parameters, cls, gradient_wire=wire, **DEFAULTS)
        for parameters, cls, wire in zip(models, classes, wires, strict=True)
    ]
    for step in range(4):
        norms = []
        for parameters, optimizer in zip(models, optimizers, strict=True):
            set_gradients(parameters, make_gradients(parameters, step))
            if optimizer is optimizers[0]:
                for p in parameters[step::2]:
                    if p.ndim == 2:
                        p.grad = p.grad.t().contiguous().t()
            if step == 1:
                parameters[2].grad.view(-1)[0] = math.nan
            clips = (0.5, 0.25)[:step]
            norms.append([optimizer.clip_grad_norm_(most, norm_type).item() for most in clips])
            optimizer.step()
            assert (optimizer.found_inf.item() != 0) == (step == 1)
        same = norm_type == 2.0 or name == "AdamW"
        assert norms[0] == pytest.approx(norms[1], rel=0 if same else 1e-6, nan_ok=True)
        if norm_type == 2.0:
            pairs = zip(*(optimizer.gathered_masters() for optimizer in optimizers), strict=True)
            for i, (mine, theirs) in enumerate(pairs):
                assert_bytes_equal(mine, theirs, f"step {step}: master {i}")
