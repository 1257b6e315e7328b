"""ZeroFP4Optimizer beside DistributedDataParallel, which writes rank 0's values into every weight."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from distributed.cases import raised_everywhere
from distributed.checks_optim import assert_same_on_all_ranks, check_weights, make_net, model_bytes
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


def backward(world, ddp, step: int) -> None:
    """Of another batch on every rank."""
    generator = torch.Generator().manual_seed(10 * step + world.rank)
    tokens = torch.randint(32, (4, 5), generator=generator).to(world.device)
    ddp(tokens).square().mean().backward()


@on_ranks(2, 3)
def test_a_model_that_is_wrapped_before_the_optimizer_is_built(world):
    """DDP quantizes anew on the other ranks, from values that were quantized; the masters are rank 0's."""
    net = make_net(world, seed=world.rank)
    initial = [p.get_high_precision_init_val() for p in (net.first.weight, net.second.weight)]
    ddp = DistributedDataParallel(net)
    parameters = list(net.parameters())
    optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, lr=0.1)
    masters = optimizer.gathered_masters()
    assert_same_on_all_ranks([*masters, *model_bytes(parameters)])
    if world.rank == 0:
        for p, value in zip((net.first.weight, net.second.weight), initial, strict=True):
            i = next(i for i, q in enumerate(parameters) if q is p)
            assert torch.equal(masters[i], value.float().to(world.device))
    for step in range(3):
        backward(world, ddp, step)
        optimizer.step()
        optimizer.zero_grad()
        check_weights(parameters, optimizer)


@on_ranks(2, time_limit=60)
def test_a_model_that_is_wrapped_after_it(world):
    """What DDP writes is not what the masters say: the next step says so, on every rank."""
    net = make_net(world)
    parameters = list(net.parameters())
    optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, lr=0.1)
    ddp = DistributedDataParallel(net, init_sync=False)
    backward(world, ddp, 0)
    optimizer.step()
    check_weights(parameters, optimizer)
    before = optimizer.gathered_masters()
    DistributedDataParallel(net)
    message = raised_everywhere(world, RuntimeError, optimizer.step)
    assert "was written to since the last step" in message and "init_sync=False" in message
    for mine, old in zip(optimizer.gathered_masters(), before, strict=True):
        assert torch.equal(mine, old)
