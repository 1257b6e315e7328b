"""What a failed call has used is gone once nobody refers to it: no cycle waits for the garbage collector."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from cases.fsdp2 import make_model, mesh_of, shard, take_experts

import zerofp4
from distributed.cases import Model, is_last, raised_by
from distributed.optim.cases import built, parameters_of, raise_in_turn
from distributed.run import on_ranks
from zerofp4.integrations import fsdp2
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer
from zerofp4.shard import Shard


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def fail(*_) -> None:
    raise ValueError("told to")


def interrupt(*_) -> None:
    raise KeyboardInterrupt


# What fails on every rank, for a reason that the last one alone has

FUNCTIONS = {"cast": "cast", "gather": "gather", "CastPlan": "plan"}
"""Methods of Model. The last rank has a shard that lies outside of its weight."""


def call_of_function(world, group, name: str) -> Callable:
    model = Model(world, "even")
    if is_last(world):
        model.shards[0][world.rank] = Shard(1 << 40, model.numels[0])
    return functools.partial(getattr(model, FUNCTIONS[name]), group=group)


def step(optimizer, *_) -> None:
    optimizer.step()


def move(optimizer, parameters) -> None:
    parameters[1].data = parameters[1].data.clone()


def hook(error: Callable) -> Callable:
    return lambda optimizer, _: optimizer.inner.register_step_pre_hook(error)


def load(optimizer, last: bool) -> None:
    state_dict = optimizer.state_dict()
    optimizer.load_state_dict(state_dict | {"state": 3} if last else state_dict)


ADAMW = {"optimizer_class": torch.optim.AdamW}
STEPS = {
    "closure": ({}, None, lambda o, last: o.step(fail if last else lambda: None)),
    "interrupt": ({}, None, lambda o, last: o.step(interrupt if last else lambda: None)),
    "moved parameter": ({}, move, step),
    "nan": ({"on_nonfinite": "raise"}, lambda _, parameters: parameters[1].grad[0].fill_(torch.nan), step),
    "behind the vote": (ADAMW, hook(fail), step),
    "interrupted update": (ADAMW, hook(interrupt), step),
    "clip_grad_norm_": ({}, None, lambda o, last: o.clip_grad_norm_(-1.0 if last else 1.0)),
    "load_state_dict": ({}, None, load),
}
"""Options of an optimizer, what happens to it on the last rank (an interrupt on all), and the call."""


HEARD_LATER = {"closure", "interrupt", "moved parameter", "clip_grad_norm_"}
"""In the next step, by a rank without an error of its own, where no host waits for an agreement."""


def call_of_optimizer(world, group, name: str) -> Callable:
    options, harm, call = STEPS[name]
    options = {"optimizer_class": FusedAdamW, "process_group": group, **options}
    parameters, optimizer = built(world, seed=world.rank, **options)
    if harm is not None and (is_last(world) or name == "interrupted update"):
        harm(optimizer, parameters)
    function = functools.partial(call, optimizer, is_last(world))
    if name == "behind the vote" and world.device.type == "cuda":  # NCCL tells nobody in the same step
        return lambda: (raised_by(function), optimizer.step())
    return functools.partial(raise_in_turn, optimizer, function) if name in HEARD_LATER else function


def build_optimizer(world, group, _) -> Callable:
    parameters = parameters_of(world)
    return lambda: ZeroFP4Optimizer(parameters, process_group=group, lr=-1.0 if is_last(world) else 0.1)


def step_after_a_gradient_was_sent(world, group, _) -> Callable:
    parameters, optimizer = built(world, FusedAdamW, process_group=group, overlap="backward")
    values = [p.dequantize() if isinstance(p, zerofp4.NVFP4Tensor) else p for p in parameters]
    sum(value.float().sum() for value in values).backward()
    if is_last(world):
        parameters[1].grad.mul_(2)
        if world.world_size == 1:
            move(optimizer, parameters)
    return optimizer.step


CALLS = {
    **dict.fromkeys(FUNCTIONS, call_of_function),
    **dict.fromkeys(STEPS, call_of_optimizer),
    "ZeroFP4Optimizer": build_optimizer,
    "overlap": step_after_a_gradient_was_sent,
}


def fail_in_a_group(world, name: str) -> weakref.ref[dist.ProcessGroup]:
    group = dist.new_group()
    call = CALLS[name](world, group, name)
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
    with without_collector():
        assert fail_in_a_group(world, name)() is None


@on_ranks(1, 2)
def test_an_error_of_attach_is_gone_when_it_was_handled(world):
    model = make_model(world)
    fsdp2.prepare(model, take_experts)
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model, mesh_of(world))
    after = torch.optim.SGD(model.parameters(), lr=0.1)
    message = "'first.weight' is not a parameter of the optimizer"
    with without_collector():
        with pytest.raises(RuntimeError, match=message):
            fsdp2.attach(model, before if is_last(world) else after)
        assert not [e for e in gc.get_objects() if type(e) is RuntimeError and message in str(e)]


def prepare_with_an_amax_group(world) -> None:
    model = make_model(world)
    groups = [[model.get_parameter(f"{name}.weight") for name in ("first", "third")]]
    fsdp2.prepare(model, take_experts, amax_groups=groups)


@on_ranks(1, 2)
def test_weights_of_an_amax_group_are_gone_with_their_model(world):
    """After attach they hold the process group."""
    with without_collector():
        prepare_with_an_amax_group(world)
        assert not [found for found in gc.get_objects() if type(found).__name__ == "Weight"]
