"""ZeroFP4Optimizer in a world of one, whose update reads gradients where a backward pass left them."""

import pytest
import torch
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
    """Clipping, and gradients of a dtype that FusedAdamW does not read."""
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
        assert have_slices(optimizer) == [step >= 2 or not there for there in read_there]
