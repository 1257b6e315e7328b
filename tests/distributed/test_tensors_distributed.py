"""Quantized tensors in torch's collectives between ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tensor_helpers import assert_record_equal, values

import zerofp4
from distributed.run import on_ranks


def _make(world, quantize, seed, **options):
    return quantize(values(48, 80, device=world.device, seed=seed), columnwise=True, **options)


@on_ranks(1, 2, 3)
def test_broadcast_sends_the_bytes_of_every_buffer(world):
    """Also in a world of one, which one GPU has: NCCL's work of it is none."""
    root = min(1, world.world_size - 1)
    for quantize in (zerofp4.quantize, zerofp4.quantize_mxfp8):
        for asynchronous in (False, True):
            t = _make(world, quantize, world.rank, scale_layouts=["swizzled"])
            expected = _make(world, quantize, root, scale_layouts=["swizzled"])
            work = dist.broadcast(t, root, async_op=asynchronous)
            if asynchronous:
                work.wait()
            assert_record_equal(t, expected)


@on_ranks(2, 3)
def test_broadcast_of_a_converted_weight_leaves_no_stale_initial_value(world):
    torch.manual_seed(world.rank)
    layer = torch.nn.Linear(80, 48, device=world.device)
    zerofp4.convert_model(layer)
    dist.broadcast(layer.weight.data, 0)
    value = layer.weight.get_high_precision_init_val()
    assert (value is not None) == (world.rank == 0)


@on_ranks(2, 3)
def test_broadcast_of_unequal_formats_raises_on_every_rank(world):
    options = {"block": (1, 16)} if world.rank == 1 else {}
    t = _make(world, zerofp4.quantize, world.rank, **options)
    before = t.clone()
    try:
        dist.broadcast(t, 0)
    except ValueError as error:
        assert "broadcast: the tensors of all ranks must have one format" in str(error)
    else:
        raise AssertionError("broadcast of unequal formats did not raise")
    assert_record_equal(t, before)


@on_ranks(2)
def test_ddp_gives_every_rank_the_values_of_rank_0_and_keeps_what_those_came_from(world):
    torch.manual_seed(world.rank)
    layer = torch.nn.Linear(80, 48, device=world.device, dtype=torch.bfloat16)
    zerofp4.convert_model(layer)
    before, value = layer.weight.detach().clone(), layer.weight.get_high_precision_init_val()
    torch.nn.parallel.DistributedDataParallel(layer)
    if world.rank == 0:
        assert_record_equal(layer.weight, before)
        assert layer.weight.get_high_precision_init_val() is value
    sent = before.dequantize()
    dist.broadcast(sent, 0)
    if world.rank == 1:
        assert torch.equal(layer.weight.get_high_precision_init_val(), sent.cpu())
