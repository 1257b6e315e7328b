"""overlap="update" of several ranks: backward passes exchange, update, cast and gather each bucket."""

import contextlib
import copy
import functools
import io
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases.optim import assert_all_equal

from distributed.cases import is_last, raised_by
from distributed.engine.file_peers import sharing_files
from distributed.engine.overlap_cases import (
    FOUND,
    OPTIONS,
    TINY,
    assert_same,
    break_off,
    loss_of,
    make_pair,
    make_updating,
    moved,
    nothing_changes,
    step_of,
)
from distributed.optim.cases import check_weights
from distributed.run import on_ranks
from zerofp4.distributed import CollectiveError
from zerofp4.engine import GradientMemory
from zerofp4.optim import agreement

make = functools.partial(make_updating, bucket_mb=TINY)


@on_ranks(2, 3, time_limit=60)
def test_collectives_between_a_pass_that_lacks_a_gradient_and_its_step(world):
    """The other ranks have it when the pass of that rank ends, not when it calls step()."""
    models = make_pair(world, bucket_mb=TINY, process_group=dist.new_group())
    for net, optimizer in models:
        loss = loss_of(net, world, 0, rare=world.rank > 0)
        loss.backward()
        dist.all_reduce(loss)
        optimizer.step()
    assert_same(models, "the step")


@on_ranks(2)
def test_a_second_backward_pass_of_other_parameters(world):
    """The first one has taken their buckets."""
    net, optimizer = make(world)
    loss_of(net, world, 0, rare=False).backward()
    with pytest.raises(RuntimeError, match=r"rare.weight.* got a gradient in a second backward pass"):
        net.rare(torch.ones(1, 64, dtype=torch.bfloat16, device=world.device)).sum().backward()
    assert optimizer.broken is not None


@on_ranks(1, 2)
def test_a_backward_pass_in_a_closure(world):
    models = make_pair(world, bucket_mb=TINY)
    for step in range(2):
        for net, optimizer in models:

            def closure(net=net, optimizer=optimizer, seed=step):
                optimizer.zero_grad()
                loss = loss_of(net, world, seed, rare=world.rank != seed)
                loss.backward()
                return loss

            assert optimizer.step(closure).item() > 0
        assert_same(models, f"step {step}")


# Memory


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("reduction", ["ordered", "reduce_scatter"])
@pytest.mark.parametrize("reentrant", [None, False])
def test_no_more_than_a_bucket_of_gradients_lives(world, reduction, reentrant):
    """As hooks see it that come behind those of the optimizer; and a model has no other memory for them."""
    net, optimizer = make(world, reduction=reduction)
    parameters = list(net.parameters())
    alive = []

    def count(_):
        alive.append(sum(p.grad.nbytes for p in parameters if p.grad is not None))

    for p in parameters:
        p.register_post_accumulate_grad_hook(count)
    loss_of(net, world, 0, reentrant=reentrant).backward()
    assert len(alive) == len(parameters) and max(alive) <= 2 * max(p.numel() for p in parameters)
    assert all(p.grad is None for p in parameters)
    optimizer.step()
    own = [e.memory.flat.untyped_storage() for e in optimizer._step.exchanges if e.memory is not None]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in own}.values())
    assert held <= 2 * 2 * max(p.numel() + 256 * world.world_size for p in parameters)
    if reduction == "ordered":  # no FP32 slice either
        assert not any("gradients" in vars(bucket) for bucket in optimizer._shards.buckets)


# Errors


def of_last_rank(world, mine, others=FOUND):
    """Around a call that raises on every rank: what the last one found, and what the others are told."""
    return pytest.raises((ValueError, RuntimeError), match=mine if is_last(world) else others)


@on_ranks(1)
def test_an_error_before_the_first_update_leaves_gradients_to_step_with(world):
    """(optim/test_errors has errors of one of several ranks.)"""
    net, optimizer = make(world)
    with nothing_changes(net, optimizer):
        optimizer.param_groups[0]["lr"] = math.nan
        loss_of(net, world, 1).backward()
        assert all(p.grad is not None for p in net.parameters())
        with pytest.raises(ValueError, match="must be finite"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = OPTIONS["lr"]
    optimizer.step()
    assert optimizer.broken is None and optimizer.state_dict()["steps"] == 1


def pass_that_writes(world, net, seed):
    """A backward pass. The last rank writes to a bias behind the first updates, and before its own."""

    def write(_):
        if is_last(world):
            with torch.no_grad():
                net.layers[1].bias.zero_()  # layers.0 comes last

    hook = net.layers[2].weight.register_hook(write)
    loss_of(net, world, seed).backward()
    hook.remove()


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("way", ["at once", "deferred", "peers"])
def test_an_error_of_one_rank_behind_the_first_update(world, way):
    """No rank updates another bucket, nor saves what it has; all are broken when they hear of it, and a
    checkpoint mends them.
    """
    if world.world_size == 1 and way != "at once":
        return
    with contextlib.ExitStack() as files:
        options = {}
        if way == "peers":
            world, group = files.enter_context(sharing_files(world, late=True))
            options = {"transport": "peer", "process_group": group}
        net, optimizer = make(world, **options)
        optimizer._agreement.defers = defers = way == "deferred"
        step_of(world, [(net, optimizer)], 0)
        good = copy.deepcopy(optimizer.state_dict())
        before = [master.clone() for master in optimizer.gathered_masters()]
        pass_that_writes(world, net, 1)
        hears = is_last(world) or not defers
        with of_last_rank(world, r"layers.1.bias.* was written to") if hears else contextlib.nullcontext():
            optimizer.step()
        assert (optimizer.broken is not None) == hears
        if not defers:
            changed = moved(net, optimizer, before)
            assert {"rare.weight", "layers.3.weight"} <= changed and "layers.0.weight" not in changed
        with pytest.raises(RuntimeError, match="must not be saved"):
            torch.save(optimizer.state_dict(), io.BytesIO())
        optimizer.zero_grad()
        if defers:
            loss_of(net, world, 2).backward()
        found = "which all ranks have taken in part: rank . found an error" if defers else "of no more use"
        with pytest.raises(RuntimeError, match=found):
            optimizer.step()
        assert optimizer.broken is not None
        optimizer.zero_grad()
        optimizer.load_state_dict(good)
        assert_all_equal(optimizer.gathered_masters(), before, "masters")
        step_of(world, [(net, optimizer)], 3)
        optimizer.check()
        check_weights(list(net.parameters()), optimizer)


@on_ranks(2, time_limit=120)
@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("where", ["rare", "layers.2", "layers.0"])
def test_a_backward_pass_that_raises_on_one_rank(world, where, defers):
    """step() ends the step there, as the pages advise, with the gradients that the pass has made: in `rare`
    none. After zero_grad() with those that were sent. A load behind it undoes it.
    """
    models = make_pair(world, bucket_mb=TINY, process_group=dist.new_group())
    models[1][1]._agreement.defers = defers
    step_of(world, models, 0)
    net, optimizer = models[1]
    good = copy.deepcopy(optimizer.state_dict())
    for drops in (False, True):
        for net, optimizer in models:
            break_off(net, world, where if world.rank == 1 else None)
            if drops:
                optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        if not drops:
            assert_same(models, "the step of the broken pass")
    assert optimizer.broken is None
    check_weights(list(net.parameters()), optimizer)
    for _, optimizer in models:
        optimizer.load_state_dict(good)
    step_of(world, models, 2)
    assert_same(models, "after the load")


@on_ranks(2, time_limit=120)
@pytest.mark.parametrize("way", ["behind the load", "before it", "no backward pass"])
def test_a_load_between_a_backward_pass_and_its_step(world, way):
    """What has begun to travel ends, also of a pass that one rank alone has begun with. zero_grad() drops
    what has not, behind the load or before it.
    """
    models = make_pair(world, bucket_mb=TINY)
    step_of(world, models, 0)
    net, optimizer = models[1]
    if way != "no backward pass":  # rank 1 has no bucket that is complete
        loss_of(net, world, 1, rare=world.rank == 0).backward()
    elif world.rank == 0:
        loss_of(net, world, 1).backward()
    if way == "before it":
        optimizer.zero_grad()
    optimizer.load_state_dict(models[0][1].state_dict())
    optimizer.zero_grad()
    assert optimizer.broken is None
    assert_same(models, "loaded")
    step_of(world, models, 2)
    assert_same(models, "a step later")


@on_ranks(2, time_limit=60)
def test_a_load_does_not_go_on_after_a_collective_that_failed(world):
    """With overlap="update" it joins the votes that are left of a step. Another collective would wait for the
    same rank, as long again.
    """
    group = dist.new_group()  # of no more use afterwards, as gradients are on their way in it
    _, optimizer = make(world, bucket_mb=TINY, transport="collective", process_group=group)
    gone = CollectiveError("agreeing on step() failed")
    with mock.patch.object(agreement, "reduce_max", mock.Mock(side_effect=gone)):
        assert raised_by(lambda: optimizer.load_state_dict(optimizer.state_dict())) is gone


@on_ranks(2, time_limit=60)
def test_an_error_of_a_send_is_that_of_its_bucket(world):
    """Between ranks that share memory no rank updates the bucket that one could not send, or a later one; all
    update the buckets before it.
    """
    with sharing_files(world, True) as (alone, group):
        net, optimizer = make(alone, bucket_mb=TINY, transport="peer", process_group=group)
        optimizer._agreement.defers = False
        step_of(alone, [(net, optimizer)], 0)
        before = optimizer.gathered_masters()
        take, calls = GradientMemory.take, []

        def refuse(*arguments):
            calls.append(None)
            if world.rank == 1 and len(calls) == 3:
                raise torch.OutOfMemoryError("no memory today")
            take(*arguments)

        with mock.patch.object(GradientMemory, "take", refuse):
            loss_of(net, alone, 1).backward()
            told = "another rank could not take part"  # in the cast of that bucket
            with pytest.raises(RuntimeError, match="no memory today" if world.rank == 1 else told):
                optimizer.step()
        assert optimizer.broken is not None
        names = [name for name, _ in net.named_parameters()]
        first = [i for bucket in optimizer._shards.buckets[:2] for i in bucket.indices]
        assert moved(net, optimizer, before) == {names[i] for i in first}


@on_ranks(2)
def test_written_weights_are_the_masters_that_a_state_dict_lacks(world):
    """The pass that a load ends takes them for its own."""
    net, optimizer = make(world)
    step_of(world, [(net, optimizer)], 0)
    state_dict = copy.deepcopy(optimizer.state_dict())
    for entries in state_dict["state"].values():
        del entries["master"]
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(0.5)
    optimizer.load_state_dict(state_dict)
    assert all(torch.all(master == 0.5) for master in optimizer.gathered_masters())
