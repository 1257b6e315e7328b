"""Steps that the ranks refuse, or could not finish: how many they were, who raises what, and how often."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases.optim import set_gradients

from distributed.cases import raised_by
from distributed.engine.file_peers import sharing_files
from distributed.engine.overlap_cases import TINY, loss_of, moved, step_of
from distributed.engine.overlap_cases import make_updating as make
from distributed.optim.cases import built, gradients_of
from distributed.run import on_ranks
from zerofp4.distributed import CollectiveError
from zerofp4.engine import GradientMemory
from zerofp4.optim import FusedAdamW, agreement


def fail(error):
    raise error


def take_refused_step(world, defers):
    """Of which rank 1 finds a parameter moved. Returns the optimizer."""
    parameters, optimizer = built(world, FusedAdamW, lr=0.02, weight_decay=0.1)
    optimizer._agreement.defers = defers
    for step in range(3):
        set_gradients(parameters, gradients_of(world, parameters, step))
        if step == 2 and world.rank == 1:
            parameters[1].data = parameters[1].data.clone()
        tells = step == 2 and (world.rank == 1 or not defers)
        with pytest.raises(RuntimeError) if tells else contextlib.nullcontext():
            optimizer.step()
    optimizer.refresh()
    return parameters, optimizer


@on_ranks(2, time_limit=60)
@pytest.mark.parametrize("defers", [False, True])
def test_a_refused_step_is_not_counted(world, defers):
    """Nor in a save directly after it, which all ranks can make; the next step raises all the same."""
    parameters, optimizer = take_refused_step(world, defers)
    for _ in range(2):
        assert optimizer.state_dict()["steps"] == 2
        assert all(p.saves == {optimizer._saved.save_id} for p in optimizer.state[parameters[0]].values())
    saved = optimizer.state_dict()
    if defers:
        with pytest.raises(RuntimeError, match="which no rank has taken: rank 1 found an error"):
            optimizer.step()
    assert optimizer.state_dict()["steps"] == 2
    optimizer.step()
    assert optimizer.state_dict()["steps"] == 3
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["steps"] == 2


@on_ranks(2, time_limit=60)
def test_an_error_of_every_rank_in_a_clip(world):
    """Each raises its own in step(), hears in the next one that a rank had one, and goes on."""
    parameters, optimizer = built(world, FusedAdamW, lr=0.02, weight_decay=0.1)
    optimizer._agreement.defers = True
    set_gradients(parameters, gradients_of(world, parameters, 0))
    assert optimizer.clip_grad_norm_(-1.0).isnan()
    raised = [raised_by(optimizer.step) for _ in range(3)]
    assert isinstance(raised[0], ValueError) and "max_norm must be 0 or more" in str(raised[0])
    assert "which no rank has taken: rank" in str(raised[1])
    assert raised[2] is None and optimizer.state_dict()["steps"] == 1


@on_ranks(2, time_limit=60)
def test_a_load_does_not_go_on_after_a_collective_that_failed(world):
    """With overlap="update" it joins the votes that are left of a step. Another collective would wait for the
    same rank, as long again.
    """
    group = dist.new_group()  # of no more use afterwards, as gradients are on their way in it
    _, optimizer = make(world, bucket_mb=TINY, transport="collective", process_group=group)
    gone = CollectiveError("agreeing on step() failed")
    with mock.patch.object(agreement, "reduce_max", lambda *_: fail(gone)):
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
