"""Assignment of parameters to buckets, and of whole matrices to ranks."""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch

from zerofp4.distributed import rank_and_size
from zerofp4.engine.buckets import Bucket, Sharding, gradient_dtype
from zerofp4.tensors import NVFP4Tensor

BUCKETS = 14
BUCKET_MB = 256.0, 1024.0
"""A model's gradients are cut into so many buckets, of at least and at most so many megabytes as they travel,
all ranks' parts together. On two H200s a bucket costs the host half a millisecond, in which 150 MB are
reduced, updated and published: smaller ones keep the device waiting, and in 64 of 256 MB the step of an 8B
model took a quarter longer than in 14 of 1024 MB.
"""


def find_bucket_mb(parameters: Sequence[torch.Tensor], dtype: torch.dtype | None) -> float:
    """The size of buckets for gradients of these parameters. dtype: theirs; None is what autograd makes."""
    least, most = BUCKET_MB
    total = sum(p.numel() * (dtype or gradient_dtype(p)).itemsize for p in parameters)
    return min(max(total / 2**20 / BUCKETS, least), most)


class Trained(NamedTuple):
    """A trainable parameter, and what decides which bucket it is in.

    name: what messages call it.
    sharding: the ranks that it is sharded over.
    by: the number of the optimizer that updates its master. All parameters of a bucket have the same one.
    work: what an update costs, in any unit, if it needs whole matrices; None if it takes any slice.
    leader: the position of the first parameter of its amax group, all of which are in one bucket.
    is_compact: whether its optimizer keeps it in compact state.
    """

    parameter: torch.Tensor
    name: str
    sharding: Sharding = Sharding()
    by: int = 0
    work: int | None = None
    leader: int = 0
    is_compact: bool = False

    @property
    def state(self) -> str:
        """What is kept: "full", "compact", or "compact24": masters of 24 bits, where weights are bfloat16.
        All of a bucket have the same, and all of an amax group.
        """
        if not self.is_compact:
            return "full"
        return "compact24" if self.parameter.dtype == torch.bfloat16 else "compact"


def kind_key(parameter: torch.Tensor) -> tuple:
    """What the parameters of a bucket have in common. NVFP4 weights come first."""
    if isinstance(parameter, NVFP4Tensor):
        record = parameter.record
        return 0, -record.block[0], str(record.four_over_six or "")
    return (1 + (torch.bfloat16, torch.float16, torch.float32).index(parameter.dtype),)


def build_buckets(
    trained: Sequence[Trained],
    bucket_mb: float,
    wire: torch.dtype | None,
    as_made: bool,
    rounded_first: bool,
    updates_early: bool = False,
) -> list[Bucket]:
    """Assign the parameters to buckets, the same list on every rank.

    The parameters of a bucket share their sharding, their optimizer, their kind (NVFP4 in the same blocks,
    or a dtype) and their state, and buckets are sorted by these four. In a group of one rank nothing travels:
    each combination is one bucket.

    bucket_mb: megabytes of the gradients of one bucket, all ranks' parts together. wire: as of Bucket.
    as_made: sort buckets as a backward pass is expected to make their gradients: NVFP4 weights of the last
        layers first. Dense buckets follow, since each spans many layers and, as a rule, the embedding.
    updates_early: cut buckets of one rank, too, whose gradients are freed one bucket at a time; and sort all
        of them as a backward pass is expected to complete them: by their first parameter, from the last one.
    rounded_first: within a sharding, put NVFP4 weights last, so that a step waits for dense weights only.
    """
    states = ("full", "compact", "compact24")

    def key(i: int) -> tuple:
        kind = kind_key(trained[i].parameter)
        is_packed = not kind[0]
        return rounded_first and is_packed, trained[i].by, kind, states.index(trained[i].state)

    built: list[Bucket] = []
    for sharding, positions in _positions(one.sharding for one in trained).items():
        world_size = rank_and_size(sharding.group)[1]
        works = {i: trained[i].work for i in positions if trained[i].work is not None}
        owners = dict(zip(works, longest_first([*works.values()], world_size), strict=True))
        for _, indices in itertools.groupby(sorted(positions, key=key), key):
            indices = list(indices)
            parameters = [trained[i].parameter for i in indices]
            sizes = [p.numel() * (wire or gradient_dtype(p)).itemsize for p in parameters]
            most = int(bucket_mb * 2**20) if world_size > 1 or updates_early else sum(sizes)
            leaders = [trained[i].leader for i in indices]
            is_whole = indices[0] in owners
            if is_whole:
                cut = in_whole_slices(sizes, [owners[i] for i in indices], leaders, most // world_size)
            else:
                cut = in_buckets(sizes, leaders, most, first_last=as_made or updates_early)
            for positions_in_bucket in cut:
                chosen = [indices[position] for position in positions_in_bucket]
                with_ranks = [owners[i] for i in chosen] if is_whole else None
                members = [trained[i].parameter for i in chosen]
                state = trained[indices[0]].state
                built.append(Bucket(chosen, members, sharding, with_ranks, wire, state))
    if updates_early:
        return sorted(built, key=lambda b: -min(b.indices))
    return sorted(built, key=lambda b: (not b.is_packed, -min(b.indices))) if as_made else built


def _positions(keys: Iterable[Hashable]) -> dict[Hashable, list[int]]:
    """The positions of each key; keys in order of first appearance."""
    found: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        found.setdefault(key, []).append(i)
    return found


def in_buckets(
    sizes: Sequence[int], together: Sequence[int], most: int, first_last: bool = False
) -> list[list[int]]:
    """Cut neighbouring positions into buckets of at most `most`; a larger position gets a bucket of its own.

    together: positions with the same number share a bucket, where the first of them is.
    first_last: the first bucket is sent last, with nothing left to hide its transfer. So if one bucket is not
        enough, each is at most half of the sum of itself and all before it, down to an eighth of `most`.
    """
    rest = sum(sizes)
    shrinks = first_last and rest > most
    buckets: list[list[list[int]]] = []
    room = 0
    for positions in list(_positions(together).values())[:: -1 if first_last else 1]:
        size = sum(sizes[i] for i in positions)
        if not buckets or size > room:
            buckets.append([])
            room = min(most, max(rest // 2, most // 8)) if shrinks else most
        buckets[-1].append(positions)
        room -= size
        rest -= size
    if first_last:
        buckets = [bucket[::-1] for bucket in reversed(buckets)]
    return [[i for positions in bucket for i in positions] for bucket in buckets]


# Whole matrices. The slices of a bucket are as long as the longest of them, so a rank that does not fill its
# slice wastes memory and bandwidth. Owners are chosen first, over all buckets, to balance the time of
# updates; then each bucket takes about equally much of every rank.


def longest_first(works: Sequence[int], world_size: int) -> list[int]:
    """Assign each job to a rank: longest job first, to the rank with the least work so far, ties by index."""
    loads, owners = [0] * world_size, [0] * len(works)
    for i in sorted(range(len(works)), key=lambda i: -works[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += works[i]
    return owners


def in_whole_slices(
    sizes: Sequence[int], owners: Sequence[int], together: Sequence[int], room: int
) -> list[list[int]]:
    """Put each position into the first bucket where its owner's slice has room for it.

    together: positions with the same number share a bucket.
    room: of each rank in a bucket. What is larger opens a bucket whose slices are all that large.

    Returns the positions of each bucket, sorted by owner.
    """
    buckets: list[list[int]] = []
    rooms: list[int] = []
    filled: list[Counter[int]] = []  # by owner
    for positions in _positions(together).values():
        needed: Counter[int] = Counter()
        for i in positions:
            needed[owners[i]] += sizes[i]
        for b, most in enumerate(rooms):
            if all(filled[b][owner] + size <= most for owner, size in needed.items()):
                break
        else:
            b = len(buckets)
            buckets.append([])
            rooms.append(max(room, *needed.values()))
            filled.append(Counter())
        buckets[b] += positions
        filled[b] += needed
    return [sorted(positions, key=lambda i: (owners[i], i)) for positions in buckets]
