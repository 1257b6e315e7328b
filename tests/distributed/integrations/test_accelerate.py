"""accelerate around a ZeroFP4Optimizer: what it prepares trains on."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import zerofp4
from distributed.engine.overlap_cases import OPTIONS, Net, assert_same, loss_of, make
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


@on_ranks(1, 2)
def test_prepared_models_train_as_others(world):
    """One is wrapped in DDP by prepare(), once its optimizer exists, and another before it does."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=world.device.type == "cpu")
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
