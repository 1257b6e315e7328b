"""What a ZeRO optimizer saves and loads: a state dict in torch's form, of pieces in the parameters' shapes.

A state dict that is loaded is matched with the parameters by their names, and checked whole before anything
changes.
"""

import collections
import contextlib
import copy
import itertools
import math
import numbers
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zerofp4.distributed import CollectiveError, GroupReference, OwnError
from zerofp4.engine import joined
from zerofp4.optim.inner import InnerClass, InnerOptimizers, are_unchanged, options
from zerofp4.optim.moments import decode_shard, encode_shard, scales_shape
from zerofp4.optim.piece import ONE_PART, About, Home, Piece
from zerofp4.optim.seal import SavedOptions
from zerofp4.shard import Shard, state_groups

# Names and numbers

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Wrapper modules whose names torch.distributed.checkpoint leaves out of a parameter's name."""


class ParameterId(int):
    """The number of a parameter among all of param_groups. str() of it, which torch.distributed.checkpoint
    makes keys from, is the parameter's name, or the number without one.
    """

    name: str | None

    def __new__(cls, number: int, name: str | None):
        made = super().__new__(cls, number)
        made.name = name
        return made

    def __str__(self) -> str:
        return repr(int(self)) if self.name is None else self.name

    def __reduce__(self) -> tuple:
        return ParameterId, (int(self), self.name)


torch.serialization.add_safe_globals([ParameterId])


def own_name(name: str) -> str:
    """A parameter's name without the modules that DDP, torch.compile and others put around it."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" and len(parts) > 1 else parts)


def _find_names(
    announced: Sequence[Any], rank: int, group_count: int
) -> tuple[list[str | None], list[list[str]]]:
    """By parameter of this rank, why no file can have it under its name (None if one can); and by
    parameter group, the names of those in it that this rank lacks and others have.

    announced: the Announcement of each rank. The same parameter is on the ranks that it is sharded over, and
    on those that replicated_over names with theirs; another one of that name would take its place.
    """
    own, by_rank = announced[rank], [{m.name for m in announcement.members} for announcement in announced]
    refusals = []
    for member in own.members:
        others = [r for r, names in enumerate(by_rank) if member.name in names and r not in member.ranks]
        refusal = None
        if others and len(member.copies) == 1:
            refusal = (
                f"{member.label} is one parameter on ranks {list(member.ranks)}, another on ranks {others}, "
                "and a checkpoint has one of each name: build the optimizer with names of the whole model, "
                "as in [('experts.7.weight', p)]"
            )
        refusals.append(refusal)
    lacking: list[dict[str, None]] = [{} for _ in range(group_count)]
    for member in itertools.chain.from_iterable(announcement.members for announcement in announced):
        if member.name not in by_rank[rank] and member.name is not None:
            lacking[member.group][member.name] = None
    return refusals, list(map(list, lacking))


# What an optimizer keeps of a parameter, found out before it has kept any

STARTED = "started"
"""In a state dict, of an optimizer that counts no steps: 1 once the parameter has a state, else 0."""

TRIAL_SHAPE = (5, 7)
"""Of the matrix in a trial, by which the sizes of state are told apart."""


class Entry(NamedTuple):
    """What an optimizer keeps under one name.

    kind: "elements" for one for each element of what is updated, "groups" for two for each group of compact
        state, "matrices" for a tensor of another shape for each matrix, "scalar" for a tensor of one element,
        or the type of a Python number.
    device: None for that of the masters.
    trial_shape: of "matrices", for a matrix of TRIAL_SHAPE.
    is_flag: whether it is 0 of a parameter that has no state yet.
    """

    dtype: torch.dtype
    kind: str | type = "elements"
    device: torch.device | None = None
    trial_shape: tuple[int, ...] = ()
    is_flag: bool = False

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what is kept of a parameter or of a matrix of this shape."""
        if self.kind == "elements":
            return tuple(shape)
        if self.kind == "groups":
            return scales_shape(shape)
        if self.kind != "matrices":
            return ()
        sizes = dict(zip(TRIAL_SHAPE, shape[-2:], strict=True))
        return (*shape[:-2], *(sizes.get(size, size) for size in self.trial_shape))


MASTER = Entry(torch.float32)
PLANES = {"master_high": Entry(torch.bfloat16), "master_low": Entry(torch.uint8)}
"""What is saved of masters of 24 bits. The names are their own, so that nobody takes a plane for a master."""

MOMENTS = dict.fromkeys(("exp_avg", "exp_avg_sq"), MASTER)
CODES = {
    "exp_avg_codes": Entry(torch.int8),
    "exp_avg_sq_codes": Entry(torch.uint8),
    "scales": Entry(torch.float32, "groups"),
}
"""What is saved of moments in full state, and in compact state."""

KNOWN = {"master": MASTER} | PLANES | MOMENTS | CODES


def make_template(inner: InnerClass, group: dict, device: torch.device) -> dict[str, Entry]:
    """Entries by name, from a trial step with zeros as the gradient of two elements, or a small matrix."""
    trial = torch.zeros(TRIAL_SHAPE if inner.whole else 2, dtype=torch.float32, device=device)
    chosen = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options(group).items()}
    optimizer = inner.optimizer_class([chosen | {"params": [trial]}], **inner.defaults)
    is_lazy = not optimizer.state.get(trial)
    trial.grad = torch.zeros_like(trial)
    # A trial is no step of the run, so torch's global hooks must not see it. To call the function that torch
    # has wrapped is not enough: a class may call the step() of the class that it is based on.
    with contextlib.ExitStack() as at_the_end:
        for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
            at_the_end.callback(hooks.update, dict(hooks))
            hooks.clear()
        optimizer.step()
    found = optimizer.state.get(trial, {})
    entries = {name: entry_of(name, value, trial) for name, value in found.items() if value is not None}
    if entries and is_lazy:
        flag = "step" if "step" in entries else STARTED
        cpu_scalar = Entry(torch.float32, "scalar", torch.device("cpu"))
        entries[flag] = entries.get(flag, cpu_scalar)._replace(is_flag=True)
    return entries


def entry_of(name: str, value: Any, of: torch.Tensor) -> Entry:
    """The entry for a value that an optimizer keeps of a tensor: a slice, 1D, or a matrix."""
    if not isinstance(value, torch.Tensor):
        return Entry(torch.float64, type(value), torch.device("cpu"))
    if value.dim() and value.numel() == of.numel():
        return Entry(value.dtype, "elements", value.device)
    is_count = name == "step" and value.numel() == 1  # the same of all matrices of a stack
    if of.dim() == 1 or is_count:
        return Entry(value.dtype, "scalar", value.device)
    return Entry(value.dtype, "matrices", value.device, tuple(value.shape))


# One parameter


class SavedParameter(NamedTuple):
    """A trainable parameter as checkpoints have it.

    number: in state dicts; it knows the name. label: what messages call it. group: the number of its group.
    shard: what this rank owns. home: where its pieces are. refusal: as in About.
    """

    number: ParameterId
    label: str
    group: int
    shape: torch.Size
    shard: Shard
    home: Home
    refusal: str | None

    def extent(self, entry: Entry) -> tuple[tuple[int, ...], Shard]:
        """The shape of an entry, and what this rank has of it: its shard of what is like the parameter. All
        else is whole with the ranks that own some of the parameter's elements, or with all if there are none.
        """
        shape = entry.shape(self.shape)
        if entry.kind == "elements":
            return shape, self.shard
        if entry.kind == "groups":
            groups = state_groups(self.shard, self.shape[-1])
            return shape, Shard(2 * groups.start, 2 * groups.numel)
        is_here = self.shard.numel > 0 or not self.shape.numel()
        return shape, Shard(0, math.prod(shape) if is_here else 0)

    def read(self, name: str, value: Any, entry: Entry) -> torch.Tensor:
        """This rank's part of an entry of a state dict, 1D, in the dtype of the entry.

        Raises ValueError for what does not fit. Collective for a DTensor, and for what another optimizer of
        these ranks has.
        """
        (shape, shard), what = self.extent(entry), f"state_dict does not fit: {self.label}.{name}"
        if isinstance(value, numbers.Number):
            value = torch.tensor(value, dtype=entry.dtype, device="cpu")
        home = value.about.home if isinstance(value, Piece) else None
        is_elsewhere = home not in (None, self.home) and home.group.is_alive()
        if is_elsewhere or isinstance(value, DTensor):
            value = value.full_tensor()
        if math.prod(shape) != value.numel() or (shape and shape != tuple(value.shape)):
            raise ValueError(f"{what} has shape {tuple(value.shape)}, here {shape}")
        if not isinstance(value, Piece):
            return value.detach().reshape(-1)[shard.start : shard.end].to(entry.dtype, copy=True)
        if value.unread:
            raise ValueError(f"{what} is not whole in the checkpoint")
        if value.shard == shard:
            return value.values.to(entry.dtype)
        if value.is_whole:  # a file that a world of one wrote
            return value.values[shard.start : shard.end].to(entry.dtype, copy=True)
        raise ValueError(f"{what} has the elements of another rank. {ONE_PART}")

    def check_complete(self, names: Iterable[str], found: Mapping[str, Any]) -> None:
        """Raise ValueError for the first of these entries that a state dict lacks."""
        for name in names:
            if name not in found:
                raise ValueError(f"state_dict does not fit: {self.label}.{name} is missing")


# What is saved


class SavedState(Mapping):
    """The masters of an optimizer and the state of its optimizers of masters, as a checkpoint has them.

    It is `state` of the optimizer: by parameter, what state_dict() has of it. Each look makes new pieces of
    the same values.

    param_groups: returns those of the optimizer, as they are now.
    token: of the ids of saves, the same on every rank.
    steps: as of Agreement.steps_taken().
    """

    def __init__(
        self,
        *,
        param_groups: Callable[[], Sequence[dict]],
        shards: Any,
        inners: InnerOptimizers,
        classes: Sequence[InnerClass],
        announced: Sequence[Any],
        rank: int,
        token: str,
        steps: Callable[[], int],
    ):
        self.param_groups, self.shards, self.inners, self._classes = param_groups, shards, inners, classes
        self._count_steps = steps
        self.token = token
        """Another one after each load."""
        self.consolidated: dict[int, dict[str, torch.Tensor]] | None = None
        """What consolidate_state_dict() has gathered on this rank: `state` of the next state_dict()."""
        self.device = shards.parameters[0].device
        refusals, self._elsewhere = _find_names(announced, rank, len(param_groups()))
        self.ids: list[list[ParameterId]] = [[] for _ in param_groups()]
        """By parameter group, the numbers of all parameters, frozen ones too."""
        self.parameters: list[SavedParameter] = []
        """The trainable ones, in the order of the shards."""
        homes: dict[dist.ProcessGroup | None, Home] = {}
        trained = zip(shards.trained, shards.shards, strict=True)
        for n, (member, refusal) in enumerate(zip(announced[rank].members, refusals, strict=True)):
            number, g = ParameterId(n, member.name), member.group
            self.ids[g].append(number)
            if member.is_trainable:
                one, shard = next(trained)
                group, label, shape = one.sharding.group, member.name or member.label, one.parameter.shape
                home = homes.setdefault(group, Home(GroupReference(group), self.device))
                self.parameters.append(SavedParameter(number, label, g, shape, shard, home, refusal))
        self.indices = {id(p): i for i, p in enumerate(shards.parameters)}
        """By the identity of a trainable parameter, its position among these."""
        self._templates: dict[int, tuple[dict, dict[str, Entry]]] = {}
        """By parameter group, a copy of the group, and the template that was made for it."""

    @property
    def steps(self) -> int:
        """How many steps the ranks have taken, skipped ones too."""
        return self._count_steps()

    @property
    def save_id(self) -> str:
        """The id of what is saved now, a token and the steps. Its width is fixed: chunks of two saves lie at
        the same bytes of a file, so that a mixture can be read.
        """
        return f"{self.token}-{self.steps:012d}"

    def template(self, i: int) -> dict[str, Entry]:
        """What is kept of trainable parameter i, by the present options of its group."""
        g = self.parameters[i].group
        group = self.param_groups()[g]
        if g not in self._templates or not are_unchanged([group], [self._templates[g][0]]):
            try:
                self._templates[g] = dict(group), make_template(self._classes[g], group, self.device)
            except ValueError:  # of options that no step can have taken: what is kept is that of earlier ones
                if g not in self._templates:
                    raise
        template = self._templates[g][1]
        if self.shards.trained[i].state == "full":
            return template
        return {name: entry for name, entry in template.items() if name not in MOMENTS} | CODES

    def piece(self, i: int, name: str, values: torch.Tensor | None, entry: Entry = MASTER) -> Piece:
        """A piece of trainable parameter i. values: 1D, of this rank; None for zeros without memory."""
        saved = self.parameters[i]
        shape, shard = saved.extent(entry)
        if values is None:
            zero = torch.zeros(min(1, shard.numel), dtype=entry.dtype, device=entry.device or self.device)
            values = zero.expand(shard.numel)
        is_overwritten = self.shards.is_overwritten(i)
        about = About(saved.home, saved.refusal, self.shards.obstacle, is_overwritten)
        return Piece(values, shape, shard.start, about, {self.save_id})

    def master(self, parameter: torch.Tensor) -> Piece | None:
        """A piece of the float32 master; None without one. One of 24 bits is converted in each call."""
        i = self.indices.get(id(parameter))
        if i is None:
            return None
        return self.piece(i, "master", joined(self.shards.masters[i], self.shards.lows[i]))

    def exported(self, parameter: torch.Tensor) -> Piece | None:
        """As master(), but if somebody wrote to the weight, of the values that it has now."""
        i = self.indices.get(id(parameter))
        return None if i is None else self.piece(i, "master", joined(*self.shards.saved_planes(i)))

    def is_unsaved(self, value: Any) -> bool:
        """Whether an entry is what somebody wrote to a weight, in a state dict that was taken since and not
        saved. The master decides there: accelerate loads such a one after DDP has written to all weights.
        """
        is_overwritten = isinstance(value, Piece) and value.about.is_overwritten and value.unread is None
        return is_overwritten and value.saves == {self.save_id}

    def entries(self, i: int) -> dict[str, Piece]:
        """What is saved of trainable parameter i: pieces of its master, and of its state by the names of the
        inner optimizer, so that every rank has the same names: before the first update it is zeros. State of
        several matrices is a copy, one behind the other.
        """
        entries, masters = dict(self.template(i)), self.shards.optimized[i]
        states = [self.inners.state_of(master) for master in masters]
        found = {}
        for name, value in states[0].items() if states else ():
            if value is None:
                continue
            entry = entries.setdefault(name, entry_of(name, value, masters[0]))
            if entry.kind in ("elements", "matrices") and len(states) > 1:
                value = torch.cat([state[name].reshape(-1) for state in states])
            found[name] = torch.as_tensor(value, dtype=entry.dtype, device=entry.device).reshape(-1)
        if STARTED in entries and found:
            found[STARTED] = torch.ones(1, dtype=torch.float32, device="cpu")
        planes = self.shards.saved_planes(i)
        kept = PLANES if self.shards.trained[i].state == "compact24" else {"master": MASTER}
        named = zip(kept.items(), planes, strict=False)  # one or both
        pieces = {name: self.piece(i, name, plane, entry) for (name, entry), plane in named}
        return pieces | {name: self.piece(i, name, found.get(name), entry) for name, entry in entries.items()}

    def groups(self) -> SavedOptions:
        """`param_groups` of a state dict: the options, and whose they are. A tuple, which
        torch.distributed.checkpoint writes as one value: other groups than those that were saved can load it.
        One rank writes the value for all, so `elsewhere` has the names of parameters of other ranks.
        """
        groups = []
        for group, own, elsewhere in zip(self.param_groups(), self.ids, self._elsewhere, strict=True):
            saved = {k: v.detach().cpu() if torch.is_tensor(v) else v for k, v in options(group).items()}
            if not own or own[0].name is not None:
                saved["param_names"] = [number.name for number in own]
            if elsewhere:
                saved["elsewhere"] = list(elsewhere)
            groups.append(saved | {"params": list(own)})
        made = SavedOptions(groups)
        made.save_id = self.save_id
        return made

    def state_dict(self) -> dict[str, Any]:
        return {
            "state": {saved.number: self.entries(i) for i, saved in enumerate(self.parameters)},
            "param_groups": self.groups(),
            "steps": self.steps,
        }

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Piece]:
        i = self.indices.get(id(parameter))
        return {} if i is None else self.entries(i)  # frozen: as torch's defaultdict

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self.indices

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.shards.parameters)

    def __len__(self) -> int:
        return len(self.parameters)


# Loading

HOW = ("foreach", "fused", "capturable", "differentiable", "state")
"""Options that say how an optimizer computes and keeps its state: those of the optimizer that loads stay."""


def read_state_dict(
    saved: SavedState, state_dict: Mapping, written: Sequence[int], obstacle: str | None
) -> tuple[list[torch.Tensor | None], set[str]]:
    """Check a state dict, and give the optimizers of the masters their part as new objects, so that the old
    ones can come back.

    written: trainable parameters that somebody wrote to. Their masters follow them where none is saved.
    obstacle: why every master must be there; None where they may stay.

    Returns this rank's range of each master, 1D, None if it stays; and the saves that this rank has read.
    Raises ValueError for what does not fit.
    """
    matched = _match(state_dict, saved.ids)
    was_in_file, saves = find_saves(state_dict, saved.save_id)
    homes = {None, *(own.home for own in saved.parameters)}
    is_of_another = any(piece.about.home not in homes for piece in pieces_of(state_dict))
    may_lack = matched and is_of_another and not was_in_file  # what is new here
    masters, states, error = [], {}, OwnError()
    for i, own in enumerate(saved.parameters):
        master = None
        with error:  # the other ranks may gather what comes next
            if own.number in matched:
                master, state = _read_parameter(saved, i, matched[own.number][1], was_in_file)
                states |= state
            elif not may_lack:
                raise ValueError(f"state_dict does not fit: {own.label} is missing")
        masters.append(master)
    error.raise_if_any()
    has_masters = any(master is not None for master in masters)  # else it is of torch.optim
    for i, own in enumerate(saved.parameters):
        if masters[i] is not None:
            continue
        is_new = may_lack and not matched.get(own.number, (0, ()))[1]
        if has_masters and not is_new:  # it would be trained beside parameters of another model
            own.check_complete(["master"], ())
        if i in written:
            masters[i] = joined(*saved.shards.written_planes(i))
        elif own.shard.numel and obstacle is not None:
            raise ValueError(f"state_dict has no master of {own.label}, and {obstacle}")
    groups = []
    for group, own in zip(saved.param_groups(), saved.ids, strict=True):
        sources = sorted({matched[number][0] for number in own if number in matched})
        groups.append(group | _find_options(group, [state_dict["param_groups"][g] for g in sources]))
    saved.inners.load(groups, states, saved.device)
    if was_in_file and type(state_dict["param_groups"]) is tuple:
        # torch has read none, which a planner lets pass, and has copied those of this optimizer.
        warnings.warn(
            "the checkpoint has no param_groups of a ZeroFP4Optimizer: lr and other options stay as they are "
            "here. What get_optimizer_state_dict(model, optimizer) returns loads options, too",
            stacklevel=3,
        )
    return masters, saves


def _match(
    state_dict: Mapping, ids: Sequence[Sequence[ParameterId]]
) -> dict[ParameterId, tuple[int, Mapping]]:
    """By parameter, its saved group and entries: by name if both sides have names, else by position."""
    state = {_name(key) or key: entries for key, entries in state_dict["state"].items()}
    groups, names = state_dict["param_groups"], []
    theirs: list[list[tuple[int, Mapping]]] = []
    by_name: dict[str, tuple[int, Mapping]] = {}
    for g, group in enumerate(groups):
        own = [_name(key) for key in group.get("param_names") or group["params"]]
        # What was read into state_dict() has this optimizer's numbers in `state`, and not the groups'.
        pairs = zip(own, group["params"], strict=True)
        theirs.append([(g, state.get(name, state.get(key, {}))) for name, key in pairs])
        by_name |= zip(own, theirs[g], strict=True)
        by_name |= {name: (g, state[name]) for name in group.get("elsewhere", ()) if name in state}
        names += own
    is_by_name = groups and None not in (*names, *(number.name for own in ids for number in own))
    for name, count in collections.Counter(names).items():
        if count > 1 and name is not None and (is_by_name or name in state):
            raise ValueError(f"state_dict: {count} parameters are called {name!r}, so none can be matched")
    if is_by_name:
        return {number: by_name[number.name] for own in ids for number in own if number.name in by_name}
    counts = [list(map(len, side)) for side in (theirs, ids)]
    if counts[0] != counts[1]:
        raise ValueError(
            f"state_dict: param_groups have {counts[0]} parameters, and these {counts[1]}; other groups are "
            "loaded where both optimizers were built with named_parameters()"
        )
    return dict(zip(itertools.chain(*ids), itertools.chain(*theirs), strict=True))


def _name(key: Any) -> str | None:
    """The name of a parameter by which a state dict has its entries; None of a number."""
    name = getattr(key, "name", key)
    return own_name(name) if isinstance(name, str) else None


def _read_parameter(
    saved: SavedState, i: int, entries: Mapping[str, Any], was_in_file: bool
) -> tuple[torch.Tensor | None, dict[int, dict[str, Any]]]:
    """This rank's part of what a state dict has of a parameter: the float32 master, None if it has none; and
    by id, the state of what optimizers update of it, empty if there is none yet. Either is converted where
    this optimizer keeps another kind.
    """
    own, template, found, error = saved.parameters[i], saved.template(i), {}, OwnError()
    known = KNOWN | template
    for name, value in entries.items():
        if value is None or (was_in_file and isinstance(value, Piece) and value.unread is None):
            continue  # what was not read is what the optimizer had
        if name not in known:  # a first step does not make it
            is_tensor = torch.is_tensor(value) and value.dim()
            known[name] = MASTER if is_tensor else Entry(torch.float32, "scalar")
        with error:  # the other ranks may gather the next entry
            found[name] = own.read(name, value, known[name])
    error.raise_if_any()
    count = found.get("step", torch.zeros((), dtype=torch.float32, device="cpu"))
    if not (count.isfinite() & (count >= 0)).all():  # an update would put a NaN into the master
        raise ValueError(
            f"state_dict does not fit: {own.label}.step must be finite and not negative, got {count.item()}"
        )
    master = found.pop("master", None)
    if not PLANES.keys().isdisjoint(found):
        own.check_complete(PLANES, found)
        master = joined(*map(found.pop, PLANES))
    kept = saved.shards.masters[i]
    if kept is not None and saved.is_unsaved(entries.get("master", entries.get("master_high"))):
        master = joined(kept, saved.shards.lows[i])
    parts = saved.shards.optimized[i]
    if not parts or not (found or was_in_file):  # of other ranks, or never updated
        return master, {}
    if CODES.keys() <= template.keys() and MOMENTS.keys() <= found.keys():
        found |= encode_shard(*map(found.pop, MOMENTS), own.shape[-1])
    elif MOMENTS.keys() <= template.keys() and CODES.keys() <= found.keys():
        found |= decode_shard(*map(found.pop, CODES), own.shard.start, own.shape[-1])
    own.check_complete([name for name in template if name != STARTED], found)
    flags = [found[name] for name, entry in template.items() if entry.is_flag and name in found]
    if not all(map(bool, flags)):
        return master, {}
    found.pop(STARTED, None)
    states: dict[int, dict[str, Any]] = {id(part): {} for part in parts}
    for name, value in found.items():
        entry = known[name]
        if isinstance(entry.kind, type):
            cut = [entry.kind(value.item())] * len(parts)
        elif entry.kind == "scalar":
            cut = [value.clone().view(()) for _ in parts]
        else:
            shape = (-1, 2) if entry.kind == "groups" else entry.shape(parts[0].shape)
            cut = [part.view(shape) for part in value.chunk(len(parts))]
        for state, part in zip(states.values(), cut, strict=True):
            state[name] = part
    return master, states


# Options


def _find_options(group: Mapping, sources: Sequence[Mapping]) -> dict[str, Any]:
    """The new options of a parameter group: those that all saved groups of its members agree on, also what
    the group lacks, as a new scheduler expects what an earlier one kept there.
    """
    new = {}
    for key in dict.fromkeys(key for source in sources for key in options(source)):
        found = [source[key] for source in sources if key in source]
        is_option = key not in (*HOW, "elsewhere")
        if is_option and all(bool(found[0] == other) for other in found[1:]):
            new[key] = _option_like(group[key], found[0]) if key in group else copy.deepcopy(found[0])
    return new


def _option_like(present: Any, value: Any) -> Any:
    """The saved value of an option as the kind of value that the option has here."""
    if isinstance(present, torch.Tensor):
        return torch.as_tensor(value, dtype=present.dtype, device=present.device).view(present.shape).clone()
    if isinstance(present, list | tuple) and isinstance(value, list | tuple) and len(present) == len(value):
        return type(present)(_option_like(p, v) for p, v in zip(present, value, strict=True))
    return value.item() if isinstance(value, torch.Tensor) else value


# What was read


def pieces_of(state_dict: Mapping) -> Iterator[Piece]:
    for entries in state_dict["state"].values():
        yield from (value for value in entries.values() if isinstance(value, Piece))


def find_saves(state_dict: Mapping, present: str | None = None) -> tuple[bool, set[str]]:
    """Whether torch.distributed.checkpoint has read a checkpoint into the state dict, and the saves that this
    rank has read. present: the optimizer's, which a partial load leaves in options.
    """
    was_in_file = any(piece.unread is not None for piece in pieces_of(state_dict))
    read = (p.saves for p in pieces_of(state_dict) if p.unread is not None or not was_in_file)
    of_options = getattr(state_dict.get("param_groups"), "save_id", None)
    return was_in_file, set().union(*read, {of_options} - {None, present})


def load_error(failure: Exception) -> Exception:
    """The error of a load as every rank can raise it: one that no rule here has raised is a ValueError."""
    if isinstance(failure, TypeError | ValueError | CollectiveError):
        return failure
    return ValueError(f"state_dict cannot be loaded: {type(failure).__name__}: {failure}")
