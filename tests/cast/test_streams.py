"""A plan whose addresses are taken, or that goes, while what it queued on another stream has not run."""

from __future__ import annotations

import gc

import torch
from cases.cast import check_kinds, make
from helpers import collect_garbage, needs_gpu

import zerofp4
from zerofp4.cast import plan as cast_plan

CYCLES = 10**9


def warm_plan():
    """A plan whose kernels are loaded, its weights and masters, and a stream beside the current one."""
    weights, masters, starts = make("cuda", [(34, 288)] * 3)
    plan = zerofp4.CastPlan(weights, masters, starts)
    plan.step()
    plan.post()
    torch.cuda.synchronize()
    return plan, weights, masters, torch.cuda.Stream()


def move(masters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Give masters other storage and values; returns what they were, which a queued step still reads."""
    old = [master.data for master in masters]
    for master in masters:
        master.data = master * 5
    return old


@needs_gpu
def test_refresh_beside_a_queued_step_does_not_change_it():
    """It reads the descriptors that it was queued with: it casts the old masters."""
    plan, weights, masters, side = warm_plan()
    for master in masters:
        master.mul_(-2)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        plan.step()
        plan.post()
    old = move(masters)
    plan.refresh()
    assert not side.query(), "the stream was done too early to show anything"
    torch.cuda.synchronize()
    check_kinds(weights, old)
    plan.step()
    plan.post()
    check_kinds(weights, masters)


@needs_gpu
def test_a_step_waits_for_a_refresh_on_another_stream():
    plan, weights, masters, side = warm_plan()
    kept = move(masters)
    codes = weights[0].rowwise_data
    weights[0].rowwise_data = codes.clone()
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    plan.refresh()  # its copies are queued behind the sleep
    with torch.cuda.stream(side):
        plan.step()
        plan.post()
    assert not side.query(), "the refresh was done too early to show anything"
    torch.cuda.synchronize()
    check_kinds(weights, masters)
    assert len(kept) == len(masters)


@needs_gpu
def test_the_status_word_outlives_its_plan():
    """A queued step that finds an error writes to pinned memory, which nobody else may have by then."""
    collect_garbage()
    gc.freeze()  # what lives already: looking through all of it would take longer than the stream sleeps
    plan, *_, side = warm_plan()
    words = lambda: [torch.zeros(1, dtype=torch.int32, pin_memory=True) for _ in range(64)]  # noqa: E731
    words()  # pinning memory may wait for the device: later ones come from torch's cache
    address = plan._status.word.data_ptr()
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        plan._stages.run("begin", True)
        plan._stages.run("scale")
        plan._status.queued()
    del plan
    collect_garbage()
    assert address in [word.data_ptr() for _, word in cast_plan._retired]
    others = words()
    cast_plan._release_finished()
    assert not side.query(), "the stream was done too early to show anything"
    assert address not in [word.data_ptr() for word in others]
    torch.cuda.synchronize()
    assert not any(word.item() for word in others)
    cast_plan._release_finished()
    assert address not in [word.data_ptr() for _, word in cast_plan._retired]
