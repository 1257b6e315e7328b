"""The first values of masters: rank 0's parameters, or the masters of an earlier optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofp4.distributed import OwnError, Stage, exchange
from zerofp4.engine import Bucket, Sharding, Trained, write_master
from zerofp4.shard import intersect
from zerofp4.tensors import INIT_VAL, NVFP4Tensor, QuantizedTensor, note_master

CHUNK = 1 << 22
"""Elements of an initial value that are sent at a time."""


def take_over(
    source: Any, trained: Sequence[Trained], group: dist.ProcessGroup | None
) -> Mapping[torch.Tensor, Any]:
    """The SavedState of an earlier optimizer, which holds masters of these parameters; {} without one.

    Raises TypeError or ValueError for a source that cannot hand over.
    """
    if source is None:
        return {}
    if not hasattr(source, "_hand_over"):
        raise TypeError(f"masters_from must be a ZeroFP4Optimizer, got {type(source).__name__}")
    if not source.process_group.refers_to(group):
        raise ValueError("masters_from must shard its masters over the same process group")
    saved, written = source._hand_over()
    taken = [one for one in trained if one.parameter in saved]
    if not taken:
        raise ValueError("masters_from has the master of none of the trainable parameters of params")
    for one in taken:
        i = saved.indices[id(one.parameter)]
        if not saved.parameters[i].home.group.refers_to(one.sharding.group):
            raise ValueError(f"{one.name} is sharded over another process group than in masters_from")
        if i in written:
            raise ValueError(
                f"{one.name} was written to since the last step of masters_from, whose master would undo that"
            )
    return saved


def initialize_masters(
    buckets: Sequence[Bucket],
    held: Mapping[torch.Tensor, Any],
    group: dist.ProcessGroup | None,
    error: OwnError,
) -> list[int]:
    """Fill the masters of all buckets, chunk by chunk. Collective.

    held: of take_over(). The other masters begin with rank 0's values, as in DDP.
    group: all ranks that step together. error: of this rank, so far; every rank raises it.

    Returns, on rank 0, the positions among all trainable parameters of those whose masters begin with 4-bit
    values.
    """
    coarse, chunk = [], None
    with error:
        chunk = torch.empty(CHUNK, dtype=torch.float32, device=buckets[0].device)
    exchange(None, error, group, "allocating memory")
    for bucket in buckets:
        own = [bucket.own_views(plane) for plane in (bucket.masters, bucket.low) if plane is not None]
        for i, parameter, shard, *planes in zip(
            bucket.indices, bucket.parameters, bucket.shards, *own, strict=True
        ):
            earlier = held.master(parameter) if parameter in held else None
            source = None
            if earlier is None and bucket.rank == bucket.replica == 0:
                with error:  # the other ranks wait for values
                    source = initial_values(parameter)
                if isinstance(parameter, QuantizedTensor) and INIT_VAL not in parameter.record.attachments:
                    coarse.append(i)
            for first in range(0, parameter.numel(), CHUNK):
                values = chunk[: parameter.numel() - first]
                if earlier is None:
                    _share_chunk(values, source, first, bucket)
                else:
                    values = earlier.gather(first, values.numel())
                part = intersect(first, values.numel(), shard.start, shard.end)
                if part.numel:
                    start = first + part.start - shard.start
                    here = [plane[start : start + part.numel] for plane in planes]
                    with error:
                        write_master(values[part.start : part.end], *here)
    exchange(None, error, group, "sending initial values")
    for parameter in (parameter for bucket in buckets for parameter in bucket.parameters):
        if hasattr(parameter, "clear_high_precision_init_val"):
            parameter.clear_high_precision_init_val()
        note_master(parameter)
    return sorted(coarse)


def _share_chunk(values: torch.Tensor, source: torch.Tensor | None, first: int, bucket: Bucket) -> None:
    """Write elements of rank 0's value from `first` on into float32 `values` of every rank. source: on rank 0
    only.
    """
    if source is not None:
        values.copy_(source[first : first + values.numel()])
    if bucket.replica_count > 1 and bucket.rank == 0:
        _broadcast(values, bucket.replicas(), "initial values")
    if bucket.world_size > 1:
        _broadcast(values, bucket.group(), "initial values")


def initial_values(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's values, 1D, on any device: from before it was quantized, if convert_model kept them."""
    getter = getattr(parameter, "get_high_precision_init_val", None)
    value = None if getter is None else getter()
    if value is None:
        value = parameter.dequantize(torch.float32) if isinstance(parameter, QuantizedTensor) else parameter
    return value.detach().reshape(-1)


def broadcast_frozen(parameter: torch.Tensor, sharding: Sharding) -> None:
    """Collective: give a parameter that has no master the bytes of rank 0."""
    quantized = isinstance(parameter, NVFP4Tensor)
    tensors = [buffer for _, buffer in parameter.record.buffers()] if quantized else [parameter]
    # First within each replica, from its first rank, then from the first replica to the others.
    for group in filter(None, (sharding.group, sharding.replicas)):
        for tensor in filter(torch.Tensor.numel, tensors):
            values = tensor.detach().contiguous()
            _broadcast(values.view(-1).view(torch.uint8), group, "frozen parameters")
            if values.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(values)


def _broadcast(values: torch.Tensor, group: dist.ProcessGroup, what: str) -> None:
    with Stage(f"sending rank 0's {what}", group):
        dist.broadcast(values, group=group, group_src=0)
