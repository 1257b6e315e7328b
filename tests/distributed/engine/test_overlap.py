"""Gradients that travel while a backward pass makes the others: the bytes of a step that waits for all."""

from unittest import mock

import pytest
import torch
from cases.optim import assert_all_equal, keywords

from distributed.engine import overlap_checks as checks
from distributed.engine.overlap_cases import (
    CLASSES,
    SMALL,
    TINY,
    assert_same,
    in_two_places,
    loss_of,
    make,
    step_of,
)
from distributed.optim.cases import check_weights
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer, zero


def make_pair(world, name="FusedAdamW", **options):
    """Without overlap, and with it."""
    return [make(world, name, overlap=o, **({"bucket_mb": SMALL} | options)) for o in (None, "backward")]


@on_ranks(1, 2, nightly=[3], time_limit=60)
@pytest.mark.parametrize(("name", "clip"), [("AdamW", True), ("FusedAdamW", False), ("FusedAdamW", True)])
def test_the_bytes_of_a_step_without_overlap(world, name, clip):
    checks.whole_steps(world, name, clip, bucket_mb=SMALL)


@on_ranks(2)
@pytest.mark.parametrize("options", [{"gradient_wire": torch.float16}, {"gradient_dtype": torch.float32}, {}])
def test_micro_batches_and_gradients_that_somebody_assigned(world, options):
    checks.micro_batches(world, bucket_mb=SMALL, **options)


@on_ranks(2, nightly=[3], time_limit=60)
@pytest.mark.parametrize("name", CLASSES)
def test_steps_that_come_to_nothing(world, name):
    checks.nothing_comes_of_it(world, name, bucket_mb=SMALL)


@on_ranks(2)
def test_one_optimizer_goes_on_from_another(world):
    checks.one_after_another(world, bucket_mb=SMALL)


@on_ranks(2)
@pytest.mark.parametrize("bucket_mb", [TINY, SMALL, None])
def test_what_is_received_in_two_places(world, bucket_mb):
    """As on a GPU, whatever the buckets are: a place is used again when what was there has been averaged."""
    with mock.patch.object(zero, "CollectiveTransport", in_two_places):
        models = make_pair(world, bucket_mb=bucket_mb)
    for step in range(3):
        step_of(world, models, step)
    assert_same(models, "the end")


@on_ranks(2)
def test_buckets_begin_in_backward_passes(world):
    """From the last layer on; not under no_sync(), by autograd.grad, nor between clip_grad_norm_ and step."""
    net, optimizer = make(world, overlap="backward", bucket_mb=TINY)
    kinds = [bucket["kind"] for bucket in optimizer.describe()["buckets"]]
    quantized = kinds.count("nvfp4")
    assert kinds[:quantized] == ["nvfp4"] * quantized
    begun, send = [], optimizer._transport.send_gradients

    def counted(b, gradients):
        begun.append(b)
        send(b, gradients)

    optimizer._transport.send_gradients = counted
    torch.autograd.grad(loss_of(net, world, 0), list(net.parameters()))
    with optimizer.no_sync():
        loss_of(net, world, 0).backward()
    assert begun == []
    counts = []
    hooks = [
        p.register_post_accumulate_grad_hook(lambda _: counts.append(len(begun))) for p in net.parameters()
    ]
    loss_of(net, world, 1).backward()
    for hook in hooks:
        hook.remove()
    assert len(set(counts)) > 3  # one after the other, not all at the end
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    assert begun == list(range(len(kinds)))
    begun.clear()
    loss_of(net, world, 2, rare=False).backward()  # the first bucket after the head's waits for `rare`
    assert len(begun) < len(kinds)
    optimizer.step()
    assert begun == list(range(len(kinds)))
    check_weights(list(net.parameters()), optimizer)


# What lies in the FP32 slices meanwhile


@on_ranks(1, 2)
@pytest.mark.parametrize(
    ("overlap", "accumulate"), [(None, "local"), ("backward", "local"), ("backward", "sharded")]
)
@pytest.mark.parametrize("options", [{}, {"gradient_wire": torch.float16}])
def test_a_backward_pass_between_a_read_and_its_load(world, overlap, accumulate, options):
    """What was read is not mixed with gradients."""
    with mock.patch.object(zero, "CollectiveTransport", in_two_places):
        net, optimizer = make(world, overlap=overlap, accumulate=accumulate, bucket_mb=SMALL, **options)
    step_of(world, [(net, optimizer)], 0)
    state_dict = optimizer.state_dict()
    for own in state_dict["state"].values():
        for name, piece in own.items():
            piece.copy_(piece.full_tensor() + (name == "master"))
    expected = [master + 1 for master in optimizer.gathered_masters()]
    loss_of(net, world, 1).backward()
    optimizer.load_state_dict(state_dict)
    assert_all_equal(optimizer.gathered_masters(), expected, "masters")


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
                ZeroFP4Optimizer(
                    net.named_parameters(), FusedAdamW, masters_from=optimizer, **keywords(options)
                )
        optimizer.step()
        optimizer.zero_grad()
    assert_same(models, "the step")
