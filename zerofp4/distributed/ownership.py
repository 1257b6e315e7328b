"""Which elements of a weight the ranks own: each by one of them."""

from collections.abc import Sequence

from zerofp4.shard import Shard, find_gap, find_overlap


def check_ownership(names: Sequence[str], numels: Sequence[int], shards: Sequence[Sequence[Shard]]) -> None:
    """Raises ValueError unless the shards [rank][weight] cover every weight exactly once."""
    for i, (name, numel) in enumerate(zip(names, numels, strict=True)):
        check_disjoint(name, [of_rank[i] for of_rank in shards])
        gap = find_gap([of_rank[i] for of_rank in shards], numel)
        if gap is not None:
            raise ValueError(f"{name}: elements {gap[0]}..{gap[1] - 1} of {numel} are owned by no rank")


def check_disjoint(name: str, shards: Sequence[Shard]) -> None:
    """Raises ValueError when two ranks own the same element of a weight."""
    overlap = find_overlap(shards)
    if overlap is not None:
        a, b, first, last = overlap
        raise ValueError(f"{name}: ranks {a} and {b} both own elements {first}..{last - 1}")
