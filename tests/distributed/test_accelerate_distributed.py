"""accelerate around a ZeroFP4Optimizer: what prepare() returns trains on, and what save_state() keeps."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import zerofp4
from distributed.overlap_cases import OPTIONS, Net, assert_same, loss_of, make
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


def make_accelerator(world):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=world.device.type == "cpu")
    # accelerate's CPU is "cpu:0", which to torch is another device than "cpu".
    accelerator.state._shared_state["device"] = world.device
    return accelerator


@on_ranks(1, 2)
def test_prepared_models_train_as_others(world):
    """Of one whose optimizer was built before prepare(), which moves the model and wraps it in DDP, and of
    one that was wrapped before.
    """
    accelerator = make_accelerator(world)
    prepared = make(world)
    net, optimizer = accelerator.prepare(*prepared)
    torch.manual_seed(3)
    other = Net().to(world.device)
    zerofp4.convert_model(other)
    wrapped = DistributedDataParallel(other, init_sync=False)
    models = [(other, ZeroFP4Optimizer(other.named_parameters(), FusedAdamW, **OPTIONS)), prepared]
    for step in range(3):
        loss_of(wrapped, world, step).backward()
        models[0][1].step()
        models[0][1].zero_grad()
        accelerator.backward(loss_of(net, world, step))
        optimizer.step()
        optimizer.zero_grad()
        assert_same(models, f"step {step}")


@on_ranks(1, 2)
def test_a_save_of_rank_0_alone_says_so(world):
    """One rank has all of it, and goes on."""
    accelerator = make_accelerator(world)
    net, optimizer = make(world)
    prepared = accelerator.prepare(optimizer)
    loss_of(net, world, 0).backward()
    prepared.step()
    folder = Path(tempfile.mkdtemp())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.save_state(folder)
    said = [str(w.message) for w in caught if "torch.distributed.checkpoint" in str(w.message)]
    assert bool(said) == (world.world_size > 1 and world.rank == 0)
    assert all("every rank must write its own" in message for message in said)
    if world.world_size == 1:
        other = make(world)
        other[1].load_state_dict(torch.load(folder / "optimizer.bin", weights_only=True))
        assert_same([(net, optimizer), other], "loaded")
