"""What a step of ZeroFP4Optimizer costs the host, counted: calls for each weight, and values read back."""

import pytest
import torch
import torch.distributed as dist
from cases.optim import keywords, make_gradients, make_net, make_parameters, set_gradients, take_step
from helpers import needs_gpu
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zerofp4 import NVFP4Tensor
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer
from zerofp4.testing import verify_model


def stepped(device, count, optimizer_class=torch.optim.SGD, **options):
    """An optimizer of `count` NVFP4 weights and a bias after a step, with the next gradients there."""
    specifications = [((16, 16), torch.bfloat16, True)] * count + [((7,), torch.bfloat16, False)]
    parameters = make_parameters(device, specifications=specifications)
    optimizer = ZeroFP4Optimizer(parameters, optimizer_class, lr=0.1, **keywords(options))
    for step in range(2):
        if step:
            optimizer.step()
        set_gradients(parameters, make_gradients(parameters, step))
    return optimizer


@pytest.mark.parametrize("strides", ["as before", "other"])
def test_no_weight_is_asked_through_torch_function(device, monkeypatch, strides):
    optimizer = stepped(device, 5)
    if strides == "other":  # so that all gradients are checked again
        first = optimizer.param_groups[0]["params"][0]
        first.grad = first.grad.t().contiguous().t()
    calls, original = [], NVFP4Tensor.__torch_function__

    def counting(func, types, args=(), kwargs=None):
        calls.append(func)
        return original(func, types, args, kwargs)

    monkeypatch.setattr(NVFP4Tensor, "__torch_function__", counting)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    assert not calls


def test_a_world_of_one_exchanges_no_objects_and_blames_no_rank(world_of_one, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(dist, "all_gather_object", fail)
    net = make_net("cpu")
    optimizer = ZeroFP4Optimizer(net.parameters())
    take_step(list(net.parameters()), optimizer, 0)
    verify_model(net, optimizer)
    with pytest.raises(ValueError, match=r"^amax_groups"):
        ZeroFP4Optimizer(net.parameters(), amax_groups=[[net.first.bias]])
    monkeypatch.setattr(dist, "broadcast", fail)
    ZeroFP4Optimizer([nn.Parameter(torch.zeros(3), requires_grad=needed) for needed in (True, False)])
    monkeypatch.setattr(dist, "all_reduce", fail)
    with pytest.raises(RuntimeError, match=r"^Numpy is not available$"):
        optimizer.clip_grad_norm_(1.0)


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("optimizer_class", "options", "expected"),
    [
        (FusedAdamW, {}, 0),
        (torch.optim.AdamW, {"fused": True}, 0),
        (torch.optim.SGD, {"fused": True}, 0),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9}, 1),
        (torch.optim.SGD, {"foreach": True}, 1),
    ],
)
def test_values_read_back_in_a_world_of_one(device, optimizer_class, options, expected):
    """None where the update heeds a flag on the device; else whether the gradients are finite, in step()."""
    optimizer = stepped(device, 5, optimizer_class, **options)
    reads = []
    for clip in (False, True):
        with Operations() as operations:
            if clip:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        reads.append(sum("_local_scalar_dense" in name for name in operations.names))
    assert reads == [expected] * 2


@needs_gpu
@pytest.mark.parametrize(
    ("optimizer_class", "options"), [(FusedAdamW, {}), (torch.optim.AdamW, {"fused": True})]
)
def test_steps_return_while_the_gpu_is_busy(optimizer_class, options):
    """The GPU is 50 ms behind each call, of 20 steps with clipping."""
    optimizer = stepped(torch.device("cuda"), 5, optimizer_class, **options)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    torch.cuda.synchronize()
    late = []
    for _ in range(20):
        for call in (lambda: optimizer.clip_grad_norm_(1.0), optimizer.step):
            torch.cuda._sleep(100_000_000)  # cycles, of which there are at most 2e9 in a second
            asleep = torch.cuda.current_stream().record_event()
            call()
            late.append(asleep.query())
        torch.cuda.synchronize()
    assert not any(late)


def test_operations_of_a_step_do_not_grow_with_the_model(device):
    """But for those that torch's foreach functions take lists for."""
    counts = []
    for count in (5, 50):
        optimizer = stepped(device, count, FusedAdamW)
        with Operations() as operations:
            optimizer.step()
        counts.append(len(operations.names))
    assert counts[0] == counts[1], operations.names
