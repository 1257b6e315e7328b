"""Gradients that travel while a backward pass makes the others, and weights that are gathered while the next
forward pass runs: the bytes of a step that waits for all. By collectives, or written into each other's
memory, here of files on the CPU; with that of GPUs the same checks run in test_peers.
"""

import contextlib
import datetime
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases.fsdp2 import Collectives
from cases.optim import assert_all_equal, keywords, make_gradients, set_gradients

from distributed.engine import overlap_cases as checks
from distributed.engine.file_peers import sharing_files
from distributed.engine.overlap_cases import (
    FOUND,
    OPTIONS,
    SMALL,
    TINY,
    assert_same,
    late_gathers,
    loss_of,
    make,
    make_pair,
    nothing_changes,
    step_of,
)
from distributed.optim.cases import check_weights, model_bytes
from distributed.run import on_ranks
from zerofp4 import FourOverSix, NVFP4Tensor
from zerofp4.distributed import CollectiveError
from zerofp4.engine import GradientMemory
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


def run(world, check, late, **options):
    """By collectives where `late` is None, else through memory in files, with copies made late or early."""
    options = {"bucket_mb": SMALL} | options
    if late is None:
        check(world, **options)
        return
    with sharing_files(world, late) as (alone, group):
        check(alone, transport="peer", process_group=group, **options)


ROUNDED = {"gradient_wire": torch.float16}
UPDATES = {"overlaps": ("update",)}


@on_ranks(1, 2, 3, time_limit=120)
@pytest.mark.parametrize(
    ("late", "options"),
    [
        (None, {"name": "AdamW", "clip": True}),
        (None, {}),
        (True, {"clip": True}),
        (True, UPDATES | ROUNDED),
        (None, UPDATES | {"blocks": {"block": (1, 16), "columnwise": False}, "bucket_mb": TINY}),
        (None, UPDATES | {"blocks": {"four_over_six": FourOverSix()}, "gradient_dtype": torch.float32}),
    ],
)
def test_the_bytes_of_a_step_without_overlap(world, late, options):
    """Updates in backward passes also of one rank, and of blocks whose scales travel with the codes."""
    if world.world_size > 1 or (late is None and "overlaps" in options):
        run(world, checks.whole_steps, late, **options)


@on_ranks(2, nightly=[3], time_limit=60)
@pytest.mark.parametrize(("late", "options"), [(None, {}), (False, {"name": "AdamW"}), (True, ROUNDED)])
def test_steps_that_come_to_nothing(world, late, options):
    run(world, checks.nothing_comes_of_it, late, **options)


@on_ranks(2)
def test_buckets_begin_in_backward_passes(world):
    """From the last layer on; not under no_sync(), nor by autograd.grad."""
    net, optimizer = make(world, overlap="backward", bucket_mb=TINY)
    kinds = [bucket["kind"] for bucket in optimizer.describe()["buckets"]]
    assert kinds == sorted(kinds, key=lambda kind: kind != "nvfp4")
    counts = []
    with Collectives() as begun:
        torch.autograd.grad(loss_of(net, world, 0), list(net.parameters()))
        with optimizer.no_sync():
            loss_of(net, world, 0).backward()
        assert begun.calls == []
        hooks = [
            p.register_post_accumulate_grad_hook(lambda _: counts.append(len(begun.calls)))
            for p in net.parameters()
        ]
        loss_of(net, world, 1).backward()
    sent = len(begun.calls)
    assert len(set(counts)) > 3 and sent >= len(kinds)  # one after the other
    for hook in hooks:
        hook.remove()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    with Collectives() as begun:
        loss_of(net, world, 2, rare=False).backward()  # the first bucket waits for `rare`
    assert len(begun.calls) < sent
    optimizer.step()
    check_weights(list(net.parameters()), optimizer)


@on_ranks(2)
@pytest.mark.parametrize("late", [None, True])
def test_gradients_wait_as_they_were_sent(world, late):
    """The update averages them, as without overlap: no FP32 slice, and at most a model's gradients more."""

    def check(alone, **options):
        waiting = []
        for overlap in (None, "backward"):
            net, optimizer = make(alone, overlap=overlap, **options)
            step_of(alone, [(net, optimizer)], 0)
            buckets = optimizer._shards.buckets
            assert not any("gradients" in vars(bucket) for bucket in buckets)
            waiting.append(optimizer.describe()["waiting_bytes"])
        sent = sum(b.world_size * b.slice_numel * b.sent_as.itemsize for b in buckets)
        assert 0 < waiting[1] <= sent and (waiting[0] > 0) == (late is None)

    run(world, check, late, bucket_mb=TINY)


@on_ranks(2)
def test_a_rank_lacks_a_gradient_in_the_first_pass_after_a_load(world):
    """It sends less than the others in that pass, and no collective may come between that and the rest."""
    models = make_pair(world, "backward", bucket_mb=TINY, reduction="reduce_scatter")
    for net, optimizer in models:
        optimizer.load_state_dict(optimizer.state_dict())
        with torch.no_grad():
            net.layers[0].weight.zero_()  # follows its master again
        loss_of(net, world, 0, rare=world.rank > 0).backward()
        optimizer.step()
    assert_same(models, "the step")
    check_weights(list(models[1][0].parameters()), models[1][1])


@on_ranks(1, 2)
@pytest.mark.parametrize("overlap", [None, "backward"])
@pytest.mark.parametrize("options", [{}, ROUNDED])
def test_a_backward_pass_between_a_read_and_its_load(world, overlap, options):
    """What was read is not mixed with gradients."""
    net, optimizer = make(world, overlap=overlap, bucket_mb=SMALL, **options)
    step_of(world, [(net, optimizer)], 0)
    state_dict = optimizer.state_dict()
    for own in state_dict["state"].values():
        for name, piece in own.items():
            piece.copy_(piece.full_tensor() + (name == "master"))
    expected = [master + 1 for master in optimizer.gathered_masters()]
    loss_of(net, world, 1).backward()
    optimizer.load_state_dict(state_dict)
    assert_all_equal(optimizer.gathered_masters(), expected, "masters")


# What goes wrong while gradients travel: all ranks hear of it, and the step after it is right


make_models = functools.partial(checks.make_models, bucket_mb=SMALL)


def good_step(world, models, step, what):
    step_of(world, models, step)
    assert_same(models, what)


@on_ranks(2)
def test_an_optimizer_sends_nothing_once_another_has_its_parameters(world):
    """Both are alive, as where a cell of a notebook is run twice."""
    models, first = make_models(world), []
    good_step(world, models, 0, "first")
    for m, options in enumerate([{}, {"overlap": "backward", "process_group": dist.new_group()}]):
        net, earlier = models[m]
        first.append(earlier)
        loss_of(net, world, 7).backward()  # travels, and nobody waits for it
        warns = pytest.warns(UserWarning, match="begin with 4-bit values")
        with warns if world.rank == 0 else contextlib.nullcontext():
            second = ZeroFP4Optimizer(net.named_parameters(), FusedAdamW, **keywords(OPTIONS, options))
        second.zero_grad()
        models[m] = net, second
    good_step(world, models, 0, "second")
    with pytest.raises(RuntimeError, match="another ZeroFP4Optimizer was built over these"):
        first[1].step()
    good_step(world, models, 1, "second, at last")


@on_ranks(2, 3, time_limit=60)
def test_a_rank_that_has_not_reduced_what_the_others_have_clipped(world):
    """It sends alone; the others take their part before all raise, or it would arrive in the next step."""
    if world.device.type == "cuda":
        pytest.skip("with NCCL the vote waits behind what one rank sent alone, for the group's timeout")
    models = make_models(world)
    for net, optimizer in models:
        loss_of(net, world, 0).backward()
        optimizer.clip_grad_norm_(1.0)
        if world.rank == 1:
            optimizer.zero_grad()
            loss_of(net, world, 1).backward()
        with pytest.raises(RuntimeError, match="some ranks have gradients to reduce and others"):
            optimizer.step()
        optimizer.zero_grad()
    good_step(world, models, 3, "after")


@on_ranks(2, time_limit=60)
def test_a_gradient_that_cannot_be_sent(world):
    """In the middle of a backward pass, whose own rank goes on."""
    models = make_models(world, gradient_wire=torch.float16)
    net, optimizer = models[1]
    take, calls = GradientMemory.take, []

    def refuse(self, mine):
        calls.append(self)
        if world.rank == 1 and len(calls) == 2:
            raise torch.OutOfMemoryError("no memory today")
        take(self, mine)

    with mock.patch.object(GradientMemory, "take", refuse):
        loss_of(net, world, 1).backward()
        found = "no memory today" if world.rank == 1 else f"rank 1 {FOUND}"
        with nothing_changes(net, optimizer), pytest.raises(RuntimeError, match=found):
            optimizer.step()
    optimizer.zero_grad()
    good_step(world, models, 3, "after")


@on_ranks(2)
def test_a_weight_that_two_reentrant_segments_use(world):
    """It gets a second gradient after the first was sent. Other weights have one, and travel as ever."""
    models = make_models(world)
    net, optimizer = models[1]
    with nothing_changes(net, optimizer):
        loss_of(net, world, 0, reentrant=True).backward()
        with pytest.raises(RuntimeError, match="use_reentrant=False where several segments use one weight"):
            optimizer.step()
        optimizer.zero_grad()
    for step in range(2):
        step_of(world, models, step, reentrant=True, shared=False)
        assert_same(models, f"step {step}")


@on_ranks(2)
def test_a_rank_that_never_comes_ends_in_the_groups_timeout(world):
    """The others wait for it in step(), no longer than that."""
    if world.device.type == "cuda":
        pytest.skip("NCCL ends the process then")
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    net, optimizer = make(world, overlap="backward", bucket_mb=SMALL, process_group=group)
    if world.rank == 0:
        loss_of(net, world, 0).backward()
        with pytest.raises(CollectiveError):
            optimizer.step()


# Weights that are gathered while the next forward pass runs, and arrive as late as can be


@on_ranks(2)
@pytest.mark.parametrize("overlap", ["forward", "both"])
@pytest.mark.parametrize(
    ("name", "blocks", "read"),
    [
        ("AdamW", {}, "rowwise_data"),
        ("FusedAdamW", {}, "columnwise_data"),
        ("FusedAdamW", {"block": (1, 16), "columnwise": False}, "rowwise_scale"),
        ("FusedAdamW", {"four_over_six": FourOverSix(448, "mse")}, "columnwise_scale"),
    ],
)
def test_the_same_where_they_arrive_late(world, name, blocks, read, overlap):
    """Also where nobody reads weights between steps, and where one is skipped; scales that travel, too."""
    models, found = make_pair(world, overlap, name=name, blocks=blocks, bucket_mb=SMALL), []
    for net, optimizer in reversed(models):
        late = optimizer is models[1][1]
        with late_gathers() if late else contextlib.nullcontext():
            for step in range(4):
                loss_of(net, world, step, rare=step % 3 > 0, reentrant=False if step % 2 else None).backward()
                optimizer.step()
                optimizer.zero_grad()
            parameters = list(net.parameters())
            for step in range(4):
                set_gradients(parameters, make_gradients(parameters, 10 * step + world.rank))
                if step == 2:
                    parameters[2].grad[0] = torch.nan
                optimizer.step()
                assert optimizer.found_inf.item() == (step == 2)
            found.append([getattr(p, read) for p in parameters if isinstance(p, NVFP4Tensor)])
            optimizer.check()
    assert_all_equal(*found, read)
    assert_same(models, "8 steps")


@on_ranks(2)
def test_a_group_that_is_destroyed_before_its_weights_are_read(world):
    group = dist.new_group()
    models = make_pair(world, "forward", bucket_mb=SMALL, process_group=group)
    step_of(world, models, 0)
    dist.barrier()
    dist.destroy_process_group(group)
    assert_all_equal(*(model_bytes(list(net.parameters())) for net, _ in models), "weights")


@on_ranks(2)
def test_what_begins_while_weights_are_on_their_way(world):
    """Loads, addresses that are taken anew, gradients, and another optimizer. Questions wait for nothing."""
    models = []
    for (net, optimizer), overlap in zip(
        make_pair(world, "both", bucket_mb=SMALL), (None, "both"), strict=True
    ):
        with late_gathers() as begun:
            step_of(world, [(net, optimizer)], 0)
            state = optimizer.state_dict()
            optimizer.describe(), repr(optimizer), repr(net)
            assert overlap is None or world.device.type != "cpu" or not begun
            step_of(world, [(net, optimizer)], 1)
            optimizer.load_state_dict(state)
            optimizer.refresh()
            step_of(world, [(net, optimizer)], 2)
            loss_of(net, world, 9).backward()  # is sent, and dropped
            options = {"lr": 0.02, "overlap": overlap, "bucket_mb": TINY, "transport": "collective"}
            named = net.named_parameters()
            second = ZeroFP4Optimizer(named, FusedAdamW, masters_from=optimizer, **keywords(options))
            second.zero_grad()
            step_of(world, [(net, second)], 3)
        models.append((net, second))
    assert_same(models, "the end")


# Module.to() once the optimizer exists, as Trainer, accelerate and Lightning call it. Where it changes
# nothing, training goes on with the bytes of a run without it, though torch swaps quantized parameters.


WAYS = {
    "in step()": {},
    "backward": {"overlap": "backward"},
    "forward": {"overlap": "forward", "gradient_dtype": torch.float32},
    "both": {"overlap": "both"},
}


def convert(net, world) -> None:
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
                    convert(net, world)
                with optimizer.no_sync() if micro == 0 else contextlib.nullcontext():
                    loss_of(net, world, 10 * step + micro, rare=micro == 0).backward()
            if moves and step != 2:
                convert(net, world)
            optimizer.clip_grad_norm_(0.1)
            if moves:
                convert(net, world)
            optimizer.step()
            optimizer.zero_grad()
        assert_same(models, f"step {step}")
