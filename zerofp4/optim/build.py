"""Checks before a ZeroFP4Optimizer is built: of one rank's arguments, then of what all ranks announce."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerofp4.cast import check_castable, number_groups
from zerofp4.distributed import first_difference
from zerofp4.engine import Updated, check_gradient_dtype, gradient_dtype, make_wire
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.optim.communication import Communication
from zerofp4.optim.groups import FOR_BUILDING, Ranks, find_hosts, find_places, parameter_name
from zerofp4.optim.initial import take_over
from zerofp4.optim.inner import class_numbers, inner_classes, matrix_work, try_options
from zerofp4.optim.state_dict import own_name
from zerofp4.tensors import NVFP4Tensor

# One rank


class Checked:
    """The arguments of ZeroFP4Optimizer, checked, and what this rank announces to the others.

    param_groups: as torch.optim has completed them.
    group: all ranks that step together.

    Raises TypeError or ValueError for what one rank can see is wrong; changes nothing.
    """

    def __init__(
        self,
        param_groups: Sequence[dict],
        group: dist.ProcessGroup | None,
        *,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: dict[str, Any],
        amax_groups: Sequence[Sequence[torch.Tensor]] | None,
        communication: Communication,
        whole_matrices: bool | None,
        masters_from: Any,
        on_nonfinite: str,
    ):
        if on_nonfinite not in ("skip", "raise"):
            raise ValueError(f'on_nonfinite must be "skip" or "raise", got {on_nonfinite!r}')
        _check_communication(communication, defaults)
        self.amax_groups, self.communication = amax_groups, communication
        self.classes = inner_classes(param_groups, optimizer_class, whole_matrices, defaults)
        """By parameter group, what updates its masters."""
        self.places = find_places(param_groups, group)
        """By parameter group."""
        self.param_groups = [
            {key: value for key, value in param_group.items() if key not in FOR_BUILDING}
            for param_group in param_groups
        ]
        positions = [(g, i) for g, own in enumerate(self.param_groups) for i in range(len(own["params"]))]
        self.parameters = [self.param_groups[g]["params"][i] for g, i in positions]
        self.names = [parameter_name(g, i, self.param_groups[g]) for g, i in positions]
        """What messages call the parameters."""
        _check_parameters(self.parameters, self.names)
        tried = try_options(self.classes, self.param_groups, self.parameters[0].device)
        own = [one.defaults for one in tried if type(one) is optimizer_class]
        self.defaults = own[0] if own else tried[0].defaults
        """Options of the optimizer's own class."""
        self.trainable, self.trainable_names, self.shardings, self.updated = [], [], [], []
        """By trainable parameter."""
        numbers, members = class_numbers(self.classes), []
        for (g, i), p, name in zip(positions, self.parameters, self.names, strict=True):
            work = None
            if p.requires_grad:
                work = matrix_work(self.classes[g], p, name, tried[g].param_groups[0].get("ns_steps", 1))
                self.trainable.append(p)
                self.trainable_names.append(name)
                self.shardings.append(self.places[g].sharding)
                self.updated.append(Updated(numbers[g], work))
            members.append(self._member(g, i, name, work))
        if amax_groups and not any(isinstance(p, NVFP4Tensor) for p in self.trainable):
            raise ValueError("amax_groups was given, but no NVFP4 weight of params requires a gradient")
        leaders = self._find_amax_leaders()
        check_gradient_dtype(communication.gradient_dtype, self.trainable, self.trainable_names)
        self.hosts = find_hosts(communication.hosts, group)
        if any(sharding.group is not group for sharding in self.shardings):
            self._check_own_groups()
        self.transport, self.why_collective = communication.transport, None
        """The transport to try, and why it is "collective" if nobody asked for that."""
        if self.transport != "collective" and any(place.sharding.group is not group for place in self.places):
            self.transport = "collective"
            self.why_collective = "parameter groups name a process_group of some ranks"
            if communication.transport == "peer":  # shares memory with all ranks that step together
                raise ValueError(
                    f'transport="peer" cannot be where {self.why_collective}: "collective" works everywhere'
                )
        elif self.transport == "auto" and communication.adds_to_slices:
            self.transport = "collective"
            self.why_collective = "accumulate='sharded' adds up every backward pass"
        elif self.transport == "auto" and not communication.is_ordered:
            self.transport = "collective"
            self.why_collective = "reduction='reduce_scatter' is a collective"
        self.wire = make_wire(
            communication.gradient_wire, communication.bucket_mb, self.trainable, communication.gradient_dtype
        )
        if not communication.is_ordered:
            self._check_sums()
        self.held = take_over(masters_from, self.trainable, self.trainable_names, group, self.shardings)
        """Masters of an earlier optimizer, by id(parameter)."""
        trained = [k for k, p in enumerate(self.parameters) if p.requires_grad]
        for k, leader in zip(trained, leaders, strict=True):
            members[k] = members[k]._replace(
                together=positions[trained[leader]], is_handed=id(self.parameters[k]) in self.held
            )
        self.announcement = Announcement(
            members=members,
            ranks=[place.ranks for place in self.places],
            copies=[place.copies for place in self.places],
            common={
                "optimizer_class": " and ".join(dict.fromkeys(inner.name for inner in self.classes)),
                "on_nonfinite": on_nonfinite,
                "hosts": str(self.hosts and self.hosts.shape),
                **communication.compared(),
            },
            bucket_mb=self.wire.bucket_mb,
        )

    def _check_own_groups(self) -> None:
        """Raise ValueError for what parameters that are sharded over some ranks do not support."""
        what = None
        if self.hosts is not None:
            what = "hosts are"
        elif self.communication.sends_early:
            what = f"{self.communication.early_options} is"
        if what is not None:
            raise ValueError(f"{what} not supported where parameter groups name a process_group of their own")

    def _check_sums(self) -> None:
        """Raise TypeError for gradients that cannot be added up in the dtype in which they are sent."""
        for p, name in zip(self.trainable, self.trainable_names, strict=True):
            if self.wire.dtype_of([p]) == torch.float16:
                raise TypeError(
                    f"{name} has gradients of torch.float16, whose sums may overflow: "
                    'reduction="reduce_scatter" needs gradient_wire=torch.float32 or torch.bfloat16'
                )

    def _find_amax_leaders(self) -> list[int]:
        """By trainable parameter, the number of the first in its amax group.

        Raises ValueError for weights that share an amax but neither a process group nor an optimizer: they
        could not share a bucket.
        """
        first: dict[int, int] = {}
        numbers = amax_group_numbers(self.trainable, self.amax_groups)
        leaders = [first.setdefault(number, i) for i, number in enumerate(numbers)]
        for i, leader in enumerate(leaders):
            name, other = self.trainable_names[i], self.trainable_names[leader]
            if self.updated[i].by != self.updated[leader].by:
                raise ValueError(
                    f"amax_groups: {other} and {name} share an amax, but not their optimizer_class"
                )
            if self.shardings[i] != self.shardings[leader]:
                raise ValueError(
                    f"amax_groups put {other} and {name} together, which are in other process groups"
                )
        return leaders

    def _member(self, g: int, i: int, label: str, work: int | None) -> "Member":
        """Describe parameter i of group g. work: as in Updated."""
        group, inner, sharding = self.param_groups[g], self.classes[g], self.places[g].sharding
        p, names = group["params"][i], group.get("param_names")
        kind = f"{kind_of(p)} in group {g}"
        if inner.name != self.classes[0].name:
            kind += f" of {inner.name}"
        if not p.requires_grad:
            kind += ", frozen"
        if gradient_dtype(p) != p.dtype:
            kind += f", gradients {gradient_dtype(p)}"
        if work is not None:
            kind += f", updated whole in {work} operations"
        if sharding.replicas is not None:
            kind += f" in {dist.get_world_size(sharding.group)} parts"
        return Member(g, label, own_name(names[i]) if names else None, kind, p.requires_grad)


def kind_of(parameter: torch.Tensor) -> str:
    """The dtype and shape of a parameter, as text."""
    dtype = "nvfp4 " * isinstance(parameter, NVFP4Tensor) + str(parameter.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(parameter.shape)}"


def amax_group_numbers(
    parameters: Sequence[torch.Tensor], amax_groups: Sequence[Sequence[torch.Tensor]] | None
) -> list[int]:
    """Number the amax groups: by parameter, the group that it is in, alone or with others.

    Raises TypeError or ValueError for groups that a cast plan of all NVFP4 weights would refuse.
    """
    of_weights = number_groups([p.record for p in parameters if isinstance(p, NVFP4Tensor)], amax_groups)
    numbers, others = iter(of_weights), itertools.count(len(of_weights))
    return [next(numbers if isinstance(p, NVFP4Tensor) else others) for p in parameters]


def _check_communication(communication: Any, defaults: dict[str, Any]) -> None:
    """Raise TypeError for options of Communication that are given otherwise."""
    misplaced = next((f.name for f in dataclasses.fields(Communication) if f.name in defaults), None)
    if misplaced is not None:
        raise TypeError(
            f"{misplaced} is an option of Communication: give communication=zerofp4.optim.Communication("
            f"{misplaced}={defaults[misplaced]!r})"
        )
    if not isinstance(communication, Communication):
        raise TypeError(f"communication must be a Communication, got {type(communication).__name__}")


def _check_parameters(parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raise TypeError or ValueError for parameters that an optimizer cannot be built over."""
    seen: dict[int, str] = {}
    spans = []
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
        if hasattr(parameter, "zerofp4_master"):
            raise TypeError(
                f"{name} was prepared for FSDP2: use an optimizer of torch.optim, or FusedAdamW, and "
                "zerofp4.integrations.fsdp2.attach(model, optimizer); or convert_model in place of prepare"
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
        data = parameter.rowwise_data if isinstance(parameter, NVFP4Tensor) else parameter
        if data is not None and data.numel():
            spans.append((data.data_ptr(), data.data_ptr() + data.numel() * data.element_size(), name))
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError("params: no parameter requires a gradient")
    # Parameters become views of flat buffers, which would part two that share memory.
    for (_, end, first), (start, _, second) in itertools.pairwise(sorted(spans)):
        if start < end:
            raise ValueError(f"{first} and {second} share memory: pass tied weights as one parameter")


# All ranks


class Member(NamedTuple):
    """A parameter that a rank announces.

    group: the number of its parameter group.
    label: what error messages call it.
    name: its name in checkpoints; None without one.
    kind: what ranks that share it must have in common.
    together: the group and position of the first parameter of its amax group; None for a frozen parameter.
    is_handed: whether an earlier optimizer hands over its master.
    """

    group: int
    label: str
    name: str | None
    kind: str
    is_trainable: bool
    together: tuple[int, int] | None = None
    is_handed: bool = False


class Announcement(NamedTuple):
    """What one rank announces.

    ranks, copies: by parameter group, as in its Place.
    common: what all ranks must have in common, by what error messages call it.
    bucket_mb: the size of buckets that suits this rank.
    """

    members: list[Member]
    ranks: list[Ranks]
    copies: list[Ranks]
    common: dict[str, str]
    bucket_mb: float

    def trainable(self) -> list[Member]:
        return [member for member in self.members if member.is_trainable]


def check_announcements(by_rank: Sequence[Announcement]) -> None:
    """Raise ValueError, the same on every rank, if ranks differ in what they must have in common."""
    _check_ranks(by_rank)
    for ranks in dict.fromkeys(ranks for rank in by_rank for ranks in rank.ranks):
        _check_members(by_rank, ranks)
    difference = first_difference([list(rank.common.items()) for rank in by_rank])
    if difference is not None:
        r, i = difference
        (name, mine), (_, theirs) = (list(by_rank[rank].common.items())[i] for rank in (0, r))
        _raise_different(name, 0, mine, r, theirs)
    _check_copies(by_rank)


def _check_ranks(by_rank: Sequence[Announcement]) -> None:
    """Check that all ranks in a named process group name the same one, group by group."""
    everyone = tuple(range(len(by_rank)))
    if all(ranks == everyone for rank in by_rank for ranks in rank.ranks):
        return  # _check_members() compares numbers of groups
    counts = [len(rank.ranks) for rank in by_rank]
    other = next((r for r, count in enumerate(counts) if count != counts[0]), None)
    if other is not None:
        raise ValueError(
            f"param_groups: rank 0 has {counts[0]} groups, rank {other} has {counts[other]}: where they name "
            "process groups, all ranks must have as many"
        )
    for g, key in itertools.product(range(counts[0]), ("process_group", "replicated_over")):
        named = [(rank.ranks if key == "process_group" else rank.copies)[g] for rank in by_rank]
        if sum(map(len, set(named))) == len(by_rank):
            continue  # each rank is in one of them, so none is in two
        pairs = ((r, other) for r, ranks in enumerate(named) for other in ranks)
        r, other = next((r, other) for r, other in pairs if named[other] != named[r])
        what = f"{key} of param_groups[{g}]"
        _raise_different(what, r, f"ranks {list(named[r])}", other, f"ranks {list(named[other])}")


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
