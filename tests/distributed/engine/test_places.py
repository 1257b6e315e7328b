"""p.grad that lie in the memory of another parameter's gradient: no step takes them."""

from __future__ import annotations

import pytest
from cases.optim import assert_all_equal

from distributed.engine.overlap_cases import TINY, loss_of, make
from distributed.optim.cases import raise_in_turn
from distributed.run import on_ranks


@on_ranks(2)
def test_gradients_in_the_memory_of_another_are_refused(world):
    """By every rank, before anything has changed; clones of the same gradients are taken."""
    net, optimizer = make(world, transport="auto", bucket_mb=TINY)
    masters = optimizer.gathered_masters()
    loss_of(net, world, 0).backward()
    if world.rank == 1:
        a, b = net.layers[0].weight, net.layers[1].weight
        a.grad, b.grad = b.grad, a.grad
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
