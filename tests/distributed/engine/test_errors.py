"""What goes wrong on one rank in a step in buckets: no rank waits, and the step after it is right."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases.optim import assert_all_equal, keywords, make_gradients, set_gradients, take_step

from distributed import cases
from distributed.engine.overlap_cases import late_gathers
from distributed.optim.cases import (
    built,
    check_weights,
    model_bytes,
    parameters_of,
    raise_in_turn,
    raised_in_turn,
)
from distributed.run import on_ranks
from zerofp4 import ops
from zerofp4.cast import plan as cast_plan
from zerofp4.cast.plan import StepStatus
from zerofp4.distributed import collectives
from zerofp4.engine import Bucket, GradientMemory
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer, adamw, sharded, zero
from zerofp4.optim.inner import InnerOptimizers

OPTIONS = {"lr": 0.02, "weight_decay": 0.1}
SMALL = 0.003
"""bucket_mb for several buckets of each kind."""


def build(world, cls=FusedAdamW, **options):
    return built(world, cls, seed=world.rank, **{"bucket_mb": SMALL, **OPTIONS, **options})


def on_rank_1(world, owner, name, error, call=1):
    """The attribute, as a function which raises on rank 1 in the call of that number and in no other."""
    original, calls = getattr(owner, name), []

    def replacement(*arguments, **named):
        calls.append(None)
        if world.rank == 1 and len(calls) == call:
            raise error
        return original(*arguments, **named)

    return mock.patch.object(owner, name, replacement)


def raised_by(call):
    """What it raises, after all ranks are through: a rank that waits for another would not be."""
    error = cases.raised_by(call)
    dist.barrier()
    return error


def assert_told(world, error, mine, message):
    """Rank 1 has raised its own error; the others, where they know of it by now, that message."""
    if world.rank == 1:
        assert error is mine or f"{type(mine).__name__}: {mine}" in str(error), error
    else:
        assert isinstance(error, RuntimeError) and message in str(error), error


FOUND = "rank 1 found an error, and no rank takes this step"
ABSTAINED = "another rank could not take part in the cast"


@on_ranks(2)
def test_memory_that_a_rank_lacks_ends_the_step_before_it_begins(world):
    """Of moments, or of the slice that gradients are reduced to."""
    for owner, name, clip in ((adamw, "first_state", False), (Bucket, "_zeros", True)):
        error = torch.OutOfMemoryError("no memory today")
        parameters, optimizer = build(world)
        masters, weights = optimizer.gathered_masters(), [b.clone() for b in model_bytes(parameters)]
        with on_rank_1(world, owner, name, error, call=2):
            call = (lambda o=optimizer: o.clip_grad_norm_(1.0)) if clip else optimizer.step
            assert_told(world, raised_in_turn(optimizer, call), error, FOUND)
        assert_all_equal(optimizer.gathered_masters(), masters, f"{name}: master")
        assert_all_equal(model_bytes(parameters), weights, f"{name}: weight")
        optimizer.step()
        check_weights(parameters, optimizer)


LACKS = {
    "weights and masters": (Bucket, "allocate", 2),
    "casts": (cast_plan, "ReducedVector", 1),
    "gradients": (GradientMemory, "__init__", 2),
    "initial values": (sharded, "write_master", 3),
    "state": (InnerOptimizers, "sync_options", 1),  # some classes allocate it at once
    "votes": (ops, "Decision", 1),
    "norms": (zero, "OwnGradients", 1),
}
"""By what is allocated, which call of which function fails."""


@on_ranks(2)
@pytest.mark.parametrize("what", LACKS)
def test_memory_that_a_rank_lacks_while_it_builds(world, what):
    """Every rank raises, instead of waiting in the next collective."""
    parameters, (owner, name, call) = parameters_of(world), LACKS[what]
    options = keywords(OPTIONS, {"transport": "collective", "bucket_mb": SMALL})
    with on_rank_1(world, owner, name, torch.OutOfMemoryError("no memory today"), call):
        raised = raised_by(lambda: ZeroFP4Optimizer(parameters, FusedAdamW, **options))
    assert isinstance(raised, RuntimeError) and str(raised) == "rank 1: no memory today"
    optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, **options)
    take_step(parameters, optimizer, world.rank)
    check_weights(parameters, optimizer)


BROKEN = "left in the middle"


def assert_broken(world, optimizer, checkpoint, parameters, others_are_too):
    """Until a load: the rank that failed says so, and the others hear of it, unless they failed as well."""
    broken = world.rank == 1 or others_are_too
    assert (optimizer.broken is not None) == broken
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        error = raised_in_turn(optimizer, call)
        assert isinstance(error, RuntimeError) and (BROKEN if broken else FOUND) in str(error), error
    optimizer.zero_grad()
    optimizer.load_state_dict(checkpoint)
    assert optimizer.broken is None
    set_gradients(parameters, make_gradients(parameters, world.rank))
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    check_weights(parameters, optimizer)


@on_ranks(2)
def test_a_gradient_that_a_rank_cannot_copy_for_itself(world):
    """In a bucket that one rank has alone, the other rank waits in the next bucket."""
    alone = [dist.new_group([rank]) for rank in range(2)][world.rank]
    error, parameters = torch.OutOfMemoryError("no memory today"), parameters_of(world)
    groups = [{"params": parameters[:2], "process_group": alone}, {"params": parameters[2:4]}]
    options = keywords(OPTIONS, {"transport": "collective", "gradient_wire": torch.bfloat16})
    optimizer = ZeroFP4Optimizer(groups, FusedAdamW, **options)
    take_step(parameters[:4], optimizer, world.rank)
    take = GradientMemory.take

    def fail(memory, gradients):
        if world.rank == 1 and len(memory.flat) == 1:
            raise error
        take(memory, gradients)

    set_gradients(parameters[:4], make_gradients(parameters[:4], 1))
    with mock.patch.object(GradientMemory, "take", fail):
        raised = raised_by(optimizer.step)
    told = world.rank == 1 or world.device.type == "cpu"  # a GPU's hosts hear of it later
    if told:
        assert_told(world, raised, error, ABSTAINED)
    assert (optimizer.broken is not None) == told
    later = raised_in_turn(optimizer, optimizer.step)
    assert (BROKEN if told else FOUND) in str(later), later


WHAT = ["update", "update at once", "amaxes", "amaxes, late", "gradients", "cast", "rounding", "transpose"]


@on_ranks(2, 3)
@pytest.mark.parametrize("what", WHAT)
def test_an_error_behind_the_agreement_holds_up_nobody(world, what):
    """Weights that are not cast by then stay, on every rank, and the optimizer is broken until a load."""
    # Between GPUs that share memory gradients are taken before the agreement.
    ways = {"gradient_wire": torch.float16, "transport": "collective" if what == "gradients" else "auto"}
    cls, others = (torch.optim.SGD, {"weight_decay": 0.0}) if what == "update at once" else (FusedAdamW, {})
    late = what == "amaxes, late"  # weights on their way, which all arrive
    if late:
        ways = {"transport": "collective", "overlap": "forward"}
    parameters, optimizer = build(world, cls, **ways, **others)
    checkpoint = copy.deepcopy(optimizer.state_dict())
    buckets, inner = optimizer._shards.buckets, optimizer.inner
    packed = [b for b in buckets if b.plan is not None]
    plan, last = packed[1].plan, buckets[-1]
    stays = [p for b in (packed if what == "update at once" else packed[1:2]) for p in b.parameters]
    before = [b.clone() for b in model_bytes(stays)]
    owner, name, call = {
        "update": (inner._parts[1] if cls is FusedAdamW else None, "run", 1),
        "update at once": (inner, "step", 1),
        "gradients": (GradientMemory, "take", 2),
        "cast": (plan, "finish_step", 1),
        "rounding": (last, "cast", 1),
        "transpose": (plan, "complete", 1),
    }.get(what, (None, None, None))
    error = ValueError(f"no {what} today")

    def refuse():  # as a rank that finds "storage has moved" and tells the others
        plan.abstain()
        raise error

    if owner is None:
        with (
            mock.patch.object(plan, "start_step", refuse) if world.rank == 1 else contextlib.nullcontext(),
            late_gathers() if late else contextlib.nullcontext(),
        ):
            raised = raised_by(optimizer.step)
    else:
        with on_rank_1(world, owner, name, error, call):
            raised = raised_by(optimizer.step)
    alone = what in ("rounding", "transpose")  # no rank waits for it
    told = not alone and world.device.type == "cpu"  # a GPU's hosts hear of it later
    if told or world.rank == 1:
        assert_told(world, raised, error, ABSTAINED)
    if not alone and what != "cast":
        assert_all_equal(model_bytes(stays), before, f"{what}: buffer")
    assert_broken(world, optimizer, checkpoint, parameters, told)


@on_ranks(2)
def test_a_step_after_one_that_was_interrupted(world):
    """On all ranks at the same place, as by a terminal: reductions and messages of the first are on their way
    when the ranks go on from a checkpoint.
    """
    parameters, optimizer = build(world)
    checkpoint, masters = copy.deepcopy(optimizer.state_dict()), optimizer.gathered_masters()
    interrupt = mock.Mock(side_effect=KeyboardInterrupt)
    with mock.patch.object(optimizer.inner._parts[1], "run", interrupt), pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert "KeyboardInterrupt" in str(optimizer.broken)
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match=r"the optimizer is of no more use: step\(\) was left"):
            raise_in_turn(optimizer, call)
    optimizer.load_state_dict(checkpoint)
    assert_all_equal(optimizer.gathered_masters(), masters, "master")
    for step in range(2):
        take_step(parameters, optimizer, 10 * step + world.rank)
        check_weights(parameters, optimizer)


@on_ranks(2)
def test_a_load_mends_ranks_that_hear_late_of_another_one(world):
    """As on a GPU, whose hosts do not wait for the status of a cast: it must not break a rank in the load."""
    parameters, optimizer = build(world)
    checkpoint = copy.deepcopy(optimizer.state_dict())
    error = ValueError("no update today")
    with mock.patch.object(StepStatus, "queued", lambda self: None):
        with on_rank_1(world, optimizer.inner._parts[0], "run", error):
            raised = raised_by(optimizer.step)
        assert raised is (error if world.rank == 1 else None)
        assert_told(world, raised_in_turn(optimizer, optimizer.step), error, FOUND)
        optimizer.load_state_dict(checkpoint)
        assert optimizer.broken is None
        take_step(parameters, optimizer, world.rank)
        check_weights(parameters, optimizer)


@on_ranks(2)
@pytest.mark.parametrize("overlap", [None, "backward", "forward"])
def test_a_step_of_several_ranks_is_not_captured(world, overlap):
    """The next step is as if nothing had been asked for."""
    options = {"lr": 0.02, "overlap": overlap, "bucket_mb": 0.003, "capturable": True}
    parameters, optimizer = built(world, FusedAdamW, seed=world.rank, **options)
    optimizer.step()
    calls = {"step": optimizer.step, "clip_grad_norm_": lambda: optimizer.clip_grad_norm_(1.0)}
    with mock.patch.object(zero, "is_capturing", lambda device: True):
        with mock.patch.object(collectives, "dist") as collective:
            for name, call in calls.items():
                found = rf"{name}\(\) of 2 ranks cannot be captured in a CUDA graph: each step"
                with pytest.raises(RuntimeError, match=found):
                    call()
            assert not collective.mock_calls
    optimizer.step()
    check_weights(parameters, optimizer)
    if world.device.type == "cuda":
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            parameters[3].detach().add(1)  # torch warns of an empty graph
            with pytest.raises(RuntimeError, match="vote of the ranks"):
                optimizer.step()
