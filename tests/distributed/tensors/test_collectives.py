"""Quantized tensors in torch's collectives between ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tensor_helpers import assert_record_equal, values

import zerofp4
from distributed.run import on_ranks


def converted(world) -> torch.nn.Linear:
    """A layer of values that differ between ranks."""
    torch.manual_seed(world.rank)
    layer = torch.nn.Linear(80, 48, device=world.device, dtype=torch.bfloat16)
    zerofp4.convert_model(layer, columnwise=True)
    return layer


@on_ranks(1, 2)
@pytest.mark.parametrize("quantize", [zerofp4.quantize, zerofp4.quantize_mxfp8])
def test_broadcast_sends_the_bytes_of_every_buffer(world, quantize):
    """Also in a world of one, which one GPU has: NCCL's work of it is none."""
    root, options = world.world_size - 1, {"columnwise": True, "scale_layouts": ["swizzled"]}
    expected = quantize(values(48, 80, device=world.device, seed=root), **options)
    for asynchronous in (False, True):
        t = quantize(values(48, 80, device=world.device, seed=world.rank), **options)
        work = dist.broadcast(t, root, async_op=asynchronous)
        if asynchronous:
            work.wait()
        assert_record_equal(t, expected)


@on_ranks(2)
def test_broadcast_of_a_converted_weight_leaves_no_stale_initial_value(world):
    weight = converted(world).weight
    dist.broadcast(weight.data, 0)
    assert (weight.get_high_precision_init_val() is not None) == (world.rank == 0)


@on_ranks(2)
def test_ddp_gives_every_rank_the_values_of_rank_0_and_keeps_what_those_came_from(world):
    layer = converted(world)
    before, value = layer.weight.detach().clone(), layer.weight.get_high_precision_init_val()
    torch.nn.parallel.DistributedDataParallel(layer)
    sent = before.dequantize()
    dist.broadcast(sent, 0)
    found = layer.weight.get_high_precision_init_val()
    if world.rank == 0:
        assert_record_equal(layer.weight, before)
        assert found is value
    else:
        assert torch.equal(found, sent.cpu())
