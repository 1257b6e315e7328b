"""What ranks do with gradients that travel in backward passes: by collectives, through the memory that GPUs
share or, with FilePeers, through files on the CPU.
"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from distributed.engine.overlap_cases import (
    assert_same,
    break_off,
    loss_of,
    make,
    nothing_changes,
)
from distributed.optim.cases import raise_in_turn
from zerofp4.testing import verify_model

FOUND = "found an error, and no rank takes this step"


def gpu_of(world) -> torch.device:
    """This rank's; with gloo one that it may have in common with others."""
    if world.device.type == "cuda":
        return world.device
    device = torch.device("cuda", world.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def on_gpu(world, check, **options):
    alike = SimpleNamespace(rank=world.rank, world_size=world.world_size, device=gpu_of(world))
    globals()[check](alike, transport="peer", **options)


def make_models(world, name="FusedAdamW", overlaps=("backward",), transport="collective", **options):
    """One without overlap, and one of each way of it; with peers also one by collectives, where they have
    such on their device. Each in a group of its own: what one sends in a pass that breaks off would arrive in
    place of what another sends next.
    """
    ways = [{"transport": transport, "overlap": overlap} for overlap in (None, *overlaps)]
    if transport == "peer" and (world.device.type == "cpu" or dist.get_backend() == "nccl"):
        ways.append({"transport": "collective"})
    if transport == "collective":
        ways = [{**way, "process_group": dist.new_group()} for way in ways]
    models = [make(world, name, **way, **options) for way in ways]
    described = models[1][1].describe()
    assert described["overlap"] == overlaps[0]
    assert described["transport"] == (transport if world.world_size > 1 else "none")
    return models


def whole_steps(world, clip=False, overlaps=("backward", "forward", "both"), **options):
    """Of real gradients: a weight used twice, one that only some ranks use, recomputed segments, a rank
    without a backward pass, autograd.grad in between, gradients that are dropped before a step, zeros in
    place of None, and checkpoints that one model takes over from another.
    """
    models, updates = make_models(world, overlaps=overlaps, **options), overlaps[0] == "update"
    for step in range(5):
        norms, reentrant = [], (None, False, True)[step % 3]
        how = {"rare": (step + world.rank) % 3 > 0, "reentrant": reentrant, "shared": not reentrant}
        for net, optimizer in models:
            if not reentrant:  # which autograd.grad does not go through
                torch.autograd.grad(loss_of(net, world, 50 + step), list(net.parameters()))
            if step in (1, 3) and not updates:  # sent, and dropped
                loss_of(net, world, 70 + step).backward()
                optimizer.zero_grad(set_to_none=step == 1)
            if step != 3 or world.rank:
                loss_of(net, world, step, **how).backward()
            own = [optimizer.clip_grad_norm_(0.1).item()] if clip else []
            if clip and step == 2:  # what was reduced is read no more, on no rank
                optimizer.zero_grad()
                loss_of(net, world, 90).backward()
                own.append(optimizer.clip_grad_norm_(0.05).item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 3 != 0)
            norms.append(own)
        assert all(own == norms[0] for own in norms)
        assert_same(models, f"step {step}")
        if step == 2:
            states = [optimizer.state_dict() for _, optimizer in models]
            for (_, optimizer), state in zip(models, reversed(states), strict=True):
                optimizer.load_state_dict(state)
    for net, optimizer in models:
        assert optimizer.state_dict()["steps"] == 5
        verify_model(net, optimizer, process_group=optimizer.process_group())


EVENTS = "nan", "closure", "changed", "rare", "layers.0", "layers.2", "data", "replaced", "nan", "kept"


def nothing_comes_of_it(world, name="FusedAdamW", **options):
    """Steps that no rank takes, for a NaN, for an error of one rank, for a gradient that changed or was
    replaced, and passes that break off in a module of one rank: what was sent for them is in no later step.
    """
    models = make_models(world, name, **options)
    last = world.rank == world.world_size - 1
    for step, event in enumerate(EVENTS):
        for net, optimizer in models:
            if event in ("rare", "layers.0", "layers.2"):  # none, most or some of it was sent
                break_off(net, world, event if last else None)
                optimizer.zero_grad()
            else:
                fail(world, net, optimizer, event, last)
            if event not in ("replaced", "kept"):
                optimizer.zero_grad(set_to_none=step % 2 > 0)
                loss_of(net, world, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(models, f"step {step}, after {event}")


def fail(world, net, optimizer, event, last):
    """A backward pass, and a step that comes to nothing."""
    hook = net.rare.weight.register_hook(lambda g: g * (math.inf if event == "nan" and last else 1))
    loss_of(net, world, 20).backward()
    hook.remove()
    changes = event in ("changed", "data", "replaced")  # "data": a write that no version counts

    def closure():
        if last and not changes:
            raise RuntimeError("no loss today")

    with nothing_changes(net, optimizer):
        if changes and last:
            grad = net.rare.weight.grad
            (grad.data if event == "data" else grad).mul_(2)
            if event == "replaced":
                net.rare.weight.grad = grad.clone()
        if event == "nan":
            skipped = optimizer.skipped_steps
            optimizer.step()
            assert optimizer.skipped_steps == skipped + 1 and "rare" in optimizer.first_nonfinite()
        elif not changes or optimizer.describe()["overlap"] is not None:
            mine = "changed after it had begun" if changes else "no loss today"
            with pytest.raises(RuntimeError, match=mine if last else FOUND):
                raise_in_turn(optimizer, lambda: optimizer.step(closure))
