"""What describe() and the repr of a ZeroFP4Optimizer show, and how they count memory."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch


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
