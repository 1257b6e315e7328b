"""p.grad that lie in the memory of another parameter's gradient: no step takes them."""

from __future__ import annotations

import pytest
import torch
from cases.optim import assert_all_equal

from distributed.engine.overlap_cases import TINY, loss_of, make
from distributed.optim.cases import raise_in_turn
from distributed.run import on_ranks

TOGETHER, APART = None, TINY
"""bucket_mb: all weights of a kind in one bucket, each in its own."""


def exchanged(net):
    a, b = net.layers[0].weight, net.layers[1].weight
    a.grad, b.grad = b.grad, a.grad


def rotated(net):
    a, b, c = (layer.weight for layer in net.layers[:3])
    a.grad, b.grad, c.grad = b.grad, c.grad, a.grad


def handed_on(net):
    """One place is the next one's, and its own parameter has another gradient or none."""
    a, b, c, d = (layer.weight for layer in net.layers)
    b.grad, a.grad = a.grad, torch.ones_like(a.grad)
    c.grad, d.grad = d.grad, None


def parts(net):
    weight = net.layers[2].weight
    net.layers[0].bias.grad, net.layers[1].bias.grad = weight.grad[3], weight.grad[:, 5]
    weight.grad = None


CHANGES = {c.__name__: c for c in (exchanged, rotated, handed_on, parts)}


@on_ranks(2)
@pytest.mark.parametrize("bucket_mb", [TOGETHER, APART])
@pytest.mark.parametrize("change", list(CHANGES))
def test_gradients_in_the_memory_of_another_are_refused(world, change, bucket_mb):
    """By every rank, before anything has changed; clones of the same gradients are taken."""
    net, optimizer = make(world, transport="auto", bucket_mb=bucket_mb)
    masters = optimizer.gathered_masters()
    loss_of(net, world, 0).backward()
    if world.rank == 1:
        CHANGES[change](net)
    others = "rank 1 found an error, and no rank takes this step"
    found = "exchanged, shared or transposed" if world.rank == 1 else others
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(0.3)):
        with pytest.raises(RuntimeError, match=found):
            raise_in_turn(optimizer, call)
    assert_all_equal(optimizer.gathered_masters(), masters, "master")
    for p in net.parameters():
        p.grad = None if p.grad is None else p.grad.clone()
    optimizer.step()
    assert optimizer.skipped_steps == 0
