"""overlap="update": backward passes exchange, update, cast and gather each bucket."""

import contextlib
import copy
import functools
import io
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases.optim import (
    assert_all_equal,
    built,
    keywords,
    make_gradients,
    set_gradients,
    through_a_file,
    turn_gradients,
)
from helpers import needs_gpu

import zerofp4
from distributed.cases import is_last, raised_by
from distributed.engine import overlap_cases
from distributed.engine.file_peers import sharing_files
from distributed.engine.overlap_cases import (
    FOUND,
    OPTIONS,
    TINY,
    assert_same,
    break_off,
    loss_of,
    make_pair,
    moved,
    nothing_changes,
    step_of,
)
from distributed.optim.cases import check_weights
from distributed.run import on_ranks
from zerofp4.distributed import CollectiveError
from zerofp4.engine import GradientMemory
from zerofp4.optim import AveragedMasters, FusedAdamW, ZeroFP4Optimizer, agreement

make = functools.partial(overlap_cases.make, overlap="update", bucket_mb=TINY)


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
        found = r"layers.1.bias.* was written to" if is_last(world) else FOUND
        with pytest.raises(RuntimeError, match=found) if hears else contextlib.nullcontext():
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
    _, optimizer = make(world, transport="collective", process_group=group)
    gone = CollectiveError("agreeing on step() failed")
    with mock.patch.object(agreement, "reduce_max", mock.Mock(side_effect=gone)):
        assert raised_by(lambda: optimizer.load_state_dict(optimizer.state_dict())) is gone


@on_ranks(2, time_limit=60)
def test_an_error_of_a_send_is_that_of_its_bucket(world):
    """Between ranks that share memory no rank updates the bucket that one could not send, or a later one; all
    update the buckets before it.
    """
    with sharing_files(world, True) as (alone, group):
        net, optimizer = make(alone, transport="peer", process_group=group)
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


# One rank alone, in no process group


@pytest.fixture
def alone(device):
    return SimpleNamespace(device=device, rank=0, world_size=1)


def test_gradients_that_somebody_assigned(device):
    """All of a step in step(), fp16 parameters and experts too, in any order of memory."""
    ways = (OPTIONS | {"overlap": overlap, "bucket_mb": TINY} for overlap in (None, "update"))
    models = [built(device, FusedAdamW, **options) for options in ways]
    for step in range(3):
        for parameters, optimizer in models:
            gradients = make_gradients(parameters, step)
            gradients[step] = None
            set_gradients(parameters, gradients)
            turn_gradients(parameters[step::2])
            optimizer.step()
            optimizer.zero_grad()
        assert_all_equal(models[1][1].gathered_masters(), models[0][1].gathered_masters(), f"step {step}")


@pytest.mark.heavy
@pytest.mark.parametrize("whole", [False, True])
def test_compiled(alone, whole):
    """Layers, or the model, whose gradients one node makes."""
    models = make_pair(alone, bucket_mb=TINY)
    for net, _ in models:
        for module in [net] if whole else net.layers:
            module.compile(backend="aot_eager")
    for step in range(2):
        step_of(alone, models, step)
    assert_same(models, "the end")


@needs_gpu
def test_a_backward_pass_on_another_stream():
    """The weights are there for what is queued behind step(), on its stream."""
    alone = SimpleNamespace(device=torch.device("cuda"), rank=0)
    models, side = make_pair(alone, bucket_mb=TINY), torch.cuda.Stream()
    for step in range(3):
        for net, optimizer in models:
            with torch.cuda.stream(side):
                side.wait_stream(torch.cuda.default_stream())
                torch.cuda._sleep(10_000_000)
                loss_of(net, alone, step).backward()
            torch.cuda.default_stream().wait_stream(side)
            optimizer.step()
            optimizer.zero_grad()
        assert_same(models, f"step {step}")


# What it refuses


def again(net, optimizer, alone, zeroes=False, **how):
    if zeroes:  # which takes no update back
        optimizer.zero_grad()
    loss_of(net, alone, 1, **how).backward()


def in_segments(net, optimizer, alone):
    """Two of which use one weight."""
    optimizer.step()
    again(net, optimizer, alone, reentrant=True)


def assigned(net, optimizer, alone):
    net.norm.weight.grad = torch.ones_like(net.norm.weight)
    optimizer.step()


def scaled(net, optimizer, alone):
    optimizer.grad_scale = torch.full((), 2.0, device=alone.device)  # as GradScaler.step() does
    optimizer.step()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (again, "got a second gradient before step"),
        (functools.partial(again, zeroes=True), "got a second gradient before step"),
        (in_segments, "use_reentrant=False where several segments use one weight"),
        (assigned, r"norm.weight.* was assigned after its update"),
        (scaled, "a GradScaler has scaled the loss"),
    ],
)
def test_what_comes_after_an_update_breaks_the_optimizer(alone, call, message):
    """Which gradients are in the masters is not known."""
    net, optimizer = make(alone)
    loss_of(net, alone, 0).backward()
    with pytest.raises(RuntimeError, match=message):
        call(net, optimizer, alone)
    assert optimizer.broken is not None
    with pytest.raises(RuntimeError, match="of no more use"):
        optimizer.step()


def test_a_found_inf_of_ones_own(alone):
    net, optimizer = make(alone)
    optimizer.inner.found_inf = torch.zeros((), device=alone.device)
    with nothing_changes(net, optimizer), pytest.raises(RuntimeError, match=r"found_inf .* is not supported"):
        loss_of(net, alone, 0).backward()
        optimizer.step()
    optimizer.inner.found_inf = None
    optimizer.zero_grad()
    step_of(alone, [(net, optimizer)], 0)


# Checkpoints and errors


def test_another_list_of_groups(alone):
    """Options of a list that replaced the optimizer's would be ignored."""
    net, optimizer = make(alone)
    before, optimizer.param_groups = optimizer.param_groups, [*optimizer.param_groups]
    loss_of(net, alone, 1).backward()
    with pytest.raises(RuntimeError, match="param_groups is not the list that the optimizer was built with"):
        optimizer.step()
    optimizer.param_groups = before


def test_between_a_backward_pass_and_its_step(alone):
    """Nothing is clipped, accumulated, saved or handed over."""
    net, optimizer = make(alone)
    averages, unsaved = AveragedMasters(optimizer), r"call step\(\) before they are saved"
    taken = keywords(OPTIONS, masters_from=optimizer)
    loss_of(net, alone, 1).backward()
    for call, message in (
        (lambda: optimizer.clip_grad_norm_(1.0), "clip_grad_norm_ needs all gradients"),
        (lambda: optimizer.no_sync().__enter__(), "accumulates gradients"),
        (lambda: through_a_file(optimizer.state_dict()), unsaved),
        (lambda: zerofp4.master_state_dict(net, optimizer), unsaved),
        (optimizer.consolidate_state_dict, unsaved),
        (averages.update, unsaved),
        (lambda: ZeroFP4Optimizer(net.named_parameters(), FusedAdamW, **taken), unsaved),
    ):
        with pytest.raises((RuntimeError, ValueError), match=message):
            call()
    optimizer.step()
    assert optimizer.broken is None
    through_a_file(optimizer.state_dict())
