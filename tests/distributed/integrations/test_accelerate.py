"""accelerate around a ZeroFP4Optimizer: what it prepares trains on, and what it saves."""

import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import zerofp4
from distributed.engine.overlap_cases import OPTIONS, Net, assert_same, loss_of, make
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


def make_accelerator(world):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    return accelerate.Accelerator(cpu=world.device.type == "cpu")


@on_ranks(1, 2)
def test_prepared_models_train_as_others(world):
    """One is wrapped in DDP by prepare(), once its optimizer exists, and another before it does."""
    accelerator = make_accelerator(world)
    prepared = make(world)
    net, optimizer = accelerator.prepare(*prepared)
    torch.manual_seed(3)
    other = Net().to(world.device)
    zerofp4.convert_model(other, columnwise=True)
    wrapped = DistributedDataParallel(other, init_sync=False)
    other_optimizer = ZeroFP4Optimizer(other.named_parameters(), FusedAdamW, **OPTIONS)
    for step in range(3):
        loss_of(wrapped, world, step).backward()
        accelerator.backward(loss_of(net, world, step))
        for each in (other_optimizer, optimizer):
            each.step()
            each.zero_grad()
        assert_same([(other, other_optimizer), prepared], f"step {step}")


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
    assert all("call consolidate_state_dict() of the optimizer" in message for message in said)
    if world.world_size == 1:
        other = make(world)
        other[1].load_state_dict(torch.load(folder / "optimizer.bin", weights_only=True))
        assert_same([(net, optimizer), other], "loaded")
