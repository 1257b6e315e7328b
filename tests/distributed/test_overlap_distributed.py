"""Gradients that travel while a backward pass makes the others: the bytes of a step that waits for all."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from optim_cases import make_gradients, set_gradients

from distributed.checks_optim import check_weights
from distributed.overlap_cases import CLASSES, SMALL, assert_same, go_on, in_two_places, loss_of, make
from distributed.run import on_ranks
from zerofp4.optim import zero


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(("name", "clip"), [("AdamW", True), ("FusedAdamW", False), ("FusedAdamW", True)])
def test_the_bytes_of_a_step_without_overlap(world, name, clip):
    """Of real gradients: a weight used twice, one that only some ranks use, recomputed activations, and
    autograd.grad in between, which makes gradients that are nobody's.
    """
    models = [make(world, name, overlap=overlap, bucket_mb=SMALL) for overlap in (None, "backward")]
    norms = []
    for step in range(4):
        for net, optimizer in models:
            options = {"rare": (step + world.rank) % 3 > 0, "checkpointed": step % 2 > 0}
            torch.autograd.grad(loss_of(net, world, 50 + step), list(net.parameters()))
            loss_of(net, world, step, **options).backward()
            if clip:
                norms.append(optimizer.clip_grad_norm_(0.1).item())
            optimizer.step()
            optimizer.zero_grad()
        assert_same(models, f"step {step}")
    assert norms[::2] == norms[1::2]
    check_weights(list(models[1][0].parameters()), models[1][1])


@on_ranks(2, 3)
@pytest.mark.parametrize("name", CLASSES)
def test_injected_gradients(world, name):
    """Those that no backward pass made travel in step()."""
    models = [make(world, name, overlap=overlap, bucket_mb=SMALL) for overlap in (None, "backward")]
    for step in range(3):
        for net, optimizer in models:
            parameters = list(net.parameters())
            gradients = make_gradients(parameters, 10 * step + world.rank)
            set_gradients(parameters, [g if (i + step) % 4 else None for i, g in enumerate(gradients)])
            optimizer.step()
        assert_same(models, f"step {step}")


@on_ranks(2)
@pytest.mark.parametrize("options", [{"gradient_wire": torch.float16}, {"gradient_dtype": torch.float32}, {}])
def test_micro_batches_under_no_sync(world, options):
    models = [make(world, overlap=overlap, bucket_mb=SMALL, **options) for overlap in (None, "backward")]
    for step in range(3):
        for net, optimizer in models:
            with optimizer.no_sync():
                for micro in range(2):
                    loss_of(net, world, 10 * step + micro, rare=micro == 0).backward()
            loss_of(net, world, 10 * step + 2, rare=False).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(models, f"step {step}")


@on_ranks(2)
def test_what_is_received_in_two_places(world):
    """As on a GPU, whatever the buckets are: a place is used again when what was there has been averaged."""
    for bucket_mb in (1e-4, SMALL, None):
        with mock.patch.object(zero, "CollectiveTransport", in_two_places):
            early = make(world, overlap="backward", bucket_mb=bucket_mb)
        models = [make(world, bucket_mb=bucket_mb), early]
        for step in range(3):
            for net, optimizer in models:
                loss_of(net, world, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same(models, f"buckets of {bucket_mb}")


@on_ranks(2)
def test_buckets_begin_in_backward_passes(world):
    """From the last layer on; not under no_sync(), by autograd.grad, nor between clip_grad_norm_ and step."""
    net, optimizer = make(world, overlap="backward", bucket_mb=1e-4)
    kinds = [bucket["kind"] for bucket in optimizer.describe()["buckets"]]
    quantized = kinds.count("nvfp4")
    assert kinds[:quantized] == ["nvfp4"] * quantized
    begun, start = [], optimizer._exchange.send_gradients

    def counted(b, gradients):
        begun.append(b)
        start(b, gradients)

    optimizer._exchange.send_gradients = counted
    torch.autograd.grad(loss_of(net, world, 0), list(net.parameters()))
    with optimizer.no_sync():
        loss_of(net, world, 0).backward()
    assert begun == []
    hooks = [
        p.register_post_accumulate_grad_hook(lambda _: counts.append(len(begun))) for p in net.parameters()
    ]
    counts = []
    loss_of(net, world, 1).backward()
    for hook in hooks:
        hook.remove()
    assert begun == list(range(len(kinds)))
    assert len(set(counts)) > 3  # one after the other, not all at the end
    optimizer.clip_grad_norm_(1.0)
    assert begun == list(range(len(kinds)))
    begun.clear()
    optimizer.step()
    optimizer.zero_grad()
    assert begun == []
    loss_of(net, world, 2, rare=False).backward()  # the first bucket after the head's waits for `rare`
    assert len(begun) < len(kinds)
    optimizer.step()
    assert begun == list(range(len(kinds)))
    check_weights(list(net.parameters()), optimizer)


@on_ranks(2)
def test_one_optimizer_goes_on_from_another(world):
    """The hooks of the first have seen gradients since its last step."""
    models = [make(world, overlap=overlap, bucket_mb=SMALL) for overlap in (None, "backward")]
    assert_same([go_on(world, *model, bucket_mb=SMALL) for model in models], "the end")


@on_ranks(1, 2)
def test_describe(world):
    _, optimizer = make(world, overlap="backward", accumulate="sharded")
    described = optimizer.describe()
    assert (described["overlap"], described["accumulate"]) == ("backward", "sharded")


@on_ranks(1, 2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": True}, "overlap must be one of"),
        ({"overlap": "forwards"}, "overlap must be one of"),
        ({"accumulate": None}, "accumulate must be one of"),
        ({"accumulate": "sharded", "transport": "peer"}, "is not supported with transport"),
        ({"accumulate": "sharded", "overlap": "backward", "transport": "peer"}, "is not supported with"),
        ({"gradient_dtype": torch.float16}, "gradient_dtype must be None or"),
    ],
)
def test_options_that_cannot_be_meant(world, options, message):
    """On the last rank alone: all raise."""
    with pytest.raises(ValueError, match=message):
        make(world, **(options if world.rank == world.world_size - 1 else {}))


@on_ranks(2)
@pytest.mark.parametrize("options", [{"overlap": "backward"}, {"accumulate": "sharded"}])
def test_ranks_must_overlap_alike(world, options):
    with pytest.raises(ValueError, match="overlap and accumulate is"):
        make(world, **(options if world.rank else {}))
