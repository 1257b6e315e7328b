"""accumulate="sharded": each backward pass adds to the FP32 slices, and leaves no gradients behind."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from cases import updates
from cases.optim import make_gradients, set_gradients
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from distributed.engine.overlap_cases import (
    SMALL,
    assert_same,
    break_off,
    loss_of,
    make,
    nothing_changes,
    step_of,
)
from distributed.optim.cases import averages, check_weights
from distributed.run import on_ranks
from zerofp4.optim import ZeroFP4Optimizer


def make_sharded(world, name="FusedAdamW", overlap="backward", **options):
    return make(world, name, overlap=overlap, accumulate="sharded", bucket_mb=SMALL, **options)


@on_ranks(1, 2)  # whose mean of equal FP32 gradients is exact
@pytest.mark.parametrize(
    ("name", "overlap"), [("AdamW", "backward"), ("FusedAdamW", None), ("FusedAdamW", "backward")]
)
def test_a_step_is_that_of_the_sums_of_means(world, name, overlap):
    """Each micro-batch's mean over the ranks, added up in FP32 in their order."""
    net, optimizer = make_sharded(world, name, overlap)
    twin, plain = make(world, name, ZeroFP4Optimizer, gradient_dtype=torch.float32)
    parameters = list(twin.parameters())
    for step in range(3):
        sums = [None] * len(parameters)
        for micro in range(3):
            options = {"rare": (step + micro + world.rank) % 2 > 0, "checkpointed": micro == 1}
            loss_of(net, world, 10 * step + micro, **options).backward()
            assert all(p.grad is None for p in net.parameters())
            loss = loss_of(net, world, 10 * step + micro, rare=options["rare"])
            made = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
            pairs = zip(made, parameters, strict=True)
            means = averages([torch.zeros(p.shape, device=p.device) if g is None else g for g, p in pairs])
            sums = [mean if total is None else total + mean for total, mean in zip(sums, means, strict=True)]
        for p, total in zip(parameters, sums, strict=True):
            p.grad = total
        if step:
            norms = [o.clip_grad_norm_(0.1).item() for o in (optimizer, plain)]
            assert norms[0] == norms[1]
        optimizer.step()
        plain.step()
        if step == 2:  # a step uses the sums up, zero_grad() or not
            optimizer.zero_grad()
        plain.zero_grad()
        assert_same([(twin, plain), (net, optimizer)], f"step {step}")
    check_weights(list(net.parameters()), optimizer)


@on_ranks(1, 2, nightly=[3])
@pytest.mark.parametrize("overlap", [None, "backward", "both"])
def test_one_pass_is_the_step_of_local_gradients(world, overlap):
    """Also of passes under no_sync(), whose gradients are in p.grad until the next pass or step() takes them,
    and of gradients that no pass made.
    """
    models = [make(world, bucket_mb=SMALL), make_sharded(world, overlap=overlap)]
    for step in range(5):
        for net, optimizer in models:
            if step in (1, 2):
                with optimizer.no_sync():
                    loss_of(net, world, 50 + step).backward()
                    assert all(p.grad is not None for p in net.parameters())
            if step == 3:
                parameters = list(net.parameters())
                set_gradients(parameters, make_gradients(parameters, world.rank))
            elif step != 2:
                loss_of(net, world, step, rare=False).backward()
            if step == 4:
                optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        assert_same(models, f"step {step}")


@on_ranks(2)
def test_a_step_without_gradients(world):
    """Nothing of an earlier one is left."""
    models = [make(world, bucket_mb=SMALL, overlap="backward"), make_sharded(world)]
    step_of(world, models, 0)
    for net, optimizer in models:
        assert optimizer.clip_grad_norm_(1.0).item() == 0
        optimizer.step()
        loss_of(net, world, 1).backward()
        optimizer.zero_grad()
        optimizer.step()
    assert_same(models, "the end")


@on_ranks(2, 3, time_limit=60)
def test_ranks_that_took_part_in_different_numbers_of_passes(world):
    # Not with NCCL: what is sent alone would wait for the other ranks, and the tests after this behind it.
    world = dataclasses.replace(world, device=torch.device("cpu"), backend="gloo")
    group = dist.new_group(backend="gloo")
    plain, (net, optimizer) = make(world, process_group=group), make_sharded(world, process_group=group)
    with nothing_changes(net, optimizer):
        loss_of(net, world, 0).backward()
        if world.rank == 1:
            loss_of(net, world, 1).backward()
        with pytest.raises(RuntimeError, match="different numbers of backward passes, some in 1 more"):
            optimizer.step()  # which drops the sums
    step_of(world, [plain, (net, optimizer)], 3)
    assert_same([plain, (net, optimizer)], "after")


@on_ranks(2, 3, time_limit=60)
@pytest.mark.parametrize("overlap", [None, "backward"])
def test_a_pass_that_breaks_off(world, overlap):
    """On one rank, in its middle; then all drop the sums."""
    net, optimizer = make_sharded(world, overlap=overlap, process_group=dist.new_group())
    plain = make(world, bucket_mb=SMALL)
    loss_of(net, world, 0).backward()
    break_off(net, world, "layers.1" if world.rank == 1 else None)
    optimizer.zero_grad()
    step_of(world, [plain, (net, optimizer)], 2)
    assert_same([plain, (net, optimizer)], "after")


@on_ranks(2, time_limit=60)
def test_an_error_elsewhere_leaves_the_sums(world):
    """The step after it uses them."""
    models = [make(world, bucket_mb=SMALL, overlap="backward"), make_sharded(world)]
    for net, optimizer in models:
        loss_of(net, world, 0).backward()
        optimizer.param_groups[0]["lr"] = 0.5 if world.rank else 0.02
        with pytest.raises(RuntimeError, match=r"lr'\] must be the same on every rank"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.02
        optimizer.step()
    assert_same(models, "the second attempt")


def pass_with_checkpoints(net, layers, reentrant):
    x = net.embedding(torch.arange(8, device=net.norm.weight.device))
    for layer in layers:
        x = F.gelu(checkpoint(layer, x, use_reentrant=reentrant))
    F.linear(net.norm(x.float()).bfloat16(), net.embedding.weight).float().logsumexp(-1).mean().backward()


@on_ranks(1, 2, time_limit=60)
@pytest.mark.parametrize("overlap", [None, "backward"])
@pytest.mark.parametrize("alone", [False, True])
def test_reentrant_checkpoints_are_refused(world, overlap, alone):
    """By every rank, though the last one has fewer segments (LayerDrop), or is the only one to have any."""
    is_last = world.rank == world.world_size - 1
    options = {"transport": "collective", "bucket_mb": SMALL, "process_group": dist.new_group()}
    plain = updates.make(world, None, **options)
    net, optimizer = updates.make(world, overlap, accumulate="sharded", **options)
    found = "rank . found an error" if alone and not is_last else r"give checkpoint\(\) use_reentrant=False"
    with nothing_changes(net, optimizer):
        for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
            for _ in range(2):
                pass_with_checkpoints(net, net.layers[: 2 if is_last else 4], is_last or not alone)
            with pytest.raises(RuntimeError, match=found):
                call()
            optimizer.zero_grad()
    for model, one in (plain, (net, optimizer)):
        pass_with_checkpoints(model, model.layers, False)
        one.step()
    assert_same([plain, (net, optimizer)], "after")
