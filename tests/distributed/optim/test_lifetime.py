"""What a failed call has used is gone once nobody refers to it: no cycle waits for the garbage collector."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import zerofp4
from distributed.cases import Model, is_last, raised_by
from distributed.optim.cases import built, parameters_of, raise_in_turn
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer
from zerofp4.shard import Shard


def fail(*_) -> None:
    raise ValueError("told to")


def interrupt(*_) -> None:
    raise KeyboardInterrupt


def call_of_plan(world, group) -> Callable:
    """The last rank has a shard that lies outside of its weight."""
    model = Model(world, "even")
    if is_last(world):
        model.shards[0][world.rank] = Shard(1 << 40, model.numels[0])
    return functools.partial(model.plan, group=group)


def step(optimizer, *_) -> None:
    optimizer.step()


def move(optimizer, parameters) -> None:
    parameters[1].data = parameters[1].data.clone()


def load(optimizer, last: bool) -> None:
    state_dict = optimizer.state_dict()
    optimizer.load_state_dict(state_dict | {"state": 3} if last else state_dict)


STEPS = {
    "closure": (None, lambda o, last: o.step(fail if last else lambda: None)),
    "interrupt": (None, lambda o, last: o.step(interrupt if last else lambda: None)),
    "moved parameter": (move, step),
    "behind the vote": (lambda optimizer, _: optimizer.inner.register_step_pre_hook(fail), step),
    "clip_grad_norm_": (None, lambda o, last: o.clip_grad_norm_(-1.0 if last else 1.0)),
    "load_state_dict": (None, load),
}
"""What happens to an optimizer on the last rank, and the call that fails."""


def call_of_optimizer(world, group, name: str) -> Callable:
    harm, call = STEPS[name]
    optimizer_class = torch.optim.AdamW if name == "behind the vote" else FusedAdamW
    parameters, optimizer = built(world, optimizer_class, seed=world.rank, process_group=group)
    if harm is not None and is_last(world):
        harm(optimizer, parameters)
    function = functools.partial(call, optimizer, is_last(world))
    if name == "behind the vote" and world.device.type == "cuda":  # NCCL tells nobody in the same step
        return lambda: (raised_by(function), optimizer.step())
    return functools.partial(raise_in_turn, optimizer, function) if name != "load_state_dict" else function


def build_optimizer(world, group) -> Callable:
    parameters = parameters_of(world)
    return lambda: ZeroFP4Optimizer(parameters, process_group=group, lr=-1.0 if is_last(world) else 0.1)


def step_after_a_gradient_was_sent(world, group) -> Callable:
    parameters, optimizer = built(world, FusedAdamW, process_group=group, overlap="backward")
    values = [p.dequantize() if isinstance(p, zerofp4.NVFP4Tensor) else p for p in parameters]
    sum(value.float().sum() for value in values).backward()
    if is_last(world):
        parameters[1].grad.mul_(2)
        if world.world_size == 1:
            move(optimizer, parameters)
    return optimizer.step


CALLS = {
    "CastPlan": call_of_plan,
    "ZeroFP4Optimizer": build_optimizer,
    "overlap": step_after_a_gradient_was_sent,
    **{name: functools.partial(call_of_optimizer, name=name) for name in STEPS},
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
