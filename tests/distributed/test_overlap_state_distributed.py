"""What lies in the FP32 slices while gradients travel: loads, norms and masters beside them."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from helpers import assert_bytes_equal

from distributed.overlap_cases import SMALL, assert_same, in_two_places, loss_of, make
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer, zero


@on_ranks(1, 2)
@pytest.mark.parametrize(
    ("overlap", "accumulate"), [(None, "local"), ("backward", "local"), ("backward", "sharded")]
)
@pytest.mark.parametrize("options", [{}, {"gradient_wire": torch.float16}])
def test_a_backward_pass_between_a_read_and_its_load(world, overlap, accumulate, options):
    """What was read is not mixed with gradients: the load is refused, or right."""
    with mock.patch.object(zero, "CollectiveTransport", in_two_places):  # as on a GPU
        net, optimizer = make(world, overlap=overlap, accumulate=accumulate, bucket_mb=SMALL, **options)
    loss_of(net, world, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    state_dict = optimizer.state_dict()
    for own in state_dict["state"].values():
        for name, piece in own.items():
            piece.copy_(piece.full_tensor() + (name == "master"))
    expected = [master + 1 for master in optimizer.gathered_masters()]
    loss_of(net, world, 1).backward()
    try:
        optimizer.load_state_dict(state_dict)
    except ValueError as error:
        assert "into memory that gradients or another load needed since" in str(error)
        return
    for i, (mine, right) in enumerate(zip(optimizer.gathered_masters(), expected, strict=True)):
        assert_bytes_equal(mine, right, f"master {i}")


@on_ranks(2, 3)
def test_a_norm_after_a_step_that_raised(world):
    """It has nothing of what was sent for that step."""
    models = [make(world, overlap=o, bucket_mb=SMALL, on_nonfinite="raise") for o in (None, "backward")]
    norms = []
    for net, optimizer in models:
        hook = net.rare.weight.register_hook(lambda g: g * math.inf)
        loss_of(net, world, 0).backward()
        hook.remove()
        with pytest.raises(FloatingPointError):
            optimizer.step()
        optimizer.zero_grad()
        loss_of(net, world, 1).backward()
        norms.append(optimizer.clip_grad_norm_(0.1).item())
        optimizer.step()
    assert norms[0] == norms[1]
    assert_same(models, "after")


@on_ranks(1, 2)
@pytest.mark.parametrize("overlap", [None, "backward"])
def test_masters_from_an_optimizer_that_holds_sums(world, overlap):
    """They would be lost: all ranks raise, and its step uses them."""
    options = {"overlap": overlap, "accumulate": "sharded", "bucket_mb": SMALL}
    models = [make(world, bucket_mb=SMALL), make(world, **options)]
    for net, optimizer in models:
        loss_of(net, world, 0).backward()
        if optimizer is models[1][1]:
            with pytest.raises(ValueError, match="masters_from holds gradients"):
                ZeroFP4Optimizer(net.named_parameters(), FusedAdamW, masters_from=optimizer, **options)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(models, "the step")
    net, optimizer = models[1]
    before = [master.clone() for master in optimizer.gathered_masters()]
    new = ZeroFP4Optimizer(net.named_parameters(), FusedAdamW, masters_from=optimizer, **options)
    for i, (mine, theirs) in enumerate(zip(new.gathered_masters(), before, strict=True)):
        assert_bytes_equal(mine, theirs, f"master {i}")
