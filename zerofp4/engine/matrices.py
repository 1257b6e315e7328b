"""Matrices that lie whole with one rank: with which, and in which bucket.

Whose matrix it is follows from the time that updates take, over all buckets; only then are the ranks'
matrices put into buckets, so that in each the ranks have about equally much. Slices of a bucket are as long
as the longest of them, and what the others do not fill is memory that nobody needs and bytes that travel in
vain.
"""

from collections import Counter
from collections.abc import Sequence


def longest_first(works: Sequence[int], world_size: int) -> list[int]:
    """The rank of each job: the longest first, each to the rank with the least to do by then; ties by
    index.
    """
    loads, owners = [0] * world_size, [0] * len(works)
    for i in sorted(range(len(works)), key=lambda i: -works[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += works[i]
    return owners


def in_whole_slices(
    sizes: Sequence[int], owners: Sequence[int], together: Sequence[int], room: int
) -> list[list[int]]:
    """Positions in buckets, in which each rank has `room` for its own: each position goes to the first bucket
    with room left for it. Positions with the same number in `together` are never parted. What is larger than
    the room opens a bucket in which every rank has as much.

    The positions of a bucket are in the order of their owners.
    """
    members: dict[int, list[int]] = {}
    for i, number in enumerate(together):
        members.setdefault(number, []).append(i)
    buckets: list[list[int]] = []
    rooms: list[int] = []
    filled: list[Counter[int]] = []  # by owner
    for positions in members.values():
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
