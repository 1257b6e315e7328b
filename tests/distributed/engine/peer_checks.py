"""What ranks that share memory do, for tests on several GPUs or with several ranks on one."""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from cases.optim import assert_all_equal, keywords, make_gradients, make_parameters, set_gradients

from distributed.cases import raised_by
from distributed.optim.cases import SPECIFICATIONS, gradients_of, model_bytes
from zerofp4.engine.peers import Peers
from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer

OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.99)}


class InSequence(FusedAdamW):
    """Not FusedAdamW itself, so that its step() is called, and sees gradients that were averaged."""


def gpu_of(world) -> torch.device:
    """This rank's; with gloo one that it may have in common with others."""
    if world.device.type == "cuda":
        return world.device
    device = torch.device("cuda", world.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def build(device, cls=FusedAdamW, **options):
    parameters = make_parameters(device, 0, SPECIFICATIONS)
    groups = [{"params": parameters[:4], "lr": 0.01}, {"params": parameters[4:]}]
    return parameters, ZeroFP4Optimizer(groups, cls, **keywords(OPTIONS, options))


def all_bytes(parameters, optimizer):
    """Of weights, and of what this rank has of masters and moments."""
    state = [entry.values for p in parameters for _, entry in sorted(optimizer.state[p].items())]
    return [tensor.cpu() for tensor in (*model_bytes(parameters), *state)]


def equal_steps(world, inner, bucket_mb, wire=None):
    """The bytes of the collective transport on the CPU, with clipping and a step that is skipped."""
    cls = {"fused": FusedAdamW, "in sequence": InSequence}[inner]
    options = {"gradient_wire": wire, "bucket_mb": bucket_mb}
    cpu = build(torch.device("cpu"), cls, process_group=dist.new_group(backend="gloo"), **options)
    shared = build(gpu_of(world), cls, transport="peer", **options)
    assert shared[1].describe()["transport"] == "peer"
    for step in range(6):
        norms = [take_step(world, *model, step) for model in (cpu, shared)]
        assert norms[0] == norms[1] and len(norms[0]) == {2: 1, 4: 2}.get(step, 0)
        assert_all_equal(all_bytes(*shared), all_bytes(*cpu), f"step {step}")


def take_step(world, parameters, optimizer, step):
    """Clipped in the third and twice in the fifth, skipped in the fourth. Returns the norms."""
    set_gradients(parameters, gradients_of(world, parameters, step))
    if step == 3 and world.rank == world.world_size - 1:
        parameters[3].grad = torch.full_like(parameters[3], float("inf"))
    norms = []
    if step in (2, 4):
        norms.append(optimizer.clip_grad_norm_(0.5).item())
    if step == 4:  # what was reduced is read no more, on no rank
        optimizer.zero_grad(set_to_none=False)
        set_gradients(parameters, gradients_of(world, parameters, step + 1))
        norms.append(optimizer.clip_grad_norm_(0.25).item())
    optimizer.step()
    assert (optimizer.found_inf.item() != 0) == (step == 3)
    return norms


def an_optimizer_of_torch(world, fused):
    """With fused=True it is told on the device that no rank failed. Equal gradients have that mean: the bytes
    of one rank.
    """
    group = [dist.new_group([rank]) for rank in range(world.world_size)][world.rank]
    models = []
    for ways in ({"transport": "peer"}, {"process_group": group}):
        parameters = make_parameters(gpu_of(world), 0, SPECIFICATIONS)
        optimizer = ZeroFP4Optimizer(parameters, torch.optim.AdamW, lr=0.02, fused=fused, **keywords(ways))
        models.append((parameters, optimizer))
    for step in range(3):
        for parameters, optimizer in models:
            set_gradients(parameters, make_gradients(parameters, step))
            if step == 1:
                optimizer.clip_grad_norm_(0.5)
            optimizer.step()
        shared, alone = ([*model_bytes(ps), *o.gathered_masters()] for ps, o in models)
        assert_all_equal(shared, alone, f"step {step}")


def a_rank_that_does_not_come(world):
    """Nobody waits longer than the group's timeout; all hear of it in the next step, in which nothing
    changes.
    """
    group = dist.new_group(timeout=timedelta(seconds=2))
    parameters, optimizer = build(gpu_of(world), transport="peer", process_group=group)
    set_gradients(parameters, make_gradients(parameters, 0))
    optimizer.step()
    before = all_bytes(parameters, optimizer)
    peers = optimizer._peers
    if world.rank == 0:
        began = time.monotonic()
        peers.arrive()
        peers.arrive()  # does not wait once more
        torch.cuda.synchronize(peers.device)
        assert 1.5 < time.monotonic() - began < 30
        assert peers.failed.item() == 1
    dist.barrier()
    set_gradients(parameters, make_gradients(parameters, 1))
    expected = r"rank [1-9] did not come to a barrier" if world.rank == 0 else "rank 0 found an error"
    error = raised_by(optimizer.step)
    if error is None and optimizer._agreement.defers and world.rank:  # which hears of it in the next step
        error = raised_by(optimizer.step)
    assert isinstance(error, RuntimeError) and re.search(expected, str(error)), repr(error)
    assert_all_equal(all_bytes(parameters, optimizer), before, "nothing changes")


def barriers(world):
    """Thousands of them: what was queued before on any rank is seen behind."""
    peers = Peers(dist.group.WORLD, gpu_of(world))
    here = peers.zeros((world.world_size, 1024), torch.int32)
    there = [peers.at(r, here) for r in range(world.world_size)]
    wrong = torch.zeros((), dtype=torch.int64, device=peers.device)
    for turn in range(1, 301):
        for r in range(world.world_size):
            there[r][world.rank].fill_(turn)
        peers.arrive()
        wrong += (here != turn).sum()
        peers.arrive()
    assert wrong.item() == 0
    peers.check()


def refusals(world):
    """What cannot be is refused on every rank, before anything is allocated."""
    group = dist.new_group(backend="gloo")
    parameters = make_parameters(torch.device("cpu"), 0, SPECIFICATIONS)
    build = lambda way: ZeroFP4Optimizer(  # noqa: E731
        parameters, FusedAdamW, process_group=group, communication=Communication(transport=way)
    )
    with pytest.raises(ValueError, match="only GPUs read each other's memory"):
        build("peer")
    auto = build("auto").describe()
    assert auto["transport"] == "collective" and "only GPUs" in auto["why_collective"]
    with pytest.raises(ValueError, match="transport"):
        build("peer" if world.rank else "collective")
