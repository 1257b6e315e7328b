"""overlap="update" of one rank alone: backward passes update each weight as soon as its gradient is there."""

import functools
from types import SimpleNamespace

import pytest
import torch
from cases.optim import (
    assert_all_equal,
    built,
    keywords,
    make_gradients,
    set_gradients,
    through_a_file,
    turn_gradients,
)
from distributed.engine.overlap_cases import (
    OPTIONS,
    TINY,
    assert_same,
    loss_of,
    make_pair,
    nothing_changes,
    step_of,
)
from distributed.engine.overlap_cases import make_updating as make
from helpers import needs_gpu

import zerofp4
from zerofp4.optim import AveragedMasters, FusedAdamW, ZeroFP4Optimizer


@pytest.fixture
def world(device):
    return SimpleNamespace(device=device, rank=0, world_size=1)


def test_gradients_that_somebody_assigned(device):
    """All of a step in step(), fp16 parameters and experts too, in any order of memory."""
    ways = (OPTIONS | {"overlap": overlap, "bucket_mb": TINY} for overlap in (None, "update"))
    models = [built(device, FusedAdamW, **options) for options in ways]
    for step in range(3):
        for parameters, optimizer in models:
            gradients = make_gradients(parameters, step)
            gradients[step] = None
            set_gradients(parameters, gradients)
            turn_gradients(parameters[step::2])
            optimizer.step()
            optimizer.zero_grad()
        assert_all_equal(models[1][1].gathered_masters(), models[0][1].gathered_masters(), f"step {step}")


@pytest.mark.heavy
@pytest.mark.parametrize("whole", [False, True])
def test_compiled(world, whole):
    """Layers, or the model, whose gradients one node makes."""
    models = make_pair(world, bucket_mb=TINY)
    for net, _ in models:
        for module in [net] if whole else net.layers:
            module.compile(backend="aot_eager")
    for step in range(2):
        step_of(world, models, step)
    assert_same(models, "the end")


@needs_gpu
def test_a_backward_pass_on_another_stream():
    """The weights are there for what is queued behind step(), on its stream."""
    world = SimpleNamespace(device=torch.device("cuda"), rank=0)
    models, side = make_pair(world, bucket_mb=TINY), torch.cuda.Stream()
    for step in range(3):
        for net, optimizer in models:
            with torch.cuda.stream(side):
                side.wait_stream(torch.cuda.default_stream())
                torch.cuda._sleep(10_000_000)
                loss_of(net, world, step).backward()
            torch.cuda.default_stream().wait_stream(side)
            optimizer.step()
            optimizer.zero_grad()
        assert_same(models, f"step {step}")


# What it refuses


def again(net, optimizer, world, zeroes=False, **how):
    if zeroes:  # which takes no update back
        optimizer.zero_grad()
    loss_of(net, world, 1, **how).backward()


def in_segments(net, optimizer, world):
    """Two of which use one weight."""
    optimizer.step()
    again(net, optimizer, world, reentrant=True)


def assigned(net, optimizer, world):
    net.norm.weight.grad = torch.ones_like(net.norm.weight)
    optimizer.step()


def scaled(net, optimizer, world):
    optimizer.grad_scale = torch.full((), 2.0, device=world.device)  # as GradScaler.step() does
    optimizer.step()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (again, "got a second gradient before step"),
        (functools.partial(again, zeroes=True), "got a second gradient before step"),
        (in_segments, "use_reentrant=False where several segments use one weight"),
        (assigned, r"norm.weight.* was assigned after its update"),
        (scaled, "a GradScaler has scaled the loss"),
    ],
)
def test_what_comes_after_an_update_breaks_the_optimizer(world, call, message):
    """Which gradients are in the masters is not known."""
    net, optimizer = make(world, bucket_mb=TINY)
    loss_of(net, world, 0).backward()
    with pytest.raises(RuntimeError, match=message):
        call(net, optimizer, world)
    assert optimizer.broken is not None
    with pytest.raises(RuntimeError, match="of no more use"):
        optimizer.step()


def test_a_found_inf_of_ones_own(world):
    net, optimizer = make(world, bucket_mb=TINY)
    optimizer.inner.found_inf = torch.zeros((), device=world.device)
    with nothing_changes(net, optimizer), pytest.raises(RuntimeError, match=r"found_inf .* is not supported"):
        loss_of(net, world, 0).backward()
        optimizer.step()
    optimizer.inner.found_inf = None
    optimizer.zero_grad()
    step_of(world, [(net, optimizer)], 0)


# Checkpoints and errors


def test_between_a_backward_pass_and_its_step(world):
    """Nothing is clipped, accumulated, saved or handed over."""
    net, optimizer = make(world, bucket_mb=TINY)
    averages, unsaved = AveragedMasters(optimizer), r"call step\(\) before they are saved"
    taken = keywords(OPTIONS, masters_from=optimizer)
    loss_of(net, world, 1).backward()
    for call, message in (
        (lambda: optimizer.clip_grad_norm_(1.0), "clip_grad_norm_ needs all gradients"),
        (lambda: optimizer.no_sync().__enter__(), "accumulates gradients"),
        (lambda: through_a_file(optimizer.state_dict()), unsaved),
        (lambda: zerofp4.master_state_dict(net, optimizer), unsaved),
        (optimizer.consolidate_state_dict, unsaved),
        (averages.update, unsaved),
        (lambda: ZeroFP4Optimizer(net.named_parameters(), FusedAdamW, **taken), unsaved),
    ):
        with pytest.raises((RuntimeError, ValueError), match=message):
            call()
    optimizer.step()
    assert optimizer.broken is None
    through_a_file(optimizer.state_dict())
