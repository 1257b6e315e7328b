"""What goes wrong while gradients travel: all ranks hear of it, and the step after it is right."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases.optim import assert_all_equal, keywords

from distributed.engine.overlap_cases import (
    OPTIONS,
    SMALL,
    TINY,
    assert_same,
    loss_of,
    make,
    nothing_changes,
    step_of,
)
from distributed.engine.overlap_checks import FOUND
from distributed.optim.cases import raise_in_turn
from distributed.run import on_ranks
from zerofp4.engine import GradientMemory
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


def make_models(world, **options):
    """One that waits for all gradients, and one that does not, in groups of their own: what one has sent in a
    pass that broke off would arrive in place of what the other sends next.
    """
    ways = [{"overlap": way, "process_group": dist.new_group()} for way in (None, "backward")]
    return [make(world, bucket_mb=SMALL, **way, **options) for way in ways]


def good_step(world, models, step, what):
    step_of(world, models, step)
    assert_same(models, what)


@on_ranks(2)
def test_an_optimizer_sends_nothing_once_another_has_its_parameters(world):
    """Both are alive, as where a cell of a notebook is run twice."""
    models, first = make_models(world), []
    good_step(world, models, 0, "first")
    for m, options in enumerate([{}, {"overlap": "backward", "process_group": dist.new_group()}]):
        net, earlier = models[m]
        first.append(earlier)
        loss_of(net, world, 7).backward()  # travels, and nobody waits for it
        warns = pytest.warns(UserWarning, match="begin with 4-bit values")
        with warns if world.rank == 0 else nullcontext():
            second = ZeroFP4Optimizer(net.named_parameters(), FusedAdamW, **keywords(OPTIONS, options))
        second.zero_grad()
        models[m] = net, second
    good_step(world, models, 0, "second")
    with pytest.raises(RuntimeError, match="another ZeroFP4Optimizer was built over these"):
        first[1].step()
    good_step(world, models, 1, "second, at last")


@on_ranks(2, 3, time_limit=60)
def test_a_rank_that_has_not_reduced_what_the_others_have_clipped(world):
    """It sends alone; the others take their part before all raise, or it would arrive in the next step."""
    if world.device.type == "cuda":
        pytest.skip("with NCCL the vote waits behind what one rank sent alone, for the group's timeout")
    models = make_models(world)
    for net, optimizer in models:
        loss_of(net, world, 0).backward()
        optimizer.clip_grad_norm_(1.0)
        if world.rank == 1:
            optimizer.zero_grad()
            loss_of(net, world, 1).backward()
        with pytest.raises(RuntimeError, match="some ranks have gradients to reduce and others"):
            optimizer.step()
        optimizer.zero_grad()
    good_step(world, models, 3, "after")


@on_ranks(2, time_limit=60)
def test_a_gradient_that_cannot_be_sent(world):
    """In the middle of a backward pass, whose own rank goes on."""
    models = make_models(world, gradient_wire=torch.float16)
    net, optimizer = models[1]
    take, calls = GradientMemory.take, []

    def refuse(self, mine):
        calls.append(self)
        if world.rank == 1 and len(calls) == 2:
            raise torch.OutOfMemoryError("no memory today")
        take(self, mine)

    with mock.patch.object(GradientMemory, "take", refuse):
        loss_of(net, world, 1).backward()
        found = "no memory today" if world.rank == 1 else f"rank 1 {FOUND}"
        with nothing_changes(net, optimizer), pytest.raises(RuntimeError, match=found):
            optimizer.step()
    optimizer.zero_grad()
    good_step(world, models, 3, "after")


@on_ranks(2)
def test_a_weight_that_two_reentrant_segments_use(world):
    """It gets a second gradient after the first was sent. Other weights have one, and travel as ever."""
    models = make_models(world)
    net, optimizer = models[1]
    with nothing_changes(net, optimizer):
        loss_of(net, world, 0, reentrant=True).backward()
        with pytest.raises(RuntimeError, match="use_reentrant=False where several segments use one weight"):
            optimizer.step()
        optimizer.zero_grad()
    for step in range(2):
        step_of(world, models, step, reentrant=True, shared=False)
        assert_same(models, f"step {step}")


@on_ranks(2)
def test_gradients_in_the_memory_of_another_are_refused(world):
    """By every rank, before anything has changed; clones of the same gradients are taken."""
    net, optimizer = make(world, transport="auto", bucket_mb=TINY)
    masters = optimizer.gathered_masters()
    loss_of(net, world, 0).backward()
    if world.rank == 1:
        a, b = net.layers[0].weight, net.layers[1].weight
        a.grad, b.grad = b.grad, a.grad
    found = "exchanged, shared or transposed" if world.rank == 1 else f"rank 1 {FOUND}"
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(0.3)):
        with pytest.raises(RuntimeError, match=found):
            raise_in_turn(optimizer, call)
    assert_all_equal(optimizer.gathered_masters(), masters, "master")
    for p in net.parameters():
        p.grad = None if p.grad is None else p.grad.clone()
    optimizer.step()
    assert optimizer.skipped_steps == 0
