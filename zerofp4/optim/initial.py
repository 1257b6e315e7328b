"""What masters begin with: rank 0's values of the parameters, or the masters of an earlier optimizer."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerofp4.distributed import Stage
from zerofp4.engine import FlatBuffer, Sharding
from zerofp4.shard import Shard, intersect
from zerofp4.tensors import NVFP4Tensor, note_master

CHUNK = 1 << 22
"""Elements of an initial value that are sent at a time."""


class HeldMaster(NamedTuple):
    """This rank's piece of the master that an earlier optimizer has of a parameter; None where it owns
    nothing of it.
    """

    piece: torch.Tensor | None
    shard: Shard


def initialize_masters(buffer: FlatBuffer, held: Mapping[int, HeldMaster]) -> None:
    """Collective: give the masters the initial values of rank 0, as DDP does, or those in `held`, by the
    identity of the parameter, in the same group of ranks.
    """
    for parameter, shard, master in zip(
        buffer.parameters, buffer.shards, buffer.own_views(buffer.masters), strict=True
    ):
        if id(parameter) in held:
            chunk_of = _held_chunks(held[id(parameter)], buffer)
        else:
            chunk_of = _initial_chunks(parameter, buffer)
        for first in range(0, parameter.numel(), CHUNK):
            size = min(CHUNK, parameter.numel() - first)
            values = chunk_of(first, size)
            own = intersect(first, size, shard.start, shard.end)
            if own.numel:
                start = first + own.start - shard.start
                master[start : start + own.numel] = values[own.start : own.end]
        if hasattr(parameter, "clear_high_precision_init_val"):
            parameter.clear_high_precision_init_val()
        note_master(parameter)


Chunks = Callable[[int, int], torch.Tensor]
"""(first, size): elements [first, first + size) of an initial value, float32, the same on every rank."""


def _initial_chunks(parameter: torch.Tensor, buffer: FlatBuffer) -> Chunks:
    source = initial_values(parameter) if buffer.rank == buffer.replica == 0 else None

    def chunk(first: int, size: int) -> torch.Tensor:
        if source is None:
            values = torch.empty(size, dtype=torch.float32, device=buffer.device)
        else:
            values = source[first : first + size].to(buffer.device, torch.float32)
        if buffer.replica_count > 1 and buffer.rank == 0:
            with Stage("sending rank 0's initial values", group := buffer.replicas()):
                dist.broadcast(values, group=group, group_src=0)
        if buffer.world_size > 1:
            with Stage("sending rank 0's initial values", group := buffer.group()):
                dist.broadcast(values, group=group, group_src=0)
        return values

    return chunk


def _held_chunks(held: HeldMaster, buffer: FlatBuffer) -> Chunks:
    def chunk(first: int, size: int) -> torch.Tensor:
        # A sum of integers, all but one of which are 0, keeps every bit; one of floats makes -0 a 0.
        bits = torch.zeros(size, dtype=torch.int32, device=buffer.device)
        own = intersect(first, size, held.shard.start, held.shard.end)
        if own.numel:
            start = first + own.start - held.shard.start
            bits[own.start : own.end] = held.piece[start : start + own.numel].view(torch.int32)
        if buffer.world_size > 1:
            with Stage("taking over masters", group := buffer.group()):
                dist.all_reduce(bits, group=group)
        return bits.view(torch.float32)

    return chunk


def initial_values(parameter: torch.Tensor) -> torch.Tensor:
    """1D values that a parameter's master begins with, on any device.

    What it held before it was quantized, if it has kept that (convert_model), else what it holds.
    """
    getter = getattr(parameter, "get_high_precision_init_val", None)
    value = None if getter is None else getter()
    if value is None:
        quantized = isinstance(parameter, NVFP4Tensor)
        value = parameter.dequantize(torch.float32) if quantized else parameter
    return value.detach().reshape(-1)


def broadcast_frozen(parameter: torch.Tensor, sharding: Sharding) -> None:
    """Give a parameter without master the bytes that rank 0 has."""
    for group in (sharding.group, sharding.replicas):  # each replica those of its first, then of the first
        if group is not None:
            _broadcast_bytes(parameter, group)


def _broadcast_bytes(parameter: torch.Tensor, group: dist.ProcessGroup) -> None:
    quantized = isinstance(parameter, NVFP4Tensor)
    for tensor in [buffer for _, buffer in parameter.record.buffers()] if quantized else [parameter]:
        if not tensor.numel():
            continue
        values = tensor.detach().contiguous()
        with Stage("sending rank 0's frozen parameters", group):
            dist.broadcast(values.view(-1).view(torch.uint8), group=group, group_src=0)
        if values.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(values)
