"""Module.to() once the optimizer exists, as Trainer, accelerate and Lightning call it. Where it changes
nothing, training goes on with the bytes of a run without it, though torch swaps quantized parameters.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from distributed.engine.overlap_cases import SMALL, assert_same, loss_of, make, step_of
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


@on_ranks(1, 2)
def test_what_changes_something_is_found_by_the_next_step(world):
    """And taken back by refresh() where that can be."""
    models = [make(world) for _ in range(2)]
    net, optimizer = models[1]
    step_of(world, models, 0)
    found = "rank 0 found an error, and no rank takes this step"
    if world.rank == 0:
        net.layers[1].half()
        assert net.layers[1].weight.dtype == torch.float16
        found = r"layers\.1\.\w+' was .*bfloat16.* now it is .*float16.* change the model back .*refresh\(\)"
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match=found):
            raise_in_turn(optimizer, call)
    if world.rank == 0:
        with pytest.raises(ValueError, match=found):
            optimizer.refresh()
        net.layers[1].bfloat16()
        optimizer.refresh()
    optimizer.zero_grad()
    step_of(world, models, 1)
    assert_same(models, "behind refresh()")
