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
from zerofp4.engine import Trained, find_bucket_mb, gradient_dtype, kind_key
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.optim.adamw import FusedAdamW
from zerofp4.optim.communication import Communication
from zerofp4.optim.groups import FOR_BUILDING, Ranks, find_hosts, find_places, parameter_name
from zerofp4.optim.initial import take_over
from zerofp4.optim.inner import InnerClass, class_numbers, inner_classes, is_muon, matrix_work, try_options
from zerofp4.optim.moments import suits_compact
from zerofp4.optim.state_dict import own_name
from zerofp4.tensors import NVFP4Tensor

HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
"""Whether this torch makes gradients in another dtype than a tensor's own."""

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
        state: str,
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
        _choose_state(self.param_groups, self.classes, state)
        groups = enumerate(self.param_groups)
        self._positions = [(g, i) for g, own in groups for i in range(len(own["params"]))]
        """By parameter, its group and its position there."""
        self.parameters = [self.param_groups[g]["params"][i] for g, i in self._positions]
        self.names = [parameter_name(g, i, self.param_groups[g]) for g, i in self._positions]
        """What messages call the parameters."""
        _check_parameters(self.parameters, self.names)
        tried = try_options(self.classes, self.param_groups, self.parameters[0].device)
        of_class = [one.defaults for one in tried if type(one) is optimizer_class]
        self.defaults = of_class[0] if of_class else tried[0].defaults
        """Options of the optimizer's own class."""
        self.trained = self._find_trained(tried)
        self._check_update_at_once()
        if communication.updates_early:
            self._check_updates_early(on_nonfinite)
        check_gradient_dtype(communication.gradient_dtype, self.trained)
        self.hosts = find_hosts(communication.hosts, group)
        self.transport, self.why_collective = self._choose_transport(group)
        """The transport to try, and why it is "collective" if nobody asked for that."""
        made_as = communication.gradient_wire or communication.gradient_dtype
        trainable = [one.parameter for one in self.trained]
        bucket_mb = communication.bucket_mb or find_bucket_mb(trainable, made_as)
        if not communication.is_ordered:
            self._check_sums()
        self.held = take_over(masters_from, self.trained, group)
        """Masters of an earlier optimizer, by id(parameter)."""
        numbers = {id(one.parameter): number for number, one in enumerate(self.trained)}
        self.announcement = Announcement(
            members=[self._announce(k, numbers.get(id(p))) for k, p in enumerate(self.parameters)],
            ranks=[place.ranks for place in self.places],
            copies=[place.copies for place in self.places],
            common={
                "optimizer_class": " and ".join(dict.fromkeys(inner.name for inner in self.classes)),
                "on_nonfinite": on_nonfinite,
                "hosts": str(self.hosts and self.hosts.shape),
                **communication.compared(),
            },
            bucket_mb=bucket_mb,
        )

    def _find_trained(self, tried: Sequence[torch.optim.Optimizer]) -> list[Trained]:
        """The trainable parameters. tried: by parameter group.

        Raises ValueError for weights that share an amax and cannot share a bucket.
        """
        numbers, found = class_numbers(self.classes), []
        for (g, _), p, name in zip(self._positions, self.parameters, self.names, strict=True):
            if p.requires_grad:
                work = matrix_work(self.classes[g], p, name, tried[g].param_groups[0].get("ns_steps", 1))
                is_compact = self.param_groups[g].get("state") == "compact" and suits_compact(p.shape)
                one = Trained(p, name, self.places[g].sharding, numbers[g], work, is_compact=is_compact)
                found.append(one)
        weights = [one.parameter.record for one in found if isinstance(one.parameter, NVFP4Tensor)]
        if self.amax_groups and not weights:
            raise ValueError("amax_groups was given, but no NVFP4 weight of params requires a gradient")
        amax_numbers = iter(number_groups(weights, self.amax_groups))
        leaders: dict[int, int] = {}  # by number of an amax group
        for i, one in enumerate(found):
            leader = i
            if isinstance(one.parameter, NVFP4Tensor):
                leader = leaders.setdefault(next(amax_numbers), i)
            first, found[i] = found[leader], one._replace(leader=leader)
            for what, own, others in (
                ("optimizer_class", one.by, first.by),
                ("block and four_over_six", kind_key(one.parameter), kind_key(first.parameter)),
                ("`state` and dtype", one.state, first.state),
                ("process group", one.sharding, first.sharding),
            ):
                if own != others:
                    raise ValueError(
                        f"amax_groups: {first.name} and {one.name} share an amax, but not their {what}"
                    )
        return found

    def _check_update_at_once(self) -> None:
        """Raise ValueError for masters of 24 bits that need a float32 `grad`, which this torch may lack."""
        others = [i.optimizer_class for i in self.classes if i.optimizer_class is not FusedAdamW]
        if others and not HAS_GRAD_DTYPE:
            for one in self.trained:
                if one.state == "compact24":
                    raise ValueError(
                        f'{one.name} has state="compact" beside groups of {others[0].__name__}, which needs '
                        f"grad_dtype of a later torch than {torch.__version__}, 2.11 for one"
                    )

    def _check_updates_early(self, on_nonfinite: str) -> None:
        """Raise ValueError for what cannot be with updates inside the backward pass."""
        for one in self.classes:
            if one.optimizer_class is not FusedAdamW or one.whole:
                name = "whole matrices" if one.whole else one.optimizer_class.__name__
                raise ValueError(
                    f'overlap="update" needs FusedAdamW, which updates one bucket after the other: not {name}'
                )
        if on_nonfinite == "raise":
            raise ValueError(
                'on_nonfinite="raise" is not supported with overlap="update": other weights are updated by '
                'then. "skip" leaves out the bucket with a NaN or Inf, and skipped_steps counts the step'
            )

    def _choose_transport(self, group: dist.ProcessGroup | None) -> tuple[str, str | None]:
        """The transport to try, and why it is "collective" if nobody asked for that.

        Raises ValueError for options that parameters which are sharded over some ranks do not support.
        """
        options, why = self.communication, None
        if any(place.sharding.group is not group for place in self.places):
            why = "parameter groups name a process_group of some ranks"
            if self.hosts is not None or options.sends_early:
                what = f"{options.early_options} is" if self.hosts is None else "hosts are"
                raise ValueError(
                    f"{what} not supported where parameter groups name a process_group of their own"
                )
            if options.transport == "peer":  # shares memory with all ranks that step together
                raise ValueError(f'transport="peer" cannot be where {why}: "collective" works everywhere')
        elif options.adds_to_slices:
            why = "accumulate='sharded' adds up every backward pass"
        elif not options.is_ordered:
            why = "reduction='reduce_scatter' is a collective"
        if why is None or options.transport == "collective":
            return options.transport, None
        return "collective", why

    def _check_sums(self) -> None:
        """Raise TypeError for gradients that cannot be added up in the dtype in which they are sent."""
        options = self.communication
        for one in self.trained:
            sent_as = options.gradient_wire or options.gradient_dtype or gradient_dtype(one.parameter)
            if sent_as == torch.float16:
                raise TypeError(
                    f"{one.name} has gradients of torch.float16, whose sums may overflow: "
                    'reduction="reduce_scatter" needs gradient_wire=torch.float32 or torch.bfloat16'
                )

    def _announce(self, k: int, number: int | None) -> "Member":
        """Parameter k. number: its position among the trainable ones; None for a frozen one."""
        p, (g, i) = self.parameters[k], self._positions[k]
        trained = None if number is None else self.trained[number]
        names, sharding = self.param_groups[g].get("param_names"), self.places[g].sharding
        kind = f"{kind_of(p)} in group {g}"
        if self.classes[g].name != self.classes[0].name:
            kind += f" of {self.classes[g].name}"
        if trained is None:
            kind += ", frozen"
        if gradient_dtype(p) != p.dtype:
            kind += f", gradients {gradient_dtype(p)}"
        if trained is not None and trained.work is not None:
            kind += f", updated whole in {trained.work} operations"
        if trained is not None and trained.leader != number:
            kind += f", in amax_groups with {self.trained[trained.leader].name}"
        if trained is not None and trained.is_compact:
            # Random bytes are those of the number: it must be that of all who have the parameter.
            kind += f", in compact state as number {number}"
        if id(p) in self.held:
            kind += ", of masters_from"
        if sharding.replicas is not None:
            kind += f" in {dist.get_world_size(sharding.group)} parts"
        return Member(g, self.names[k], own_name(names[i]) if names else None, kind, trained is not None)


def _choose_state(param_groups: Sequence[dict], classes: Sequence[InnerClass], state: str) -> None:
    """Write the option `state` into the groups of FusedAdamW. state: of groups that do not choose.

    Raises ValueError for compact state of classes that do not have it. Muon's keeps its own.
    """
    for g, (group, inner) in enumerate(zip(param_groups, classes, strict=True)):
        chosen, name = group.get("state", state), inner.optimizer_class.__name__
        if chosen not in ("full", "compact"):
            raise ValueError(f'param_groups[{g}]: state must be "full" or "compact", got {chosen!r}')
        if issubclass(inner.optimizer_class, FusedAdamW):
            if chosen == "compact" and inner.whole:
                raise ValueError(f'param_groups[{g}]: state="compact" excludes whole_matrices=True')
            group["state"] = chosen
        elif chosen == "compact" and ("state" in group or not is_muon(inner.optimizer_class)):
            raise ValueError(f'param_groups[{g}]: state="compact" is of FusedAdamW, and its class is {name}')


def kind_of(parameter: torch.Tensor) -> str:
    """The format, dtype and shape of a parameter, as text."""
    dtype = str(parameter.dtype).removeprefix("torch.")
    if isinstance(parameter, NVFP4Tensor):
        record = parameter.record
        choice = "" if record.four_over_six is None else f" with {record.four_over_six}"
        dtype = f"nvfp4{' 1x16' * (record.block[0] == 1)}{choice} {dtype}"
    return f"{dtype} {tuple(parameter.shape)}"


def check_gradient_dtype(dtype: torch.dtype | None, trained: Sequence[Trained]) -> None:
    """Raises ValueError unless gradients of these parameters can be made in `dtype`; changes nothing."""
    for parameter, name, *_ in trained:
        if dtype in (None, gradient_dtype(parameter)):
            continue
        if not HAS_GRAD_DTYPE:
            raise ValueError(
                f"gradient_dtype={dtype}: torch {torch.__version__} gives {name} gradients of its own dtype, "
                f"{parameter.dtype}; later versions have grad_dtype, torch 2.11 for one"
            )
        if parameter.grad is not None:
            raise ValueError(
                f"gradient_dtype={dtype}: {name} has a gradient of {parameter.grad.dtype} by now; call "
                "zero_grad() first"
            )


def set_gradient_dtype(dtype: torch.dtype | None, parameters: Sequence[torch.Tensor]) -> None:
    """Have autograd make and add up gradients of these parameters in `dtype`; None changes nothing."""
    for parameter in parameters:
        if dtype not in (None, gradient_dtype(parameter)):
            with torch._C.DisableTorchFunctionSubclass():
                parameter.grad_dtype = dtype


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
    """

    group: int
    label: str
    name: str | None
    kind: str
    is_trainable: bool


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
        for r, other in ((r, other) for r, ranks in enumerate(named) for other in ranks):
            if named[other] != named[r]:
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


def _check_copies(by_rank: Sequence[Announcement]) -> None:
    """Check that replicated parameters have the same form on all ranks that have them, and that the ranks
    which share a parameter have one position in replicated_over: a norm counts all of their slices, or none.
    """
    for r, rank in enumerate(by_rank):
        for g, (ranks, copies) in enumerate(zip(rank.ranks, rank.copies, strict=True)):
            kinds, theirs = ([m.kind for m in by_rank[x].members if m.group == g] for x in (r, copies[0]))
            if kinds != theirs:
                raise ValueError(
                    f"param_groups[{g}] is replicated_over ranks {list(copies)}, but rank {copies[0]} has "
                    f"{theirs} there and rank {r} {kinds}"
                )
            position, other = copies.index(r), by_rank[ranks[0]].copies[g].index(ranks[0])
            if position != other:
                raise ValueError(
                    f"param_groups[{g}] is sharded over ranks {list(ranks)}, of which rank {ranks[0]} has "
                    f"place {other} in its replicated_over and rank {r} place {position}: all must have the "
                    "same"
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
