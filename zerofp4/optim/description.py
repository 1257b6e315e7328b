"""What describe() and the repr of a ZeroFP4Optimizer show, and how they count memory."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from zerofp4.storage import record_of


class Description(dict[str, Any]):
    """A dict whose repr is a table of the memory in it."""

    def __repr__(self) -> str:
        memory = self["memory"]
        places = ("device", "host")
        total = {place: sum(each[place] for each in memory.values()) for place in places}
        lines = [f"{'MB':20}{'device':>12}{'host':>12}"]
        for name, each in [*memory.items(), ("sum", total)]:
            lines.append(f"{name:20}" + "".join(f"{each[place] / 1e6:12.3f}" for place in places))
        sent = ", ".join(f"{name} {nbytes / 1e6:.3f}" for name, nbytes in self["bytes_sent"].items())
        ways = f"transport {self['transport']}, reduction {self['reduction']}, overlap {self['overlap']}"
        lines.append(f"ranks {self['world_size']}, buckets {len(self['buckets'])}, {ways}")
        lines.append(f"sent by this rank in a step, MB: {sent}")
        return "\n".join([*lines, f"entries: {', '.join(self)}"])


def describe(optimizer: Any) -> Description:
    """As ZeroFP4Optimizer.describe(), which says what each entry is."""
    shards, peers, exchanges = optimizer._shards, optimizer._shards.peers, optimizer._step.exchanges
    states = [[optimizer.inners.state_of(master) for master in own] for own in shards.optimized]
    pinned = {"pinned slots": {"device": 0, "host": shards.offload.pinned_bytes}}
    buckets = [_describe_bucket(optimizer, exchange) for exchange in exchanges]
    phases = ("gradients", "amaxes", "weights")
    received = [each.received for each in exchanges if each.bucket.world_size > 1]
    now = {
        "memory": bytes_by_use(_tensors_by_use(shards, exchanges, states)) | pinned,
        "shared_bytes": 0 if peers is None else peers.nbytes,
        "host_bytes": _host_bytes(shards, states),
        "pinned_bytes": shards.offload.pinned_bytes,
        "offload_threads": shards.offload.threads,
        "buckets": buckets,
        "bytes_sent": {phase: sum(bucket[phase] for bucket in buckets) for phase in phases},
        "waiting_bytes": sum(bytes_by_use({"received": received})["received"].values()),
    }
    return Description(optimizer._described | now)


def _describe_bucket(optimizer: Any, exchange: Any) -> dict[str, Any]:
    """The contents of a bucket, and the bytes that this rank sends for it in a step."""
    bucket, size = exchange.bucket, exchange.bucket.world_size
    dtype = str(bucket.parameters[0].dtype).removeprefix("torch.")
    amaxes = 0 if bucket.plan is None else bucket.plan.wire.nbytes
    is_exact = exchange.means_travel_as == "float32"
    return {
        "kind": "nvfp4" if bucket.is_packed else dtype,
        "parameters": len(bucket.parameters),
        "ranks": size,
        "replicas": bucket.replica_count,
        "elements": sum(parameter.numel() for parameter in bucket.parameters),
        "whole_matrices": bucket.is_of_whole_matrices,
        "optimizer": type(optimizer.inners.all[bucket.by]).__name__,
        "state": bucket.state,
        "masters": "host" if bucket.is_offloaded else "device",
        "gathered_in": None if size == 1 else "forward" if optimizer._step.is_late(exchange) else "step",
        "gradients_travel_as": str(bucket.sent_as).removeprefix("torch."),
        "gradients": exchange.gradient_bytes,
        "between_hosts": exchange.bytes_between_hosts,
        "means_travel_as": exchange.means_travel_as,
        "exactly": [*bucket.names] if is_exact else [],
        # A ring sends every byte twice, except a rank's own share.
        "amaxes": 2 * (size - 1) * amaxes // size,
        "weights": (size - 1) * sum(flat.nbytes for flat in bucket.gathered) // size,
    }


States = Sequence[Sequence[Mapping[str, Any]]]
"""By parameter, the state of each tensor that an optimizer of masters updates."""


def _tensors_by_use(
    shards: Any, exchanges: Sequence[Any], states: States
) -> dict[str, list[torch.Tensor | None]]:
    """The tensors in the memory of the parameters, masters, state and gradients of this rank."""
    buckets = shards.buckets
    weights = [b.weights for b in buckets]
    for parameter in shards.parameters:
        record = record_of(parameter)
        weights += [parameter] if record is None else [buffer for _, buffer in record.places()]
    gradients = [p.grad for p in shards.parameters]
    gradients += [vars(b).get("gradients") for b in buckets]  # made on demand
    gradients += [each.memory.flat for each in exchanges if each.memory is not None]
    values = (value for own in states for state in own for value in state.values())
    return {
        "weights": weights,
        "masters": [plane for b in buckets for plane in (b.masters, b.low)],
        "state": [value for value in values if isinstance(value, torch.Tensor)],
        "gradients": gradients,
        "received gradients": [each.received for each in exchanges],
    }


def _host_bytes(shards: Any, states: States) -> int:
    """Bytes of offloaded masters, their state, and their gradients if these wait on the host."""
    kept = [value for i in shards.offloaded for state in states[i] for value in state.values()]
    for bucket in shards.buckets:
        if bucket.is_offloaded:
            kept += [bucket.masters, bucket.low, vars(bucket).get("gradients")]
    return sum(tensor.nbytes for tensor in kept if tensor is not None)


def bytes_by_use(tensors: Mapping[str, Iterable[torch.Tensor | None]]) -> dict[str, dict[str, int]]:
    """By the keys of `tensors`, {"device": bytes, "host": bytes} of their memory.

    A byte counts once, for the first key that has it: buffers may lie in others, and parameters and their
    masters may share memory. If all tensors are on the CPU, that is the device.
    """
    given = {name: [each for each in group if each is not None] for name, group in tensors.items()}
    has_gpu = any(each.device.type != "cpu" for group in given.values() for each in group)
    found: dict[str, dict[str, int]] = {}
    seen: dict[str, list[tuple[int, int]]] = {"device": [], "host": []}
    for name, group in given.items():
        before = {place: _size(ranges) for place, ranges in seen.items()}
        for each in group:
            place = "host" if has_gpu and each.device.type == "cpu" else "device"
            first = each.data_ptr()
            seen[place].append((first, first + each.numel() * each.element_size()))
        found[name] = {place: _size(ranges) - before[place] for place, ranges in seen.items()}
    return found


def _size(ranges: list[tuple[int, int]]) -> int:
    """Of the union of ranges of addresses."""
    size = end = 0
    for first, last in sorted(ranges):
        size, end = size + max(last - max(first, end), 0), max(last, end)
    return size


def show(optimizer: Any) -> str:
    """The repr of a ZeroFP4Optimizer."""
    name, described = type(optimizer).__name__, optimizer._described
    if described is None:
        return f"{name}(not built)"
    shards = optimizer._shards
    trained, buckets = len(shards.parameters), shards.buckets
    frozen = sum(len(group["params"]) for group in optimizer.param_groups) - trained
    packed = sum(len(bucket.parameters) for bucket in buckets if bucket.is_packed)
    classes = ", ".join(type(inner).__name__ for inner in optimizer.inners.all)
    own = sum(shard.numel for shard in shards.shards)
    lines = [
        f"{name} (",
        f"parameters: {packed} NVFP4, {trained - packed} others, {frozen} frozen",
        f"masters: {own} elements on this rank, by {classes}",
        f"world size: {optimizer.world_size}, transport: {described['transport']}, buckets: {len(buckets)}",
        *([] if optimizer.broken is None else [f"broken: {optimizer.broken}"]),
    ]
    for g, group in enumerate(optimizer.param_groups):
        shown = sorted(group.keys() - {"params", "param_names"})
        lines += [f"Parameter Group {g}", *(f"    {key}: {group[key]}" for key in shown)]
    return "\n".join([*lines, ")"])
