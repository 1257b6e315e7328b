"""Which parameters lie in which bucket."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerofp4.distributed import rank_and_size
from zerofp4.engine.flat import DenseBuffer, FlatBuffer, PackedBuffer
from zerofp4.engine.matrices import in_whole_slices, longest_first
from zerofp4.engine.wire import Wire
from zerofp4.tensors import NVFP4Tensor


def in_buckets(sizes: Sequence[int], together: Sequence[int], most: int) -> list[list[int]]:
    """Positions in buckets of at most `most` in all: neighbours, but that positions with the same number in
    `together` are never parted, and come where the first of them is. What is larger alone has its own bucket.
    """
    members: dict[int, list[int]] = {}
    for i, number in enumerate(together):
        members.setdefault(number, []).append(i)
    buckets: list[list[int]] = []
    left = 0
    for positions in members.values():
        size = sum(sizes[i] for i in positions)
        if not buckets or size > left:
            buckets.append([])
            left = most
        buckets[-1] += positions
        left -= size
    return buckets


class Updated(NamedTuple):
    """How the master of a parameter is updated.

    by: the number of the optimizer that does; a bucket has parameters of one. work: what the update costs, in
    any unit, where it must see the whole of each matrix; None where it may see any part.
    """

    by: int = 0
    work: int | None = None


def build_buffers(
    parameters: Sequence[torch.Tensor],
    together: Sequence[int],
    group: dist.ProcessGroup | None,
    wire: Wire,
    updated: Sequence[Updated] | None = None,
) -> list[FlatBuffer]:
    """A buffer for each bucket of NVFP4 weights, then of parameters of each dtype, always in the same order:
    all that the first optimizer updates, then the next one's.

    together: by parameter, the number of its amax group, which lies in one bucket. updated: by parameter;
    None for one optimizer that updates any part of them. In a world of one nothing travels, and each kind has
    one bucket.
    """
    world_size = rank_and_size(group)[1]
    updated = updated or [Updated()] * len(parameters)
    works = {i: how.work for i, how in enumerate(updated) if how.work is not None}
    owners = dict(zip(works, longest_first(list(works.values()), world_size), strict=True))
    buffers = []
    for indices in _of_one_kind(parameters, updated):
        sizes = [wire.nbytes(parameters[i]) for i in indices]
        most = wire.bucket_bytes if world_size > 1 else sum(sizes)
        numbers = [together[i] for i in indices]
        whole = indices[0] in owners
        if whole:
            own = [owners[i] for i in indices]
            buckets = in_whole_slices(sizes, own, numbers, most // world_size)
        else:
            buckets = in_buckets(sizes, numbers, most)
        for positions in buckets:
            chosen = [indices[position] for position in positions]
            kind = PackedBuffer if isinstance(parameters[chosen[0]], NVFP4Tensor) else DenseBuffer
            with_ranks = [owners[i] for i in chosen] if whole else None
            buffers.append(kind(chosen, [parameters[i] for i in chosen], group, with_ranks))
    return buffers


def _of_one_kind(parameters: Sequence[torch.Tensor], updated: Sequence[Updated]) -> list[list[int]]:
    """Positions of the parameters that buckets may have in common."""
    order = ("nvfp4", torch.bfloat16, torch.float16, torch.float32)
    kinds: dict[tuple[int, int], list[int]] = {}
    for i, (parameter, how) in enumerate(zip(parameters, updated, strict=True)):
        kind = order.index("nvfp4" if isinstance(parameter, NVFP4Tensor) else parameter.dtype)
        kinds.setdefault((how.by, kind), []).append(i)
    return [kinds[key] for key in sorted(kinds)]
