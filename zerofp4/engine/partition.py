"""Which parameters lie in which bucket."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zerofp4.distributed import rank_and_size
from zerofp4.engine.flat import DenseBuffer, FlatBuffer, PackedBuffer
from zerofp4.engine.matrices import in_whole_slices, longest_first
from zerofp4.engine.sharding import Sharding
from zerofp4.engine.wire import Wire
from zerofp4.tensors import NVFP4Tensor

LEAST = 8
"""The smallest of buckets that become smaller is of this part of the others."""


def in_buckets(
    sizes: Sequence[int], together: Sequence[int], most: int, first_last: bool = False
) -> list[list[int]]:
    """Positions in buckets of at most `most` in all: neighbours, but that positions with the same number in
    `together` are never parted, and come where the first of them is. What is larger alone has its own bucket.

    first_last: the first bucket is done last, with nothing left to hide it. Then, where there are several,
    each has at most half of what it and those before it have, down to an eighth of `most`.
    """
    members: dict[int, list[int]] = {}
    for i, number in enumerate(together):
        members.setdefault(number, []).append(i)
    rest = sum(sizes)
    becomes_smaller = first_last and rest > most
    buckets: list[list[list[int]]] = []
    room = 0
    for positions in list(members.values())[:: -1 if first_last else 1]:
        size = sum(sizes[i] for i in positions)
        if not buckets or size > room:
            buckets.append([])
            room = min(most, max(rest // 2, most // LEAST)) if becomes_smaller else most
        buckets[-1].append(positions)
        room -= size
        rest -= size
    if first_last:
        buckets = [bucket[::-1] for bucket in reversed(buckets)]
    return [[i for positions in bucket for i in positions] for bucket in buckets]


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
    shardings: Sequence[Sharding],
    wire: Wire,
    updated: Sequence[Updated] | None = None,
    as_made: bool = False,
    rounded_first: bool = False,
) -> list[FlatBuffer]:
    """A buffer for each bucket of NVFP4 weights, then of parameters of each dtype, always in the same order:
    all that are sharded as the first parameter is, then those of the next sharding, and of each what the
    first optimizer updates, then the next one's.

    together: by parameter, the number of its amax group, which lies in one bucket. shardings: by parameter.
    updated: by parameter; None for one optimizer that updates any part of them. In a group of one rank
    nothing travels, and each kind has one bucket.
    as_made: those come first whose gradients a backward pass is expected to make first: the weights of the
    last layers, by the order of the parameters. Behind all NVFP4 weights come the others, of which one bucket
    has those of many layers, as a rule with the embedding or the first norm.
    rounded_first: of each sharding the NVFP4 weights come behind the others, for which alone a step waits
    then.
    """
    updated = updated or [Updated()] * len(parameters)
    members: dict[Sharding, list[int]] = {}
    for i, sharding in enumerate(shardings):
        members.setdefault(sharding, []).append(i)
    buffers = [
        buffer
        for sharding, positions in members.items()
        for buffer in sorted(
            _buffers_of(positions, parameters, together, sharding, wire, updated, as_made),
            key=lambda b: rounded_first and b.kind == "nvfp4",
        )
    ]
    return sorted(buffers, key=lambda b: (b.kind != "nvfp4", -min(b.indices))) if as_made else buffers


def _buffers_of(
    positions: Sequence[int],
    parameters: Sequence[torch.Tensor],
    together: Sequence[int],
    sharding: Sharding,
    wire: Wire,
    updated: Sequence[Updated],
    as_made: bool,
) -> list[FlatBuffer]:
    """Of the parameters at these positions."""
    world_size = rank_and_size(sharding.group)[1]
    works = {i: updated[i].work for i in positions if updated[i].work is not None}
    owners = dict(zip(works, longest_first(list(works.values()), world_size), strict=True))
    buffers = []
    for indices in _of_one_kind(positions, parameters, updated):
        sizes = [wire.nbytes(parameters[i]) for i in indices]
        most = wire.bucket_bytes if world_size > 1 else sum(sizes)
        numbers = [together[i] for i in indices]
        whole = indices[0] in owners
        if whole:
            own = [owners[i] for i in indices]
            buckets = in_whole_slices(sizes, own, numbers, most // world_size)
        else:
            buckets = in_buckets(sizes, numbers, most, first_last=as_made)
        for bucket in buckets:
            chosen = [indices[position] for position in bucket]
            kind = PackedBuffer if isinstance(parameters[chosen[0]], NVFP4Tensor) else DenseBuffer
            with_ranks = [owners[i] for i in chosen] if whole else None
            members = [parameters[i] for i in chosen]
            buffers.append(kind(chosen, members, sharding.group, with_ranks, sharding))
    return buffers


def _of_one_kind(
    positions: Sequence[int], parameters: Sequence[torch.Tensor], updated: Sequence[Updated]
) -> list[list[int]]:
    """Those positions of parameters that buckets may have in common."""
    order = ("nvfp4", torch.bfloat16, torch.float16, torch.float32)
    kinds: dict[tuple[int, int], list[int]] = {}
    for i in positions:
        kind = order.index("nvfp4" if isinstance(parameters[i], NVFP4Tensor) else parameters[i].dtype)
        kinds.setdefault((updated[i].by, kind), []).append(i)
    return [kinds[key] for key in sorted(kinds)]
