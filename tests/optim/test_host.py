"""What a step of ZeroFP4Optimizer costs the host, counted: calls for each weight, and values read back; and
the hash of options that a step of several ranks compares.
"""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases.optim import keywords, make_gradients, make_net, make_parameters, set_gradients, take_step
from helpers import needs_gpu
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zerofp4 import NVFP4Tensor
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer
from zerofp4.optim.inner import HASH_BITS, InnerClass, InnerOptimizers
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
    """But for those that torch's foreach functions take lists for. No weight is asked through torch."""
    counts, fail = [], mock.Mock(side_effect=AssertionError("__torch_function__ costs the host 5 us"))
    for count in (5, 50):
        optimizer = stepped(device, count, FusedAdamW)
        with Operations() as operations, mock.patch.object(NVFP4Tensor, "__torch_function__", fail):
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        counts.append(len(operations.names))
    assert counts[0] == counts[1], operations.names


class Anything(torch.optim.Optimizer):
    def __init__(self, params, **options):
        super().__init__(params, options)


def groups(*lrs, **options):
    return [{"params": [], "size": lr, "name": "text", "foreach": None, **options} for lr in lrs]


def test_hashes_tell_values_and_places_apart(device):
    """Equal values have equal hashes, of any dtype and on any device, so -0.0 is 0.0. A change is in the next
    hash, also one of a tensor in place.
    """
    tensor = lambda value, **options: torch.tensor(value, device=device, **options)  # noqa: E731

    def hashes_of(made):
        inners = InnerOptimizers([InnerClass(Anything, {}, False, 0)] * len(made), made, {})
        return lambda: inners.check_options() or inners.hash_options(device)

    of = lambda *lrs, **options: hashes_of(groups(*lrs, **options))()  # noqa: E731
    assert of(0.5) == of(0.5, name="other") and of(1) == of(1.0) != of(2) and of(0.5, 1)[1] is None
    values = [0.0, 1.0, -1.0, 2.0, 0.1, math.nextafter(0.1, 1), 5e-324, math.inf, math.nan, 1e300]
    words = [of(tensor(value, dtype=torch.float64))[1].item() for value in values]
    pairs = [of(tensor(a), tensor(b))[1].item() for a in values[:4] for b in values[:4]]
    assert len(set(words)) == len(words) and len(set(pairs)) == len(pairs)
    assert all(w == int(w) and 0 <= w < 2**HASH_BITS for w in words + pairs)
    assert of(tensor(0.0)) == of(tensor(-0.0)) == of(tensor([[0.0]]))
    assert of(tensor(0.5)) == of(torch.tensor(0.5, dtype=torch.bfloat16))
    lr = tensor(0.25)
    made = groups(0.5, lr)
    hashes = hashes_of(made)
    for change in (lambda: made[0].update(rho=0.5), lambda: lr.fill_(0.125)):
        before = hashes()
        assert hashes() == before
        change()
        assert hashes() == hashes_of(made)() != before
