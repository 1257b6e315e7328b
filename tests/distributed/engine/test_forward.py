"""Weights that are gathered while the next forward pass runs, and arrive as late as can be. (test_overlap has
those that come in time.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases.optim import assert_all_equal, keywords, make_gradients, set_gradients
from torch import nn

import zerofp4
from distributed.engine.overlap_cases import (
    CLASSES,
    SMALL,
    TINY,
    Net,
    assert_same,
    loss_of,
    make_pair,
    step_of,
)
from distributed.optim.cases import model_bytes
from distributed.run import on_ranks
from zerofp4 import NVFP4Tensor
from zerofp4.distributed import all_gather_slices
from zerofp4.engine import Bucket, CollectiveExchange
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


class LateGather:
    """A gather of codes that takes long, on a GPU, and on the CPU does not begin before somebody waits for
    it: who reads without that finds codes of the step before. (Ranks must wait for them in one order.)
    """

    def __init__(self, buffer: Bucket, begun: list[Bucket]):
        self._buffer, self._begun = buffer, begun
        self._cast = torch.cuda.current_stream().record_event() if buffer.device.type == "cuda" else None

    def wait(self) -> None:
        self._begun.append(self._buffer)
        if self._cast is not None:
            self._cast.wait()
            torch.cuda._sleep(20_000_000)
        for flat in self._buffer.gathered:
            all_gather_slices(flat, self._buffer.group())


@contextlib.contextmanager
def late_gathers() -> Iterator[list[Bucket]]:
    """Gathers of codes that begin in here are such; of which buffers somebody has waited for, in order."""
    begun: list[Bucket] = []
    gather_now = CollectiveExchange.gather

    def gather(exchange):
        bucket = exchange.bucket
        return LateGather(bucket, begun) if bucket.is_packed else gather_now(exchange)

    with mock.patch.object(CollectiveExchange, "gather", gather):
        yield begun


def quantized(net: nn.Module) -> list[NVFP4Tensor]:
    return [p for p in net.parameters() if isinstance(p, NVFP4Tensor)]


def written(net: nn.Module) -> list[torch.Tensor]:
    """Into another model."""
    other = Net().to(net.norm.weight.device)
    zerofp4.convert_model(other, columnwise=True)
    other.load_state_dict(net.state_dict())
    return [weight.dequantize() for weight in quantized(other)]


def compiled(net: nn.Module) -> list[torch.Tensor]:
    tokens = torch.arange(16, device=net.embedding.weight.device) % 32
    return [torch.compile(net, backend="aot_eager")(tokens).detach()]


def plain(net: nn.Module) -> list[torch.Tensor]:
    zerofp4.register_plain_state_dict(net)
    return list(net.state_dict().values())


def broadcast(net: nn.Module) -> list[torch.Tensor]:
    for weight in quantized(net):
        dist.broadcast(weight.detach(), 0)
    return [weight.columnwise_data for weight in quantized(net)]


READS = (written, compiled, broadcast, plain)
"""What a person does with a model: tensors that are what they should be where its weights are. (What one does
with a weight is in READS of engine/test_late_gather.py.)
"""


def weights_of(models):
    return [model_bytes(list(net.parameters())) for net, _ in models]


@on_ranks(2)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("overlap", ["forward", "both"])
def test_the_same_where_they_arrive_late(world, name, overlap):
    """Also where nobody reads weights between steps, and where one is skipped."""
    models = make_pair(world, overlap, name=name, bucket_mb=SMALL)
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
            optimizer.check()
    assert_same(models, "8 steps")


@on_ranks(2)
def test_each_read_waits(world):
    for read in READS:
        models = make_pair(world, "forward", bucket_mb=TINY)
        step_of(world, models[:1], 0)
        with late_gathers() as begun:
            step_of(world, models[1:], 0)
            expected, late = [quantized(net) for net, _ in models]
            if world.device.type == "cpu":
                places = [weight.record.rowwise.place for weight in late]
                stale = [not p.equal(e.rowwise_data) for p, e in zip(places, expected, strict=True)]
                assert not begun and all(stale)
            found, wanted = read(models[1][0]), read(models[0][0])
        assert len(found) > 0
        assert_all_equal(found, wanted, read.__name__)


@on_ranks(2, 3)
def test_other_parameters_are_complete_when_a_step_returns(world):
    """And so are scales and amaxes, which do not travel."""
    models = make_pair(world, "forward", bucket_mb=SMALL)
    step_of(world, models[:1], 0)
    with late_gathers() as begun:
        step_of(world, models[1:], 0)
        there = [[p.detach() for p in net.parameters() if type(p) is torch.nn.Parameter] for net, _ in models]
        scales = [[t for w in quantized(net) for t in (w.rowwise_scale, w.amax)] for net, _ in models]
        assert_all_equal(there[1] + scales[1], there[0] + scales[0], "complete")
        optimizer = models[1][1]
        optimizer.describe(), optimizer.state_dict(), repr(optimizer), repr(models[1][0])
        assert world.device.type != "cpu" or not begun
    assert_same(models, "a step")


@on_ranks(2)
def test_a_group_that_is_destroyed_before_its_weights_are_read(world):
    group = dist.new_group()
    models = make_pair(world, "forward", bucket_mb=SMALL, process_group=group)
    step_of(world, models, 0)
    dist.barrier()
    dist.destroy_process_group(group)
    assert_all_equal(*weights_of(models), "weights")


@on_ranks(2)
def test_what_begins_while_weights_are_on_their_way(world):
    """Loads, addresses that are taken anew, gradients, and another optimizer."""
    models = []
    for (net, optimizer), overlap in zip(
        make_pair(world, "both", bucket_mb=SMALL), (None, "both"), strict=True
    ):
        with late_gathers():
            step_of(world, [(net, optimizer)], 0)
            state = optimizer.state_dict()
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
