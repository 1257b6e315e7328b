"""What ranks of a ZeroFP4Optimizer do when they disagree, or when one of them finds an error."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import re
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from cases.optim import (
    assert_all_equal,
    batch,
    keywords,
    make_gradients,
    make_net,
    set_gradients,
    unchanged,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zerofp4
from distributed.cases import is_last, raised_by, raised_everywhere
from distributed.engine.overlap_cases import TINY
from distributed.optim.cases import (
    all_bytes,
    built,
    check_weights,
    parameters_of,
    raise_in_turn,
    raised_in_turn,
)
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


@on_ranks(2, 3, time_limit=30)
def test_what_one_rank_builds_otherwise_all_refuse(world):
    last = world.world_size - 1
    parameters = parameters_of(world)
    count, bad = len(parameters), world.rank == last
    double = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    block = {"block": (1, 16), "four_over_six": zerofp4.FourOverSix()}
    rows = nn.Parameter(zerofp4.quantize(torch.ones(34, 48, device=world.device).bfloat16(), **block))
    kinds = rf"\[1\] is bfloat16 \(7,\) in group 0 on rank 0 and .* on rank {last}"
    for params, options, message in [
        (parameters, {"lr": -1.0}, f"rank {last}: Invalid learning rate: -1.0"),
        ([*parameters, double], {}, f"rank {last}: .* must have one of the dtypes"),
        (parameters[1:], {}, rf"parameters sharded .* is {count} on rank 0 and {count - 1} on rank {last}"),
        ([parameters[i] for i in (0, 3, 2, 1, *range(4, count))], {}, kinds),
        ([rows, *parameters[1:]], {}, r"\[0\] is nvfp4 bf.* and nvfp4 1x16 with FourOverSix\(.* on rank"),
        (parameters, {"optimizer_class": torch.optim.SGD}, "optimizer_class of .*AdamW.* rank 0 and .*SGD"),
        (parameters, {"amax_groups": [[parameters[1], parameters[2]]]}, "amax_groups"),
        (parameters, {"gradient_wire": torch.float32}, "gradient_wire is None on rank 0 and torch.float32"),
        (parameters, {"on_nonfinite": "raise"}, "on_nonfinite is skip on rank 0 and raise on rank"),
        (parameters, {"overlap": "backward"}, "overlap is None on rank 0 and backward on rank"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            ZeroFP4Optimizer(params if bad else parameters, **keywords(options if bad else {}))
    ZeroFP4Optimizer(parameters).step()


def fail(*_) -> None:
    raise KeyError("no batch")


def interrupt(*_) -> None:
    raise KeyboardInterrupt


def move(optimizer: ZeroFP4Optimizer, parameters: list[nn.Parameter]) -> None:
    parameters[1].data = parameters[1].data.clone()


def recast(_, parameters: list[nn.Parameter], dtype: torch.dtype = torch.float16) -> None:
    parameters[1].data = parameters[1].data.to(dtype)


def exchange(optimizer: ZeroFP4Optimizer, bad: bool) -> None:
    if bad:  # a gradient in the memory of another
        parameters = optimizer.param_groups[0]["params"]
        parameters[1].grad = parameters[7].grad.view(-1)[:7]
    optimizer.step()


def stray(optimizer: ZeroFP4Optimizer, parameters: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(3, device=parameters[0].device)))


def set_dtype(p: nn.Parameter, dtype: torch.dtype) -> None:
    """Of its gradient, which is zeros."""
    p.grad = None
    p.grad_dtype = dtype
    p.grad = torch.zeros_like(p, dtype=dtype)


def backward(parameters: list[nn.Parameter], seed: int) -> None:
    pairs = zip(parameters, make_gradients(parameters, seed), strict=True)
    sum((p.float() * gradient).sum() for p, gradient in pairs).backward()


@dataclasses.dataclass(frozen=True)
class Fault:
    """What the last rank raises after a harm to its optimizer and parameters. call: with whether it is this
    rank.
    """

    message: str
    harm: Callable = lambda *_: None
    call: Callable = lambda optimizer, bad: optimizer.step()
    mend: Callable = lambda *_: None
    error: type[BaseException] = RuntimeError


def clip(optimizer: ZeroFP4Optimizer, bad: bool) -> None:
    optimizer.clip_grad_norm_(1.0)


MOVED = r"\['params'\]\[1\].* has moved since .* call refresh\(\)"
STRAY = "is not the list that the optimizer was built with"
FAULTS = {
    "closure": Fault("no batch", call=lambda opt, bad: opt.step(fail if bad else lambda: 3), error=KeyError),
    "interrupt": Fault(
        "", call=lambda opt, bad: opt.step(interrupt if bad else None), error=KeyboardInterrupt
    ),
    "moved": Fault(MOVED, move, mend=lambda opt, _: opt.refresh()),
    "moved, in clip": Fault(MOVED, move, clip, lambda opt, _: opt.refresh()),
    "another dtype": Fault(
        r"\[1\] was bfloat16 .* now it is float16 .*change the model back .*refresh\(\)",
        recast,
        mend=lambda opt, parameters: (recast(opt, parameters, torch.bfloat16), opt.refresh()),
    ),
    "exchanged": Fault("exchanged, shared or transposed", call=exchange),
    "stray": Fault(STRAY, stray, mend=lambda opt, _: opt.param_groups[0]["params"].pop()),
    "stray, in clip": Fault(STRAY, stray, clip, lambda opt, _: opt.param_groups[0]["params"].pop()),
    "another list": Fault(
        STRAY,
        lambda opt, _: setattr(opt, "param_groups", [*opt.param_groups]),
        mend=lambda opt, _: setattr(opt, "param_groups", opt.inners._outer_groups),
    ),
    "lr": Fault(
        r"param_groups\[0\].*lr.* must be finite.*, got inf",
        lambda opt, _: opt.param_groups[0].update(lr=math.inf),
        mend=lambda opt, _: opt.param_groups[0].update(lr=0.02),
        error=ValueError,
    ),
    "max_norm": Fault(
        "max_norm", call=lambda opt, bad: opt.clip_grad_norm_(-1.0 if bad else 1.0), error=ValueError
    ),
    "dtype": Fault(
        r"gradient_wire=torch\.float32",
        lambda _, parameters: set_dtype(parameters[1], torch.float32),
        mend=lambda _, parameters: set_dtype(parameters[1], torch.bfloat16),
        error=TypeError,
    ),
    "closure that clips": Fault(
        "max_norm", call=lambda opt, bad: opt.step(lambda: opt.clip_grad_norm_(0.5 - bad)), error=ValueError
    ),
    "hooks": Fault(
        r"step\(\) of optimizer.inner has hooks",
        lambda opt, _: opt.inner.register_step_post_hook(fail),
        mend=lambda opt, _: opt.inner._optimizer_step_post_hooks.clear(),
    ),
}


@on_ranks(2, nightly=[3])
@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize(
    ("name", "overlap"), [*((name, None) for name in FAULTS), ("lr", "update"), ("moved", "update")]
)
def test_a_fault_of_one_rank_ends_the_step_of_all(world, name, overlap, defers):
    """Nothing has changed on any rank, and the step after it has the bytes of one without it. Updates in
    backward passes have not begun then.
    """
    fault, bad = FAULTS[name], is_last(world)
    models = [built(world, FusedAdamW, lr=0.02, overlap=overlap, bucket_mb=TINY) for _ in range(2)]
    (parameters, optimizer), _ = models
    optimizer._agreement.defers = defers
    for own, each in models:
        backward(own, world.rank)
        each.step()
        each.zero_grad()
    with unchanged(parameters, optimizer):
        if bad:
            fault.harm(optimizer, parameters)
        backward(parameters, world.rank)
        raised = raised_in_turn(optimizer, lambda: fault.call(optimizer, bad))
        if bad:
            fault.mend(optimizer, parameters)
    told = rf"rank {world.world_size - 1} found an error"
    kind, message = (fault.error, fault.message) if bad else (RuntimeError, told)
    assert isinstance(raised, kind) and re.search(message, str(raised)), repr(raised)
    assert optimizer.broken is None
    for own, each in models:
        each.zero_grad()
        backward(own, 10 + world.rank)
        each.step()
    assert_all_equal(*(all_bytes(*model) for model in models), "tensor")


@on_ranks(2, time_limit=30)
def test_ranks_that_do_different_things_all_raise(world):
    parameters, optimizer = built(world, torch.optim.SGD, seed=0, lr=1.0)
    before, first = optimizer.gathered_masters(), world.rank == 0
    step, clip = optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)
    clip()
    if not first:
        optimizer.zero_grad()
    for call in (step, clip):
        with pytest.raises(RuntimeError, match="some ranks have gradients to reduce and others have reduced"):
            call()
    optimizer.zero_grad()
    set_gradients(parameters, make_gradients(parameters, world.rank))
    differ = r"max_norm must be the same on every rank, got from 0\.5 to 1\.0"
    for call, message in [
        (step if first else clip, r"some ranks called clip_grad_norm_ and others step\(\)"),
        (
            lambda: optimizer.clip_grad_norm_(1.0, 2.0 if first else math.inf),
            r"norm_type must be the same on every rank, got from 2\.0 to inf",
        ),
        (lambda: optimizer.clip_grad_norm_(1.0 if first else 0.5), differ),
        (lambda: step(lambda: optimizer.clip_grad_norm_(1.0 if first else 0.5)), differ),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call()
    assert_all_equal(optimizer.gathered_masters(), before, "master")
    assert step(clip) > 1
    check_weights(parameters, optimizer)


@on_ranks(2, 3, time_limit=60)
def test_a_model_in_distributed_data_parallel(world):
    """It writes rank 0's values into every weight: before the optimizer is built these are what the masters
    begin with, and the next step refuses them behind that. A save has the masters: nothing has changed.
    """
    net = make_net(world.device, seed=world.rank)
    ddp, parameters = DistributedDataParallel(net), list(net.parameters())
    optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, lr=0.1)
    for step in range(2):
        check_weights(parameters, optimizer)
        ddp(batch(world.device, 10 * step + world.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = optimizer.gathered_masters()
    DistributedDataParallel(net)
    message = raised_everywhere(world, RuntimeError, optimizer.step)
    assert "was written to since the last step" in message and "init_sync=False" in message
    found = dict(zerofp4.master_state_dict(net, optimizer))
    assert_all_equal([found[name] for name, _ in net.named_parameters()], before, "exported")
    assert_all_equal(optimizer.gathered_masters(), before, "master")
    check_weights(parameters, optimizer)


@on_ranks(2)
@pytest.mark.parametrize("overlap", ["backward", "update"])
@pytest.mark.parametrize("is_first", [False, True])
def test_distributed_data_parallel_beside_early_gradients(world, overlap, is_first):
    """Both would average them. A wrapper that was deleted does no harm."""
    net = make_net(world.device)
    ddp = DistributedDataParallel(net) if is_first else None
    optimizer = ZeroFP4Optimizer(net.parameters(), FusedAdamW, **keywords(overlap=overlap))
    ddp = ddp or DistributedDataParallel(net, init_sync=False)
    before = optimizer.gathered_masters()
    inputs = batch(world.device, world.rank)
    with pytest.raises(RuntimeError, match=r"is in a DistributedDataParallel.*overlap='update': leave"):
        ddp(inputs).sum().backward()
    assert_all_equal(optimizer.gathered_masters(), before, "master")
    optimizer.zero_grad()
    del ddp
    net(inputs).sum().backward()
    optimizer.step()
    check_weights(list(net.parameters()), optimizer)


def told_of(clip):
    """The warnings of a call of torch's function, and where they point."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clip()
    return [(str(warning.message), warning.filename) for warning in caught]


@on_ranks(1, 2)
@pytest.mark.parametrize("function", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
@pytest.mark.parametrize("in_ddp", [False, True])
def test_clipping_a_ranks_own_gradients_by_torch_warns_once(world, in_ddp, function):
    """Not what a trainer clips in DDP, nor another change of gradients."""
    net = make_net(world.device)
    model = DistributedDataParallel(net) if in_ddp else net
    optimizer = ZeroFP4Optimizer(net.named_parameters(), lr=0.01)

    def clip():
        function(net.parameters(), 1.0)

    model(batch(world.device, world.rank)).square().mean().backward()
    assert not told_of(lambda: [p.grad.mul_(0.5) for p in net.parameters()])
    assert not told_of(lambda: nn.utils.clip_grads_with_norm_(net.parameters(), 1.0, torch.ones(())))
    told = told_of(clip)
    if world.world_size == 1 or in_ddp:
        assert not told
    else:
        ((message, file),) = told
        assert message.startswith(f"torch.nn.utils.{function.__name__} clips this rank's own gradients")
        assert file == __file__
    assert not told_of(clip)
    optimizer.step()


# What a failed call has used is gone once nobody refers to it: no cycle waits for the garbage collector


def build_optimizer(world, group) -> Callable:
    parameters = parameters_of(world)
    return lambda: ZeroFP4Optimizer(parameters, process_group=group, lr=-1.0 if is_last(world) else 0.1)


def call_of_optimizer(world, group, name: str) -> Callable:
    parameters, optimizer = built(world, FusedAdamW, seed=world.rank, process_group=group)
    if is_last(world):
        FAULTS[name].harm(optimizer, parameters)
    call = functools.partial(FAULTS[name].call, optimizer, is_last(world))
    return functools.partial(raise_in_turn, optimizer, call)


def step_behind_the_vote(world, group) -> Callable:
    _, optimizer = built(world, seed=world.rank, process_group=group)
    if is_last(world):
        optimizer.inner.register_step_pre_hook(fail)
    if world.device.type == "cuda":  # NCCL tells nobody in the same step
        return lambda: (raised_by(optimizer.step), optimizer.step())
    return functools.partial(raise_in_turn, optimizer, optimizer.step)


def load(world, group) -> Callable:
    _, optimizer = built(world, seed=world.rank, process_group=group)
    state_dict = optimizer.state_dict()
    return lambda: optimizer.load_state_dict(state_dict | {"state": 3} if is_last(world) else state_dict)


CALLS = {
    "ZeroFP4Optimizer": build_optimizer,
    "behind the vote": step_behind_the_vote,
    "load_state_dict": load,
    # What is exchanged must come from a backward pass.
    **{name: functools.partial(call_of_optimizer, name=name) for name in FAULTS if name != "exchanged"},
}


def fail_in_a_group(world, name: str) -> weakref.ref[dist.ProcessGroup]:
    group = dist.new_group()
    call = CALLS[name](world, group)
    try:
        call()
    except (Exception, KeyboardInterrupt):
        dist.destroy_process_group(group)
        return weakref.ref(group)
    raise AssertionError(f"{name} did not fail")


@on_ranks(1, 2)
@pytest.mark.parametrize("name", CALLS)
def test_a_group_ends_with_destroy_process_group(world, name):
    """Else gloo's threads may meet the end of the interpreter, and end the process."""
    gc.disable()
    try:
        assert fail_in_a_group(world, name)() is None
    finally:
        gc.enable()
