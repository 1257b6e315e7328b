"""Checks before a ZeroFP4Optimizer is built: of one rank's arguments, then of what all ranks announce."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerofp4.cast import check_castable, number_groups
from zerofp4.distributed import first_difference
from zerofp4.engine import Hosts, Sharding, Updated, gradient_dtype
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.optim.groups import Place, Ranks
from zerofp4.optim.state_dict import own_name
from zerofp4.tensors import NVFP4Tensor

# Parameters, as one rank sees them


def check_parameters(parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raise TypeError or ValueError for parameters that an optimizer cannot be built over."""
    seen: dict[int, str] = {}
    for parameter, name in zip(parameters, names, strict=True):
        if id(parameter) in seen:
            raise ValueError(f"{name} is the same parameter as {seen[id(parameter)]}")
        seen[id(parameter)] = name
        if hasattr(parameter, "to_local"):
            raise TypeError(
                f"{name} is a DTensor, and ZeroFP4Optimizer shards masters of whole parameters: leave out "
                "fully_shard, or call zerofp4.integrations.fsdp2.prepare(model) before it and attach(model, "
                "optimizer) with an optimizer of torch.optim"
            )
        if parameter.layout != torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got layout {parameter.layout}")
        if parameter.dtype not in WEIGHT_DTYPES:
            raise TypeError(f"{name} must have one of the dtypes {WEIGHT_DTYPES}, got {parameter.dtype}")
        if parameter.device.type == "meta":
            raise ValueError(f"{name} is on the meta device: give it storage first")
        if parameter.device != parameters[0].device:
            raise ValueError(f"{name} is on {parameter.device}, {names[0]} on {parameters[0].device}")
        if isinstance(parameter, NVFP4Tensor) and parameter.requires_grad:
            check_castable(name, parameter.record)
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError("params: no parameter requires a gradient")
    # Parameters become views of flat buffers, which would part two that share memory.
    spans = []
    for parameter, name in zip(parameters, names, strict=True):
        data = parameter.rowwise_data if isinstance(parameter, NVFP4Tensor) else parameter
        if data is not None and data.numel():
            spans.append((data.data_ptr(), data.data_ptr() + data.numel() * data.element_size(), name))
    for (_, end, first), (start, _, second) in itertools.pairwise(sorted(spans)):
        if start < end:
            raise ValueError(f"{first} and {second} share memory: pass tied weights as one parameter")


def amax_group_numbers(
    parameters: Sequence[torch.Tensor], amax_groups: Sequence[Sequence[torch.Tensor]] | None
) -> list[int]:
    """Number the amax groups: by parameter, the group that it is in, alone or with others.

    Raises TypeError or ValueError for groups that a cast plan of all NVFP4 weights would refuse.
    """
    of_weights = number_groups([p.record for p in parameters if isinstance(p, NVFP4Tensor)], amax_groups)
    numbers, others = iter(of_weights), itertools.count(len(of_weights))
    return [next(numbers if isinstance(p, NVFP4Tensor) else others) for p in parameters]


def kind_of(parameter: torch.Tensor) -> str:
    """The dtype and shape of a parameter, as text."""
    dtype = "nvfp4 " * isinstance(parameter, NVFP4Tensor) + str(parameter.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(parameter.shape)}"


def describe(
    param_groups: Sequence[dict], optimizers: Sequence[str], updated: Sequence[Updated]
) -> list[str]:
    """Describe, for each parameter, what the ranks that share it must have in common.

    optimizers: by group, the name of the class. updated: by trainable parameter.
    """
    lines, how = [], iter(updated)
    for g, group in enumerate(param_groups):
        of = "" if optimizers[g] == optimizers[0] else f" of {optimizers[g]}"
        for p in group["params"]:
            line = f"{kind_of(p)} in group {g}{of}" + ("" if p.requires_grad else ", frozen")
            if gradient_dtype(p) != p.dtype:
                line += f", gradients {gradient_dtype(p)}"
            work = next(how).work if p.requires_grad else None
            lines.append(line if work is None else f"{line}, updated whole in {work} operations")
    return lines


# Options that exclude each other


def check_overlap(overlap: str | None, accumulate: str) -> None:
    """Raise ValueError for values of these arguments that do not exist."""
    for name, value, known in (
        ("overlap", overlap, (None, "backward", "forward", "both")),
        ("accumulate", accumulate, ("local", "sharded")),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {known}, got {value!r}")


def overlaps_backward(overlap: str | None) -> bool:
    """Whether gradients start to travel during backward passes."""
    return overlap in ("backward", "both")


def overlaps_forward(overlap: str | None) -> bool:
    """Whether the all-gather of weights may run into the next forward pass."""
    return overlap in ("forward", "both")


def check_can_overlap(
    overlap: str | None,
    accumulate: str,
    transport: str,
    groups: Sequence[dist.ProcessGroup | None],
    group: dist.ProcessGroup | None,
) -> None:
    """Raise ValueError if gradients are to travel before step() and cannot. groups: by parameter."""
    if not _travels_early(overlap, accumulate):
        return
    asked = f"overlap={overlap!r}, accumulate={accumulate!r}"
    if (transport, accumulate) == ("peer", "sharded"):
        raise ValueError(
            f'{asked} is not supported with transport="peer": what ranks write into memory that they share '
            'is added up in step(), once; accumulate="local" adds up micro-batches in p.grad, and '
            'transport="collective" takes "sharded"'
        )
    if any(other is not group for other in groups):
        raise ValueError(f"{asked} is not supported where parameter groups name a process_group of their own")


def check_hosts(
    hosts: Hosts | None,
    transport: str,
    overlap: str | None,
    accumulate: str,
    shardings: Sequence[Sharding],
    group: dist.ProcessGroup | None,
) -> None:
    """Raise ValueError if gradients cannot be reduced host by host. shardings: by parameter."""
    if hosts is None:
        return
    if transport == "peer":
        raise ValueError(
            'hosts are not for transport="peer", which is of one host: with "collective" or "auto" the ranks '
            "of each share memory, too"
        )
    if _travels_early(overlap, accumulate):
        raise ValueError(f"hosts are not supported with overlap={overlap!r}, accumulate={accumulate!r}")
    if any(sharding.group is not group or sharding.replicas for sharding in shardings):
        raise ValueError("hosts are not supported where parameter groups name a process_group of their own")


def _travels_early(overlap: str | None, accumulate: str) -> bool:
    return overlaps_backward(overlap) or accumulate == "sharded"


# What the ranks announce to each other


class Member(NamedTuple):
    """A parameter that a rank announces.

    group: the number of its parameter group.
    label: what error messages call it.
    name: its name in checkpoints; None without one.
    kind: what ranks that share it must have in common.
    together: the position of the first parameter of its amax group among the trainable ones of the same
        ranks; None for a frozen parameter.
    is_handed: whether an earlier optimizer hands over its master.
    """

    group: int
    label: str
    name: str | None
    kind: str
    is_trainable: bool
    together: int | None
    is_handed: bool


class Announcement(NamedTuple):
    """What one rank announces.

    ranks, copies, parts: by parameter group, as in its Place.
    common: what all ranks must have in common, by what error messages call it.
    bucket_mb: the size of buckets that suits this rank.
    """

    members: list[Member]
    ranks: list[Ranks]
    copies: list[Ranks]
    parts: list[int]
    common: dict[str, str]
    bucket_mb: float

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
    """Make this rank's announcement.

    labels, kinds: by parameter, as in Member.
    places: by parameter group.
    amax_numbers: by trainable parameter, the number of its amax group.
    handed: what take_over() returned.

    Raises ValueError for an amax group whose weights are in several process groups.
    """
    first: dict[int, tuple[Sharding, int, str]] = {}  # by amax group, its first parameter
    counts: Counter[Ranks] = Counter()
    members, numbers, described = [], iter(amax_numbers), iter(zip(labels, kinds, strict=True))
    for g, (group, place) in enumerate(zip(param_groups, places, strict=True)):
        names = group.get("param_names") or [None] * len(group["params"])
        for p, name in zip(group["params"], names, strict=True):
            (label, kind), together = next(described), None
            if p.requires_grad:
                here = place.sharding, counts[place.ranks], label
                counts[place.ranks] += 1
                sharding, together, other = first.setdefault(next(numbers), here)
                if sharding != place.sharding:
                    raise ValueError(
                        f"amax_groups put {other} and {label} together, which are in other process groups"
                    )
            member = Member(
                group=g,
                label=label,
                name=name and own_name(name),
                kind=kind if place.parts == len(place.ranks) else f"{kind} in {place.parts} parts",
                is_trainable=p.requires_grad,
                together=together,
                is_handed=id(p) in handed,
            )
            members.append(member)
    return Announcement(
        members=members,
        ranks=[place.ranks for place in places],
        copies=[place.copies for place in places],
        parts=[place.parts for place in places],
        common=common,
        bucket_mb=bucket_mb,
    )


def check_announcements(by_rank: Sequence[Announcement]) -> None:
    """Raise ValueError, the same on every rank, if ranks differ in what they must have in common."""
    _check_ranks(by_rank)
    for ranks in dict.fromkeys(ranks for rank in by_rank for ranks in rank.ranks):
        _check_members(by_rank, ranks)
    difference = first_difference([list(rank.common.items()) for rank in by_rank])
    if difference is not None:
        r, i = difference
        name = list(by_rank[0].common)[i]
        _raise_different(name, 0, by_rank[0].common[name], r, by_rank[r].common[name])
    _check_copies(by_rank)


def check_transport(transport: str, by_rank: Sequence[Announcement]) -> tuple[str, str | None]:
    """The transport to try, and why it is "collective" if nobody asked for that.

    Raises ValueError, the same on every rank, if "peer" was asked for: a rank shares memory with all ranks
    that step together or with none, so it excludes parameter groups of some ranks.
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
    """Whether every parameter is sharded over all ranks."""
    everyone = tuple(range(len(by_rank)))
    return all(set(r.ranks) <= {everyone} and set(r.parts) <= {len(everyone)} for r in by_rank)


def _check_ranks(by_rank: Sequence[Announcement]) -> None:
    """Check that all ranks in a named process group name the same one, group by group."""
    if _all_share_all(by_rank):
        return  # _check_members() compares numbers of groups
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
    """Check that ranks which share parameters have the same ones."""
    lists = [[m for m in by_rank[r].members if by_rank[r].ranks[m.group] == ranks] for r in ranks]
    kinds = [[member.kind for member in members] for members in lists]
    difference = first_difference(kinds)
    if difference is not None:
        other, i = difference
        if i is None:
            raise ValueError(
                f"params: rank {ranks[0]} has {len(kinds[0])} parameters, rank {ranks[other]} has "
                f"{len(kinds[other])}" + _of(ranks, len(by_rank))
            )
        _raise_different(lists[0][i].label, ranks[0], kinds[0][i], ranks[other], kinds[other][i])
    for what, values in (
        ("masters_from hands over", [[i for i, m in enumerate(own) if m.is_handed] for own in lists]),
        ("amax_groups put together", [[m.together for m in own if m.is_trainable] for own in lists]),
    ):
        for r, value in zip(ranks, values, strict=True):
            if value != values[0]:
                _raise_different(f"what {what}", ranks[0], values[0], r, value)


def _check_copies(by_rank: Sequence[Announcement]) -> None:
    """Check that replicated parameters have the same form on all ranks that have them, and that the ranks
    which share a parameter have one position in replicated_over: a norm counts all of their slices, or none.
    """
    for r, rank in enumerate(by_rank):
        for g, (ranks, copies) in enumerate(zip(rank.ranks, rank.copies, strict=True)):
            first, other = copies[0], ranks[0]
            kinds, theirs = ([m.kind for m in by_rank[x].members if m.group == g] for x in (r, first))
            if kinds != theirs:
                raise ValueError(
                    f"param_groups[{g}] is replicated_over ranks {list(copies)}, but rank {first} has "
                    f"{theirs} there and rank {r} {kinds}"
                )
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
    """Name the ranks in an error message; empty if they are all `count`."""
    return "" if len(ranks) == count else f" (of ranks {list(ranks)})"


class Slots(NamedTuple):
    """Positions in a vector with one entry for each trainable parameter of all ranks. Ranks that share a
    parameter share its entry.

    own: of this rank's parameters.
    labels: by position, what error messages call the parameter.
    """

    own: list[int]
    labels: list[str]


def find_slots(by_rank: Sequence[Announcement], rank: int) -> Slots:
    """Lay out the vector, the same on every rank, and find the positions of this rank's parameters."""
    labels: dict[tuple[Ranks, int], str] = {}
    own = []
    for r, announcement in enumerate(by_rank):
        counts: Counter[Ranks] = Counter()
        for member in announcement.trainable():
            ranks = announcement.ranks[member.group]
            key = ranks, counts[ranks]
            counts[ranks] += 1
            labels.setdefault(key, member.label + _of(ranks, len(by_rank)))
            if r == rank:
                own.append(key)
    positions = {key: i for i, key in enumerate(labels)}
    return Slots([positions[key] for key in own], list(labels.values()))
