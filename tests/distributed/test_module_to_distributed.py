"""Module.to() once the optimizer exists, as Trainer, accelerate and Lightning call it. Where it changes
nothing, training goes on with the bytes of a run without it, though torch swaps quantized parameters.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from distributed.overlap_cases import SMALL, assert_same, loss_of, make
from distributed.run import on_ranks

WAYS = {
    "in step()": {},
    "backward": {"overlap": "backward"},
    "forward": {"overlap": "forward", "gradient_dtype": torch.float32},
    "sharded": {"accumulate": "sharded", "gradient_dtype": torch.float32},
    "both, sharded": {"overlap": "both", "accumulate": "sharded"},
}


def moved(net, world):
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
        for number, (net, optimizer) in enumerate(models):
            for micro in range(3):
                if number and micro != step:
                    moved(net, world)
                if micro < 2:
                    adds_up = micro == 0 and "sharded" not in way
                    with optimizer.no_sync() if adds_up else contextlib.nullcontext():
                        loss_of(net, world, 10 * step + micro, rare=micro == 0).backward()
            optimizer.clip_grad_norm_(0.1)
            if number:
                moved(net, world)
            optimizer.step()
            optimizer.zero_grad()
        assert_same(models, f"step {step}")


@on_ranks(2)
def test_gradients_are_still_made_where_they_travel_from(world):
    """And buckets still begin in backward passes."""
    net, optimizer = make(world, overlap="backward", bucket_mb=1e-4)
    loss_of(net, world, 0).backward()
    there = [p.grad.data_ptr() for p in net.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    moved(net, world)
    begun, send = [], optimizer._exchange.send_gradients

    def counted(b, gradients):
        begun.append(b)
        send(b, gradients)

    optimizer._exchange.send_gradients = counted
    loss_of(net, world, 1).backward()
    assert begun == list(range(len(optimizer.describe()["buckets"])))
    assert [p.grad.data_ptr() for p in net.parameters()] == there
    moved(net, world)
    assert [p.grad.data_ptr() for p in net.parameters()] == there
    optimizer.step()


@on_ranks(1, 2)
@pytest.mark.parametrize("only", [False, True])
def test_what_changes_something_is_found_by_the_next_step(world, only):
    """On one rank or on all, and taken back by refresh() where that can be."""
    models = [make(world) for _ in range(2)]
    net, optimizer = models[1]
    for one, own in models:
        loss_of(one, world, 0).backward()
        own.step()
        own.zero_grad()
    if world.rank == 0 or not only:
        net.layers[1].half()
        assert net.layers[1].weight.dtype == torch.float16
        found = r"layers\.1\.(weight|bias).* has moved since the optimizer was"
    else:
        found = "rank 0 found an error, and no rank takes this step"
    for step in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match=found):
            step()
    if world.rank == 0 or not only:
        with pytest.raises(ValueError, match=r"layers\.1\.\w+' was .*bfloat16.* now it is .*float16"):
            optimizer.refresh()
        net.layers[1].bfloat16()
        optimizer.refresh()
    for one, own in models:
        own.zero_grad()
        loss_of(one, world, 1).backward()
        own.step()
    assert_same(models, "behind refresh()")
