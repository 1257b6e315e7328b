"""Assignment of parameters to buckets, and of whole matrices to ranks."""

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import torch

from zerofp4.distributed import rank_and_size
from zerofp4.engine.buckets import Bucket, Trained, gradient_dtype
from zerofp4.tensors import NVFP4Tensor

BUCKETS = 14
BUCKET_MB = 256.0, 1024.0
"""A model's gradients are cut into this many buckets, each of at least and at most so many megabytes, all
ranks' slices together. Smaller buckets keep the device waiting for the host: on two H200s the step of an 8B
model took a quarter longer in 64 buckets of 256 MB than in 14 of 1024 MB.
"""


def find_bucket_mb(parameters: Sequence[torch.Tensor], dtype: torch.dtype | None) -> float:
    """The size of buckets for gradients of these parameters. dtype: of sent gradients, None for their own."""
    least, most = BUCKET_MB
    total = sum(p.numel() * (dtype or gradient_dtype(p)).itemsize for p in parameters)
    return min(max(total / 2**20 / BUCKETS, least), most)


def build_buckets(
    trained: Sequence[Trained],
    bucket_mb: float,
    wire: torch.dtype | None,
    overlap: str | None,
    offloads: bool,
) -> list[Bucket]:
    """Assign the parameters to buckets, the same list on every rank.

    The parameters of a bucket share their sharding and Trained.key, by which buckets are sorted. In a group
    of one rank nothing travels between ranks, so each key is one bucket, unless some are offloaded.

    bucket_mb: megabytes of the gradients of one bucket, all ranks' slices together. wire: as of Bucket.
    offloads: whether some will be offloaded. overlap: as of Communication. It decides the order of buckets:

        "forward"            NVFP4 weights last within a sharding: a step waits for dense weights only
        "backward", "both"   NVFP4 weights first, from the last layers, as a backward pass makes gradients;
                             then dense buckets, since each spans many layers
        "update"             by their first parameter, from the last one; buckets of one rank are cut, too,
                             since the gradients of one bucket are freed at a time
    """
    updates_early, first_last = overlap == "update", overlap in ("backward", "both", "update")

    def key(i: int) -> tuple:
        is_packed = isinstance(trained[i].parameter, NVFP4Tensor)
        return overlap == "forward" and is_packed, *trained[i].key

    built: list[Bucket] = []
    for sharding, positions in _grouped(range(len(trained)), lambda i: trained[i].sharding).items():
        world_size = rank_and_size(sharding.group)[1]
        works = {i: trained[i].work for i in positions if trained[i].work is not None}
        owners = dict(zip(works, longest_first([*works.values()], world_size), strict=True))
        for _, indices in itertools.groupby(sorted(positions, key=key), key):
            groups = list(_grouped(indices, lambda i: trained[i].leader).values())
            members = [(i, trained[i].parameter) for group in groups for i in group]
            sizes = {i: p.numel() * (wire or gradient_dtype(p)).itemsize for i, p in members}
            is_cut = world_size > 1 or updates_early or offloads
            most = int(bucket_mb * 2**20) if is_cut else sum(sizes.values())
            is_whole = groups[0][0] in owners
            if is_whole:
                cut = in_whole_slices(groups, sizes, owners, most // world_size)
            else:
                cut = in_buckets(groups, sizes, most, first_last)
            for chosen in cut:
                with_ranks = [owners[i] for i in chosen] if is_whole else None
                built.append(Bucket(chosen, [trained[i] for i in chosen], with_ranks, wire))
    if first_last:
        built.sort(key=lambda b: (not b.is_packed and not updates_early, -min(b.indices)))
    return built


def _grouped(positions: Iterable[int], key: Callable[[int], Hashable]) -> dict[Hashable, list[int]]:
    """The positions of each key; keys in order of first appearance."""
    found: dict[Hashable, list[int]] = {}
    for i in positions:
        found.setdefault(key(i), []).append(i)
    return found


Sizes = Sequence[int] | Mapping[int, int]


def in_buckets(
    groups: Sequence[list[int]], sizes: Sizes, most: int, first_last: bool = False
) -> list[list[int]]:
    """Cut neighbouring groups of positions into buckets of at most `most`; a larger group gets its own.

    sizes: by position.
    first_last: several buckets shrink towards the front, since bucket 0 is sent last and nothing hides it:
        size <= min(most, max(most / 8, half the sum of this and all earlier buckets)).
    """
    order = slice(None, None, -1 if first_last else 1)
    rest = sum(sizes[i] for group in groups for i in group)
    shrinks = first_last and rest > most
    buckets: list[list[list[int]]] = []
    room = 0
    for group in groups[order]:
        size = sum(sizes[i] for i in group)
        if not buckets or size > room:
            buckets.append([])
            room = min(most, max(rest // 2, most // 8)) if shrinks else most
        buckets[-1].append(group)
        room -= size
        rest -= size
    return [[i for group in bucket[order] for i in group] for bucket in buckets[order]]


# Whole matrices. All slices of a bucket are as long as the longest, so a slice that is not full wastes memory
# and bandwidth. Owners are chosen first, over all buckets, to balance the time of updates; then each bucket
# takes about as much from every rank.


def longest_first(works: Sequence[int], world_size: int) -> list[int]:
    """Assign each job to a rank: longest job first, to the rank with the least work so far, ties by index."""
    loads, owners = [0] * world_size, [0] * len(works)
    for i in sorted(range(len(works)), key=lambda i: -works[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += works[i]
    return owners


def in_whole_slices(groups: Sequence[list[int]], sizes: Sizes, owners: Sizes, room: int) -> list[list[int]]:
    """Put each group of positions into the first bucket whose slices have room for it.

    sizes, owners: by position.
    room: of each rank in a bucket. A larger group opens a bucket with slices as large as it needs.

    Returns the positions of each bucket, sorted by owner.
    """
    buckets: list[tuple[list[int], int, Counter[int]]] = []
    """Positions, the room of each rank, and its filled part."""
    for group in groups:
        needed: Counter[int] = Counter()
        for i in group:
            needed[owners[i]] += sizes[i]
        fits = (b for b in buckets if all(b[2][owner] + size <= b[1] for owner, size in needed.items()))
        found = next(fits, None)
        if found is None:
            found = [], max(room, *needed.values()), Counter()
            buckets.append(found)
        found[0].extend(group)
        found[2].update(needed)
    return [sorted(bucket, key=lambda i: (owners[i], i)) for bucket, _, _ in buckets]
