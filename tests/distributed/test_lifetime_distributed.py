"""What a failed call has used is gone once nobody refers to it: no cycle waits for the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from fsdp2_cases import make_model, mesh_of, shard, take_experts
from optim_cases import make_gradients, set_gradients
from torch import nn

import zerofp4
from distributed.cases import Model
from distributed.checks_optim import parameters_of
from distributed.run import on_ranks
from zerofp4.integrations import fsdp2
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def is_last(world) -> bool:
    return world.rank == world.world_size - 1


# Each returns a call that fails on every rank, for a reason that the last one alone has.


def function_call(function: Callable, good_calls: int) -> Callable:
    """Of cast_master_weights_to_nvfp4 or all_gather_nvfp4, after good ones."""

    def prepare(world, group):
        model = Model(world, "even")
        gathers = function is zerofp4.all_gather_nvfp4

        def call(starts):
            rest = [model.numels] if gathers else []
            first = [model.weights] if gathers else [model.weights, model.masters]
            function(*first, starts, *rest, group)

        for _ in range(good_calls):
            call(model.starts)
        return lambda: call([1 << 40, *model.starts[1:]] if is_last(world) else model.starts)

    return prepare


def other_shards(world, group) -> Callable:
    """The last rank owns less than in the call before, or, in a world of one, something that is no list."""
    model = Model(world, "even")
    arguments = (model.weights, model.masters, model.starts)
    zerofp4.cast_master_weights_to_nvfp4(*arguments, group)
    if is_last(world):
        arguments = (model.weights, [None, *model.masters[1:]], [None, *model.starts[1:]])
        if world.world_size == 1:
            arguments = (model.weights, model.masters, 3)
    return lambda: zerofp4.cast_master_weights_to_nvfp4(*arguments, group)


def plan_built(world, group) -> Callable:
    model = Model(world, "even")
    starts = [1 << 40, *model.starts[1:]] if is_last(world) else model.starts
    return lambda: zerofp4.CastPlan(model.weights, model.masters, starts, group)


def plan_call(*names: str) -> Callable:
    """Of a plan of whose weights one has moved."""

    def prepare(world, group):
        model = Model(world, "even")
        plan = zerofp4.CastPlan(model.weights, model.masters, model.starts, group)
        if is_last(world) or "step" not in names:
            model.weights[2].rowwise_data = model.weights[2].rowwise_data.clone()
        return lambda: [getattr(plan, name)() for name in names]

    return prepare


def optimizer_built(world, group) -> Callable:
    parameters = parameters_of(world)
    return lambda: ZeroFP4Optimizer(parameters, process_group=group, lr=-1.0 if is_last(world) else 0.1)


def optimizer_of(world, group, optimizer_class=FusedAdamW, **options):
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters, optimizer_class, process_group=group, **options)
    set_gradients(parameters, make_gradients(parameters, world.rank))
    return parameters, optimizer


def fail(*_) -> None:
    raise ValueError("told to")


def step_with_closure(world, group) -> Callable:
    _, optimizer = optimizer_of(world, group)
    return lambda: optimizer.step(fail if is_last(world) else lambda: None)


def interrupted_closure(world, group) -> Callable:
    def interrupt():
        raise KeyboardInterrupt

    _, optimizer = optimizer_of(world, group)
    return lambda: optimizer.step(interrupt if is_last(world) else lambda: None)


def step_of_a_moved_parameter(world, group) -> Callable:
    parameters, optimizer = optimizer_of(world, group)
    if is_last(world):
        parameters[1].data = parameters[1].data.clone()
    return optimizer.step


def step_with_nan(world, group) -> Callable:
    parameters, optimizer = optimizer_of(world, group, on_nonfinite="raise")
    if is_last(world):
        parameters[1].grad[0] = torch.nan
    return optimizer.step


def step_with_a_hook(world, group) -> Callable:
    """An error behind the vote."""
    _, optimizer = optimizer_of(world, group, torch.optim.AdamW)
    if is_last(world):
        optimizer.inner.register_step_pre_hook(fail)
    return optimizer.step


def step_after_an_error_of_weights_without_codes(world, group) -> Callable:
    """The last rank tells the others of it in the vote of the next call."""
    parameter = nn.Parameter(torch.ones(64, device=world.device))
    optimizer = ZeroFP4Optimizer([parameter], torch.optim.AdamW, process_group=group)
    parameter.grad = torch.ones_like(parameter)
    if is_last(world):
        optimizer.inner.register_step_pre_hook(fail)

    def call():
        with contextlib.suppress(ValueError):
            optimizer.step()
        optimizer.step()

    return call


def dequantized(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.dequantize() if isinstance(parameter, zerofp4.NVFP4Tensor) else parameter


def step_after_a_gradient_was_sent(world, group) -> Callable:
    parameters = parameters_of(world)
    options = {"process_group": group, "overlap": "backward"}
    optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, **options)
    sum(p.float().sum() for p in map(dequantized, parameters)).backward()
    if is_last(world):
        parameters[1].grad.mul_(2)
        if world.world_size == 1:
            parameters[1].data = parameters[1].data.clone()
    return optimizer.step


def interrupted_update(world, group) -> Callable:
    """Of all ranks, and a step of the optimizers that it broke."""

    def interrupt(*_):
        raise KeyboardInterrupt

    _, optimizer = optimizer_of(world, group, torch.optim.AdamW)
    optimizer.inner.register_step_pre_hook(interrupt)

    def call():
        with contextlib.suppress(KeyboardInterrupt):
            optimizer.step()
        optimizer.step()

    return call


def clip(world, group) -> Callable:
    _, optimizer = optimizer_of(world, group)
    return lambda: optimizer.clip_grad_norm_(-1.0 if is_last(world) else 1.0)


def load(world, group) -> Callable:
    _, optimizer = optimizer_of(world, group)
    state_dict = optimizer.state_dict()
    if is_last(world):
        state_dict["state"] = 3
    return lambda: optimizer.load_state_dict(state_dict)


CALLS = {
    "cast": function_call(zerofp4.cast_master_weights_to_nvfp4, 0),
    "cast again": function_call(zerofp4.cast_master_weights_to_nvfp4, 1),
    "cast of other shards": other_shards,
    "gather": function_call(zerofp4.all_gather_nvfp4, 0),
    "gather again": function_call(zerofp4.all_gather_nvfp4, 1),
    "CastPlan": plan_built,
    "step of a plan": plan_call("step", "check"),
    "check of a plan": plan_call("check"),
    "gather of a plan": plan_call("step", "all_gather", "check"),
    "post of a plan": plan_call("post"),
    "ZeroFP4Optimizer": optimizer_built,
    "closure": step_with_closure,
    "interrupt": interrupted_closure,
    "interrupted update": interrupted_update,
    "moved parameter": step_of_a_moved_parameter,
    "nan": step_with_nan,
    "behind the vote": step_with_a_hook,
    "unheard": step_after_an_error_of_weights_without_codes,
    "overlap": step_after_a_gradient_was_sent,
    "clip_grad_norm_": clip,
    "load_state_dict": load,
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
