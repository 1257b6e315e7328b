"""What ranks of a ZeroFP4Optimizer tell each other before a step, and what all do about it."""

import contextlib
import copy
import math
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases.fsdp2 import Collectives
from cases.optim import keywords, make_gradients, set_gradients, take_step, unchanged
from torch.distributed.device_mesh import init_device_mesh

from distributed.cases import is_last, raised_by, raised_everywhere
from distributed.optim.cases import (
    built,
    check_weights,
    gradients_of,
    parameters_of,
    raise_in_turn,
)
from distributed.run import on_ranks
from zerofp4.engine import GradientMemory
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


@on_ranks(2)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, FusedAdamW])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_finite_gradients_with_an_infinite_mean_skip_a_clipped_step(world, cls, norm_type):
    """A clip looks for a NaN or Inf in the means alone; squares that overflow are none."""
    parameters, optimizer = built(world, cls, lr=0.1)
    for value in (1e30, 2e38, 1.0):
        is_bad = value == 2e38
        set_gradients(parameters, make_gradients(parameters, world.rank))
        parameters[3].grad.fill_(value)
        with unchanged(parameters, optimizer) if is_bad else contextlib.nullcontext():
            optimizer.clip_grad_norm_(1.0, norm_type)
            optimizer.step()
        assert optimizer.skipped_steps == (value != 1e30) and optimizer.found_inf.item() == is_bad
        assert optimizer.first_nonfinite() == ("param_groups[0]['params'][3]" if is_bad else None)
        optimizer.zero_grad()


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16, torch.float32, None])
def test_a_gradient_that_the_wire_makes_infinite(world, wire):
    """In a world of any size: those of one rank alone are found where they were packed."""
    parameters, optimizer = built(world, torch.optim.SGD, lr=0.1, gradient_wire=wire)
    assert parameters[3].dtype == torch.float32
    below, large = (-65519.0, -65520.0) if wire == torch.float16 else (3.3e38, 3.4e38)
    for value in (below, large):
        set_gradients(parameters, make_gradients(parameters, 0))
        if world.rank == 0:
            parameters[3].grad.view(-1)[-1] = value
        found = wire in (torch.bfloat16, torch.float16) and value == large
        with unchanged(parameters, optimizer) if found else contextlib.nullcontext():
            optimizer.step()
        assert optimizer.skipped_steps == found
        assert optimizer.first_nonfinite() == ("param_groups[0]['params'][3]" if found else None)
    assert all(master.isfinite().all() for master in optimizer.gathered_masters())


@on_ranks(1, 2, time_limit=30)
def test_raise_is_raised_by_all_names_the_parameter_and_changes_nothing(world):
    parameters = parameters_of(world)
    named = [(f"layer.{i}", p) for i, p in enumerate(parameters)]
    optimizer = ZeroFP4Optimizer(named, on_nonfinite="raise")
    clip = lambda: optimizer.clip_grad_norm_(1.0)  # noqa: E731
    take_step(parameters, optimizer, 0)
    for i in (5, 2) if is_last(world) else (4,):
        parameters[i].grad.view(-1)[1] = -math.inf if i == 4 else math.nan
    with unchanged(parameters, optimizer):
        for call in (optimizer.step, clip, optimizer.step, lambda: optimizer.step(clip)):
            message = raised_everywhere(world, FloatingPointError, call)
            place = "param_groups[0]['params'][2] 'layer.2'"
            assert message.startswith(f"the gradient of {place} holds a NaN or Inf on some rank")
    assert optimizer.skipped_steps == 0
    optimizer.zero_grad()
    set_gradients(parameters, make_gradients(parameters, 1))
    clip()
    optimizer.step()
    assert optimizer.first_nonfinite() is None
    check_weights(parameters, optimizer)


@on_ranks(2)
def test_a_sum_that_overflows_is_left_to_the_cast(world):
    """Finite on each rank, infinite together: the masters become infinite, their weights stay."""
    parameters, optimizer = built(world, torch.optim.SGD, seed=0, lr=0.1)
    parameters[0].grad[3, 5] = 3e38
    codes = parameters[0].rowwise_data.clone()
    optimizer.step()
    assert optimizer.skipped_steps == 0 and optimizer.first_nonfinite() is None
    assert optimizer.found_inf.item() == 1 and torch.equal(parameters[0].rowwise_data, codes)


@on_ranks(2, nightly=[3], time_limit=30)
@pytest.mark.parametrize("defers", [False, True])
def test_options_that_differ_are_listed(world, defers):
    parameters, bad = parameters_of(world), is_last(world)
    tensor = lambda value: torch.tensor(value, device=world.device)  # noqa: E731
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": tensor(0.5)}]
    optimizer = ZeroFP4Optimizer(groups, FusedAdamW, lr=tensor(0.25), weight_decay=0.0)
    optimizer._agreement.defers = defers
    take_step(parameters, optimizer, 0)
    with unchanged(parameters, optimizer):
        for g, name, other, here, there in [
            (0, "lr", tensor(0.125), "tensor(0.25)", "tensor(0.125)"),
            (0, "lr", 0.25, "tensor(0.25)", "0.25"),
            (1, "betas", (0.9, 0.99), "0.9 0.999", "0.9 0.99"),
            (1, "weight_decay", 0.2, "0.0", "0.2"),
        ]:
            group = optimizer.param_groups[g]
            good, group[name] = group[name], other if bad else group[name]
            place = f"param_groups[{g}]['{name}']"
            for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
                message = raised_everywhere(world, RuntimeError, raise_in_turn, optimizer, call)
                _, first, other = re.split(r"rank \d has ", message)
                assert "options of param_groups must be the same on every rank" in message
                assert first == f"{place} {here}; " and other.startswith(f"{place} {there}")
            group[name] = good
        optimizer.param_groups[0] |= {} if bad else {"mine": 1}
        raised = raised_everywhere(world, RuntimeError, raise_in_turn, optimizer, optimizer.step)
        assert raised.count("param_groups[0]['mine'] 1.0") == 1
        optimizer.param_groups[0].pop("mine", None)
    optimizer.param_groups[1]["weight_decay"] = 0 if bad else 0.0  # the same number
    for _ in range(2):
        optimizer.step()
    check_weights(parameters, optimizer)


@on_ranks(2, time_limit=30)
def test_ranks_out_of_step(world):
    _, optimizer = built(world)
    optimizer._agreement.steps += world.rank
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        message = raised_everywhere(world, RuntimeError, call)
        assert message.startswith("the ranks are out of step: some have taken 0 steps and others 1")


@on_ranks(2)
def test_a_step_is_one_vote(world):
    """One small reduction that the host reads, besides those of gradients, norms and amaxes."""
    parameters, optimizer = built(world)
    with Collectives() as step:
        take_step(parameters, optimizer, 0)
    with Collectives() as clip:
        optimizer.clip_grad_norm_(1.0)
    dtypes = [[dtype for *_, dtype in calls.named("allreduce")] for calls in (step, clip)]
    assert dtypes == [[torch.float64, torch.float32], [torch.float64, torch.int64]]  # the vote comes first


@on_ranks(1, 2)
@pytest.mark.parametrize("cls", [FusedAdamW, torch.optim.SGD])
def test_a_found_inf_that_a_user_sets_skips_the_step_on_every_rank(world, cls):
    """As a GradScaler sets it, on one rank: it is the user's, and stays where it is."""
    parameters, optimizer = built(world, cls, lr=0.1)
    for step, value in enumerate((0.0, 1.0, 0.0)):
        set_gradients(parameters, make_gradients(parameters, world.rank))
        given = torch.tensor([value], device=world.device)
        if world.rank == world.world_size - 1:
            optimizer.inner.found_inf = given
        with unchanged(parameters, optimizer) if value else contextlib.nullcontext():
            optimizer.step()
        if world.rank == world.world_size - 1:
            assert optimizer.inner.found_inf is given
        assert (optimizer.found_inf.item(), optimizer.skipped_steps) == (value, step > 0)
        name = optimizer.first_nonfinite()
        assert "which was given a found_inf" in name if value else name is None
    check_weights(parameters, optimizer)


# Votes that no host waits for: the outcome is read in the first collective call of the next step


def build(world, defers=True, **options):
    parameters, optimizer = built(world, FusedAdamW, lr=0.02, weight_decay=0.1, **options)
    optimizer._agreement.defers = defers
    return parameters, optimizer


def take(world, model, step, clips=False):
    parameters, optimizer = model
    set_gradients(parameters, gradients_of(world, parameters, step))
    if clips:
        optimizer.clip_grad_norm_(0.003)
    optimizer.step()


@on_ranks(2)
def test_the_backend_for_the_device_of_the_parameters_decides(world):
    """Of a group that has several, as torch recommends, and of one that was given none."""
    on_gpu = world.device.type == "cuda"
    for backend in ("cpu:gloo,cuda:nccl" if on_gpu else "cpu:gloo", None):
        group = dist.new_group(backend=backend)
        model = built(world, FusedAdamW, lr=0.02, weight_decay=0.1, process_group=group)
        reason = model[1].describe()["host_waits"]
        assert reason is None if on_gpu else "backend for cpu is gloo" in reason
        take(world, model, 0, clips=True)
        model[1].check()
        check_weights(*model)


@on_ranks(2, nightly=[3], time_limit=60)
@pytest.mark.parametrize("call", ["step", "clip"])
@pytest.mark.parametrize("replicas", [False, True])
def test_a_rank_that_a_clip_broke_reduces_only_what_the_others_do(world, call, replicas):
    """They have reduced their gradients in that clip, and it has not: else each would wait for the other."""
    parameters, options = parameters_of(world), {"gradient_wire": torch.float16, "transport": "collective"}
    mesh = init_device_mesh(world.device.type, (world.world_size, 1)) if replicas else None
    groups = [{"params": parameters, "process_group": mesh}]
    optimizer = ZeroFP4Optimizer(groups, FusedAdamW, lr=0.02, **keywords(options))
    optimizer._agreement.defers = True
    model = parameters, optimizer
    saved = copy.deepcopy(optimizer.state_dict())
    set_gradients(parameters, gradients_of(world, parameters, 0))
    if world.rank == 1:
        refuse = mock.Mock(side_effect=RuntimeError("no memory today"))
        with (
            mock.patch.object(GradientMemory, "take", refuse),
            pytest.raises(RuntimeError, match="no memory today"),
        ):
            optimizer.clip_grad_norm_(1.0)
    else:
        optimizer.clip_grad_norm_(1.0)
    if call == "clip":
        assert optimizer.clip_grad_norm_(1.0).isnan()
    broken = pytest.raises(RuntimeError, match="left in the middle")
    with broken if world.rank == 1 else contextlib.nullcontext():
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="which no rank has taken: rank 1 found an error"):
        optimizer.step()
    optimizer.load_state_dict(saved)
    take(world, model, 1)
    check_weights(*model)


@on_ranks(2)
@pytest.mark.parametrize("defers", [False, True])
def test_a_refused_step_is_not_counted(world, defers):
    """Nor in a save directly after it, which all ranks can make; the next step raises all the same."""
    parameters, optimizer = model = build(world, defers)
    for step in range(3):
        if step == 2 and world.rank == 1:
            parameters[1].data = parameters[1].data.clone()
        tells = step == 2 and (world.rank == 1 or not defers)
        with pytest.raises(RuntimeError) if tells else contextlib.nullcontext():
            take(world, model, step)
    optimizer.refresh()
    for _ in range(2):
        assert optimizer.state_dict()["steps"] == 2
        assert all(p.saves == {optimizer._saved.save_id} for p in optimizer.state[parameters[0]].values())
    saved = optimizer.state_dict()
    if defers:
        with pytest.raises(RuntimeError, match="which no rank has taken: rank 1 found an error"):
            optimizer.step()
    assert optimizer.state_dict()["steps"] == 2
    optimizer.step()
    assert optimizer.state_dict()["steps"] == 3
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["steps"] == 2


@on_ranks(2)
def test_an_error_of_every_rank_in_a_clip(world):
    """Each raises its own in step(), hears in the next one that a rank had one, and goes on."""
    parameters, optimizer = build(world)
    set_gradients(parameters, gradients_of(world, parameters, 0))
    assert optimizer.clip_grad_norm_(-1.0).isnan()
    raised = [raised_by(optimizer.step) for _ in range(3)]
    assert isinstance(raised[0], ValueError) and "max_norm must be 0 or more" in str(raised[0])
    assert "which no rank has taken: rank" in str(raised[1])
    assert raised[2] is None and optimizer.state_dict()["steps"] == 1
