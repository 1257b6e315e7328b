"""What ranks tell each other when an optimizer is built over several of them: what they bring, and who has
the same parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zerofp4.distributed import first_difference
from zerofp4.optim.groups import Place, Ranks
from zerofp4.optim.state_dict import own_name


class Member(NamedTuple):
    """A parameter. group: the number of its parameter group. label: what messages call it. name: its own, in
    checkpoints; None without one. kind: what ranks that share it must have in common. together: the position
    of the first trainable parameter of its amax group among those of the same ranks. is_handed: whether its
    master is taken from an earlier optimizer.
    """

    group: int
    label: str
    name: str | None
    kind: str
    is_trainable: bool
    together: int | None
    is_handed: bool


class Announcement(NamedTuple):
    """What one rank brings. ranks, copies, parts: by parameter group, as Place has them. common: what all
    ranks must have in common, by what messages call it. bucket_mb: the size of buckets that suits this rank.
    """

    members: list[Member]
    ranks: list[Ranks]
    copies: list[Ranks]
    parts: list[int]
    common: dict[str, str]
    bucket_mb: float

    def of_ranks(self, ranks: Ranks) -> list[Member]:
        """Those that are sharded over these ranks."""
        return [member for member in self.members if self.ranks[member.group] == ranks]

    def trainable(self) -> list[Member]:
        return [member for member in self.members if member.is_trainable]


def announce(
    param_groups: Sequence[dict],
    labels: Sequence[str],
    kinds: Sequence[str],
    places: Sequence[Place],
    amax_numbers: Sequence[int],
    handed: Mapping[int, Any],
    common: dict[str, str],
    bucket_mb: float,
) -> Announcement:
    """labels, kinds: by parameter, as a Member has them. amax_numbers: by trainable parameter, the number of
    its amax group. handed: masters, by the identity of their parameters.

    Raises ValueError for an amax group that does not lie in one process group.
    """
    ranks = [place.ranks for place in places]
    first: dict[int, tuple[Place, int, str]] = {}  # by amax group, its first parameter
    counts: dict[Ranks, int] = {}
    members, numbers = [], iter(amax_numbers)
    rows = zip(_parameters(param_groups), labels, kinds, strict=True)
    for (g, p, name), label, kind in rows:
        together = None
        if p.requires_grad:
            number, position = next(numbers), counts.get(ranks[g], 0)
            counts[ranks[g]] = position + 1
            place, together, other = first.setdefault(number, (places[g], position, label))
            if place.sharding != places[g].sharding:
                raise ValueError(
                    f"amax_groups put {other} and {label} together, which are in other process groups"
                )
        if places[g].parts < len(ranks[g]):
            kind += f" in {places[g].parts} parts"
        members.append(Member(g, label, name, kind, p.requires_grad, together, id(p) in handed))
    copies, parts = [place.copies for place in places], [place.parts for place in places]
    return Announcement(members, ranks, copies, parts, common, bucket_mb)


def _parameters(param_groups: Sequence[dict]) -> Iterator[tuple[int, torch.Tensor, str | None]]:
    for g, group in enumerate(param_groups):
        names = group.get("param_names") or [None] * len(group["params"])
        for p, name in zip(group["params"], names, strict=True):
            yield g, p, name and own_name(name)


def check_announcements(by_rank: Sequence[Announcement]) -> None:
    """Raises ValueError, the same on every rank, where ranks that must bring the same do not."""
    _check_ranks(by_rank)
    for ranks in dict.fromkeys(ranks for rank in by_rank for ranks in rank.ranks):
        _check_members(by_rank, ranks)
    common = [list(rank.common.values()) for rank in by_rank]
    difference = first_difference(common)
    if difference is not None:
        rank, i = difference
        name = list(by_rank[0].common)[i]
        raise ValueError(f"{name} is {common[0][i]} on rank 0 and {common[rank][i]} on rank {rank}")
    _check_copies(by_rank)


def check_transport(transport: str, by_rank: Sequence[Announcement]) -> tuple[str, str | None]:
    """The transport that is to be tried, and why it is the collective one where nobody asked for that: ranks
    share memory with all ranks that step together, or with none.

    Raises ValueError, the same on every rank, where "peer" was asked for and some hold other parameters.
    """
    if transport == "collective" or _all_share_all(by_rank):
        return transport, None
    if transport == "peer":
        raise ValueError(
            'transport="peer" cannot be where parameter groups name a process_group of some ranks: '
            '"collective" works everywhere'
        )
    return "collective", "parameter groups name a process_group of some ranks"


def _all_share_all(by_rank: Sequence[Announcement]) -> bool:
    everyone = tuple(range(len(by_rank)))
    return all(
        ranks == everyone and parts == len(everyone)
        for rank in by_rank
        for ranks, parts in zip(rank.ranks, rank.parts, strict=True)
    )


def _check_ranks(by_rank: Sequence[Announcement]) -> None:
    """Every rank that one names names the same."""
    if _all_share_all(by_rank):
        return  # other numbers of groups are found by their parameters
    counts = [len(rank.ranks) for rank in by_rank]
    other = next((r for r, count in enumerate(counts) if count != counts[0]), None)
    if other is not None:
        raise ValueError(
            f"param_groups: rank 0 has {counts[0]} groups, rank {other} has {counts[other]}: where they name "
            "process groups, all ranks must have as many"
        )
    for g in range(counts[0]):
        for key, named in (
            ("process_group", [rank.ranks[g] for rank in by_rank]),
            ("replicated_over", [rank.copies[g] for rank in by_rank]),
        ):
            if sum(map(len, set(named))) == len(by_rank):
                continue  # each rank is in one of them, so none is in two
            pairs = ((r, other) for r, ranks in enumerate(named) for other in ranks)
            r, other = next((r, other) for r, other in pairs if named[other] != named[r])
            raise ValueError(
                f"{key} of param_groups[{g}] is ranks {list(named[r])} on rank {r} and ranks "
                f"{list(named[other])} on rank {other}"
            )


def _check_members(by_rank: Sequence[Announcement], ranks: Ranks) -> None:
    """Ranks that share parameters have the same ones."""
    lists = [by_rank[rank].of_ranks(ranks) for rank in ranks]
    kinds = [[member.kind for member in members] for members in lists]
    difference = first_difference(kinds)
    if difference is not None:
        other, i = difference
        if i is None:
            counts = len(kinds[0]), len(kinds[other])
            raise ValueError(
                f"params: rank {ranks[0]} has {counts[0]} parameters, rank {ranks[other]} has {counts[1]}"
                + _of(ranks, len(by_rank))
            )
        _raise_different(lists[0][i].label, ranks[0], kinds[0][i], ranks[other], kinds[other][i])
    for what, values in (
        ("masters_from hands over", [[i for i, m in enumerate(own) if m.is_handed] for own in lists]),
        ("amax_groups put together", [[m.together for m in own if m.is_trainable] for own in lists]),
    ):
        different = next((r for r, value in enumerate(values) if value != values[0]), None)
        if different is not None:
            _raise_different(f"what {what}", ranks[0], values[0], ranks[different], values[different])


def _check_copies(by_rank: Sequence[Announcement]) -> None:
    """What is said to be the same on several ranks has the same form there, and is counted by one of them:
    of ranks that share a parameter all count, or none does.
    """
    for r, rank in enumerate(by_rank):
        for g, (ranks, copies) in enumerate(zip(rank.ranks, rank.copies, strict=True)):
            first = copies[0]
            kinds, theirs = ([m.kind for m in by_rank[x].members if m.group == g] for x in (r, first))
            if kinds != theirs:
                raise ValueError(
                    f"param_groups[{g}] is replicated_over ranks {list(copies)}, but rank {first} has "
                    f"{theirs} there and rank {r} {kinds}"
                )
            other = ranks[0]
            of_other = by_rank[other].copies[g]
            if copies.index(r) != of_other.index(other):
                raise ValueError(
                    f"param_groups[{g}] is sharded over ranks {list(ranks)}, of which rank {other} has place "
                    f"{of_other.index(other)} in its replicated_over, {list(of_other)}, and rank {r} place "
                    f"{copies.index(r)} in {list(copies)}: all must have the same"
                )


def _raise_different(what: str, rank: int, value: Any, other: int, theirs: Any) -> None:
    raise ValueError(f"{what} is {value} on rank {rank} and {theirs} on rank {other}")


def _of(ranks: Ranks, count: int) -> str:
    """Which ranks have something, for messages; nothing where all have."""
    return "" if len(ranks) == count else f" (of ranks {list(ranks)})"


class Slots(NamedTuple):
    """Places in a vector that has one for each trainable parameter of all ranks, where ranks that share a
    parameter share its place. own: of this rank's, in their order. labels: what messages call them all.
    """

    own: list[int]
    labels: list[str]


def find_slots(by_rank: Sequence[Announcement], rank: int) -> Slots:
    """The same labels on every rank."""
    places: dict[tuple[Ranks, int], int] = {}
    labels: list[str] = []
    found: list[list[int]] = []
    for announcement in by_rank:
        counts: dict[Ranks, int] = {}
        own = []
        for member in announcement.trainable():
            ranks = announcement.ranks[member.group]
            k = counts[ranks] = counts.get(ranks, -1) + 1
            if (ranks, k) not in places:
                places[ranks, k] = len(labels)
                labels.append(member.label + _of(ranks, len(by_rank)))
            own.append(places[ranks, k])
        found.append(own)
    return Slots(found[rank], labels)
