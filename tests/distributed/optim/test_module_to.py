"""Module.to() once the optimizer exists, as Trainer, accelerate and Lightning call it. Where it changes
nothing, training goes on with the bytes of a run without it, though torch swaps quantized parameters.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from cases.fsdp2 import Collectives

from distributed.engine.overlap_cases import SMALL, TINY, assert_same, loss_of, make
from distributed.optim.cases import raise_in_turn
from distributed.run import on_ranks

WAYS = {
    "in step()": {},
    "backward": {"overlap": "backward"},
    "forward": {"overlap": "forward", "gradient_dtype": torch.float32},
    "both": {"overlap": "both"},
}


def move(net, world) -> None:
    """Conversions that change nothing."""
    net.to(world.device)
    net.to(world.device, non_blocking=True)
    net.layers._apply(lambda tensor: tensor)


@on_ranks(1, 2)
@pytest.mark.parametrize("way", WAYS)
def test_what_changes_nothing_is_not_seen(world, way):
    """Before the first backward pass, between two of them, and with gradients of which one is missing."""
    models = [make(world, bucket_mb=SMALL, **WAYS[way]) for _ in range(2)]
    for step in range(3):
        for (net, optimizer), moves in zip(models, (False, True), strict=True):
            for micro in range(2):
                if moves and micro != step:
                    move(net, world)
                with optimizer.no_sync() if micro == 0 else contextlib.nullcontext():
                    loss_of(net, world, 10 * step + micro, rare=micro == 0).backward()
            if moves and step != 2:
                move(net, world)
            optimizer.clip_grad_norm_(0.1)
            if moves:
                move(net, world)
            optimizer.step()
            optimizer.zero_grad()
        assert_same(models, f"step {step}")


@on_ranks(2)
def test_gradients_are_still_made_where_they_travel_from(world):
    """And buckets still begin in backward passes."""
    net, optimizer = make(world, overlap="backward", bucket_mb=TINY)
    places, calls = [], []
    for step in range(2):
        with Collectives() as begun:
            loss_of(net, world, step).backward()
        calls.append(begun.calls)
        places.append([p.grad.data_ptr() for p in net.parameters()])
        move(net, world)
        places.append([p.grad.data_ptr() for p in net.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        move(net, world)
    assert all(found == places[0] for found in places)
    assert calls[1] == calls[0] and len(calls[0]) >= len(optimizer.describe()["buckets"]) > 1


@on_ranks(1, 2)
@pytest.mark.parametrize("ranks", ["one", "all"])
def test_what_changes_something_is_found_by_the_next_step(world, ranks):
    """And taken back by refresh() where that can be."""
    models = [make(world) for _ in range(2)]
    net, optimizer = models[1]
    changes = world.rank == 0 or ranks == "all"
    for one, own in models:
        loss_of(one, world, 0).backward()
        own.step()
        own.zero_grad()
    found = "rank 0 found an error, and no rank takes this step"
    if changes:
        net.layers[1].half()
        assert net.layers[1].weight.dtype == torch.float16
        found = r"layers\.1\.\w+' was .*bfloat16.* now it is .*float16.* change the model back .*refresh\(\)"
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match=found):
            raise_in_turn(optimizer, call)
    if changes:
        with pytest.raises(ValueError, match=found):
            optimizer.refresh()
        net.layers[1].bfloat16()
        optimizer.refresh()
    for one, own in models:
        own.zero_grad()
        loss_of(one, world, 1).backward()
        own.step()
    assert_same(models, "behind refresh()")
