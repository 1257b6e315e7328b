"""What a ZeRO optimizer saves and loads: a state dict in torch's form, of pieces in the parameters' shapes.

A state dict that is loaded is matched with the parameters by their names, and checked whole before anything
changes.
"""

import itertools
import math
import numbers
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zerofp4.distributed import CollectiveError, GroupReference
from zerofp4.engine import joined
from zerofp4.optim.initial import initial_values
from zerofp4.optim.inner import InnerClass, InnerOptimizers, options
from zerofp4.optim.moments import COMPACT, FULL, decode_shard, encode_shard, scales_shape
from zerofp4.optim.piece import ONE_PART, About, Home, Piece, gathered
from zerofp4.optim.seal import Saves, SealedTuple, make_id
from zerofp4.optim.soundness import Soundness
from zerofp4.shard import Shard, state_groups
from zerofp4.tensors import QuantizedTensor

# Names and numbers

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Wrapper modules whose names torch.distributed.checkpoint leaves out of a parameter's name."""


class ParameterId(int):
    """The number of a parameter among all of param_groups. str() of it, which torch.distributed.checkpoint
    makes keys from, is the parameter's name.
    """

    name: str | None

    def __new__(cls, number: int, name: str | None):
        made = super().__new__(cls, number)
        made.name = name
        return made

    def __str__(self) -> str:
        if self.name is None:
            raise ValueError(
                f"parameter {int(self)} of the optimizer has no name, and checkpoints are by name: build the "
                "optimizer with model.named_parameters() in place of model.parameters(), or save what "
                "get_state_dict(model, optimizer) of torch.distributed.checkpoint.state_dict returns"
            )
        return self.name

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
    """By trainable parameter of this rank, why no file can have it under its name (None if one can); and by
    parameter group, the names of those in it that this rank lacks and others have.

    announced: the Announcement of each rank. The same parameter is on the ranks that it is sharded over, and
    on those that replicated_over names with theirs; another one of that name would take its place.
    """
    own, by_rank = announced[rank], [{m.name for m in announcement.members} for announcement in announced]
    refusals = []
    for member in (member for member in own.members if member.is_trainable):
        ranks, why = member.ranks, None
        others = [r for r, names in enumerate(by_rank) if member.name in names and r not in ranks]
        if member.name is None and len(ranks) < len(announced):
            why = f"on ranks {list(ranks)} only, and has no name that tells it from what others have"
        elif others and len(member.copies) == 1:
            why = f"one parameter on ranks {list(ranks)} and another on ranks {others}, under one name"
        how = "build the optimizer with names of the whole model, as in [('experts.7.weight', p)]"
        refusals.append(why and f"{member.label} is {why}, and a checkpoint has one of each name: {how}")
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

    kind: "tensor" for one of each matrix or slice that is updated, "scalar" for a tensor of one element, or
        the type of a Python number.
    device: None for that of the masters.
    trial_shape: of a tensor, for a matrix of TRIAL_SHAPE; None if it has the shape of what is updated.
    is_flag: whether it is 0 of a parameter that has no state yet.
    is_exact: whether no other dtype will do: of compact state and planes of masters.
    per_group: whether it has two for each group of compact state, in place of one for each element.
    """

    kind: str | type
    dtype: torch.dtype
    device: torch.device | None = None
    trial_shape: tuple[int, ...] | None = None
    is_flag: bool = False
    is_exact: bool = False
    per_group: bool = False

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what is kept of a slice, of a matrix or of a stack of matrices of this shape."""
        if self.kind != "tensor":
            return ()
        if self.trial_shape is None:
            return tuple(shape)
        sizes = dict(zip(TRIAL_SHAPE, shape[-2:], strict=True))
        return (*shape[:-2], *(sizes.get(size, size) for size in self.trial_shape))


MASTER = Entry("tensor", torch.float32)
MASTERS = {
    "full": {"master": MASTER},
    "compact": {"master": MASTER},
    "compact24": {
        "master_high": Entry("tensor", torch.bfloat16, is_exact=True),
        "master_low": Entry("tensor", torch.uint8, is_exact=True),
    },
}
"""What is saved of masters, by the state of their parameter. As those of compact state, planes have names of
their own: nobody takes one for a master.
"""

ANY_MASTER = MASTERS["full"] | MASTERS["compact24"]
MOMENTS = {name: MASTER for name in FULL if name != "step"}
CODES = {
    name: Entry("tensor", dtype, is_exact=True, per_group=name == "scales")
    for name, dtype in COMPACT.items()
    if name != "step"
}
"""What is saved of moments in full state, and in compact state."""


def make_template(inner: InnerClass, group: dict, device: torch.device) -> dict[str, Entry]:
    """Entries by name, from a trial step with zeros as the gradient of two elements, or a small matrix."""
    trial = torch.zeros(TRIAL_SHAPE if inner.whole else 2, dtype=torch.float32, device=device)
    chosen = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options(group).items()}
    optimizer = inner.optimizer_class([chosen | {"params": [trial]}], **inner.defaults)
    is_lazy = not optimizer.state.get(trial)
    trial.grad = torch.zeros_like(trial)
    # A trial is no step of the run, so torch's global hooks must not see it. To call the function that torch
    # has wrapped is not enough: a class may call the step() of the class that it is based on.
    kept = [(hooks, dict(hooks)) for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        optimizer.step()
    finally:
        for hooks, own in kept:
            hooks.update(own)
    found = optimizer.state.get(trial, {})
    entries = {name: entry_of(name, value, trial) for name, value in found.items() if value is not None}
    if entries and is_lazy:
        flag = "step" if "step" in entries else STARTED
        cpu_scalar = Entry("scalar", torch.float32, torch.device("cpu"))
        entries[flag] = entries.get(flag, cpu_scalar)._replace(is_flag=True)
    return entries


def entry_of(name: str, value: Any, of: torch.Tensor) -> Entry:
    """The entry for a value that an optimizer keeps of a tensor: a slice, 1D, or a matrix."""
    if not isinstance(value, torch.Tensor):
        return Entry(type(value), torch.float64, torch.device("cpu"))
    if value.dim() and value.numel() == of.numel():
        return Entry("tensor", value.dtype, value.device)
    is_count = name == "step" and value.numel() == 1  # the same of all matrices of a stack
    if of.dim() == 1 or is_count:
        return Entry("scalar", value.dtype, value.device)
    return Entry("tensor", value.dtype, value.device, tuple(value.shape))


# What is saved


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
        if entry.per_group:
            groups = state_groups(self.shard, self.shape[-1])
            return scales_shape(self.shape), Shard(2 * groups.start, 2 * groups.numel)
        shape = entry.shape(self.shape)
        if entry.kind == "tensor" and entry.trial_shape is None:
            return shape, self.shard
        is_here = self.shard.numel > 0 or not self.shape.numel()
        return shape, Shard(0, math.prod(shape) if is_here else 0)


class SavedState(Mapping):
    """The masters of an optimizer and the state of its optimizers of masters, as a checkpoint has them.

    It is `state` of the optimizer: by parameter, what state_dict() has of it. Each look makes new pieces of
    the same values.

    param_groups: returns those of the optimizer, as they are now.
    token: of the ids of saves, the same on every rank.
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
        sound: Soundness,
    ):
        self.param_groups, self.shards, self.inners, self._classes = param_groups, shards, inners, classes
        self.sound = sound
        self.token = token
        """Another one after each load."""
        self.steps = 0
        """How many steps the optimizer has taken, skipped ones too."""
        self.device = shards.parameters[0].device
        self.ids: list[list[ParameterId]] = []
        """By parameter group, the numbers of all parameters, frozen ones too."""
        refusals, self._elsewhere = _find_names(announced, rank, len(param_groups()))
        places, count = {}, itertools.count()
        for g, group in enumerate(param_groups()):
            names = [own_name(name) for name in group.get("param_names", ())] or [None] * len(group["params"])
            self.ids.append([ParameterId(next(count), name) for name in names])
            places |= {id(p): (g, number) for p, number in zip(group["params"], self.ids[-1], strict=True)}
        homes: dict[dist.ProcessGroup | None, Home] = {}
        self.parameters: list[SavedParameter] = []
        """The trainable ones, in the order of the shards."""
        for one, shard, refusal in zip(shards.trained, shards.shards, refusals, strict=True):
            g, number = places[id(one.parameter)]
            group = one.sharding.group
            home = homes.setdefault(group, Home(GroupReference(group), self.device))
            label, shape = number.name or one.name, one.parameter.shape
            saved = SavedParameter(number, label, g, shape, shard, home, refusal)
            self.parameters.append(saved)
        self.indices = {id(p): i for i, p in enumerate(shards.parameters)}
        """By the identity of a trainable parameter, its position among these."""
        self._templates: dict[Hashable, dict[str, Entry]] = {}

    @property
    def save_id(self) -> str:
        """The id of what is saved now."""
        return make_id(self.token, self.steps)

    def template(self, i: int) -> dict[str, Entry]:
        """What is kept of trainable parameter i, by the present options of its group."""
        g = self.parameters[i].group
        group = self.param_groups()[g]
        # With equal ones the same state is kept: of a float it matters whether it is 0, of a tensor nothing.
        kinds = [
            (name, value == 0 if isinstance(value, float) else torch.is_tensor(value) or repr(value))
            for name, value in options(group).items()
        ]
        key = g, *kinds
        if key not in self._templates:
            self._templates[key] = make_template(self._classes[g], group, self.device)
        template = self._templates[key]
        return template if self.shards.trained[i].state == "full" else _with_moments(template, CODES)

    def piece(self, i: int, name: str, values: torch.Tensor | None, entry: Entry = MASTER) -> Piece:
        """A piece of trainable parameter i. values: 1D, of this rank; None for zeros without memory."""
        saved = self.parameters[i]
        shape, shard = saved.extent(entry)
        if values is None:
            zero = torch.zeros(min(1, shard.numel), dtype=entry.dtype, device=entry.device or self.device)
            values = zero.expand(shard.numel)
        label = None if saved.number.name is None else f"{saved.number.name}.{name}"
        about = About(label, saved.home, saved.refusal, self.sound.obstacle)
        return Piece(values, shape, shard.start, about, {self.save_id: label or "a tensor"})

    def master(self, parameter: torch.Tensor) -> Piece | None:
        """A piece of the float32 master; None without one. One of 24 bits is converted in each call."""
        i = self.indices.get(id(parameter))
        if i is None:
            return None
        return self.piece(i, "master", joined(self.shards.masters[i], self.shards.lows[i]))

    def entries(self, i: int) -> dict[str, Piece]:
        """What is saved of trainable parameter i: pieces of its master, and of its state by the names of the
        inner optimizer, so that every rank has the same names: before the first update it is zeros. State of
        several matrices is a copy, one behind the other.
        """
        template, masters = self.template(i), self.shards.optimized[i]
        states = [self.inners.state_of(master) for master in masters]
        entries, found = dict(template), {}
        for name, value in states[0].items() if states else ():
            if value is None:
                continue
            entry = entries.setdefault(name, entry_of(name, value, masters[0]))
            if entry.kind == "tensor" and len(states) > 1:
                value = torch.cat([state[name].reshape(-1) for state in states])
            found[name] = torch.as_tensor(value, dtype=entry.dtype, device=entry.device).reshape(-1)
        if STARTED in entries and found:
            found[STARTED] = torch.ones(1, dtype=torch.float32)
        planes = self.shards.masters[i], self.shards.lows[i]
        named = zip(MASTERS[self.shards.trained[i].state].items(), planes, strict=False)  # one or both
        pieces = {name: self.piece(i, name, plane, entry) for (name, entry), plane in named}
        return pieces | {name: self.piece(i, name, found.get(name), entry) for name, entry in entries.items()}

    def groups(self) -> SealedTuple:
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
        return SealedTuple(groups, self.save_id)

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


def _with_moments(template: Mapping[str, Entry], moments: Mapping[str, Entry]) -> dict[str, Entry]:
    """The entries of AdamW, with moments of full or of compact state."""
    others = {name: entry for name, entry in template.items() if name not in MOMENTS and name not in CODES}
    return others | dict(moments)


# Loading

HOW = ("foreach", "fused", "capturable", "differentiable", "state")
"""Options that say how an optimizer computes and keeps its state: those of the optimizer that loads stay."""

OTHER_ELEMENTS = "saved by a rank with other elements"


def read_state_dict(
    saved: SavedState, state_dict: Mapping, written: Sequence[int], moved: str | None
) -> tuple[list[torch.Tensor | None], Saves]:
    """Check a state dict, and give the optimizers of the masters their part as new objects, so that the old
    ones can come back.

    written: trainable parameters that somebody wrote to. Their masters follow them where none is saved, or
        the saved one is their own memory.
    moved: what has moved, so that every master must be there.

    Returns this rank's range of each master, 1D, None if it stays; and the saves that this rank has read.
    Raises ValueError, with the names of all that does not fit.
    """
    matched, was_in_file = _match(state_dict, saved.ids), was_read(state_dict)
    homes = {None, *(own.home for own in saved.parameters)}
    # Another optimizer may lack what is new here.
    may_lack = bool(matched) and any(piece.about.home not in homes for piece in pieces_of(state_dict))
    masters, states, problems = [], {}, {}
    for i, own in enumerate(saved.parameters):
        master, state, template = None, {}, saved.template(i)
        if own.number in matched:
            _, entries = matched[own.number]
            master, state = _read_parameter(own, template, entries, was_in_file, problems)
        elif not may_lack:
            problems.setdefault("missing", []).append(own.label)
        masters.append(master)
        states |= _split(state, template, saved.shards.optimized[i])
    if problems:
        parts = [
            f"{kind}: {', '.join(names[:10])}{', ...' * (len(names) > 10)}"
            for kind, names in problems.items()
        ]
        how = f". {ONE_PART}" if OTHER_ELEMENTS in problems else ""
        raise ValueError(f"state_dict does not fit: {'; '.join(parts)}{how}")
    groups = []
    for group, own in zip(saved.param_groups(), saved.ids, strict=True):
        sources = sorted({matched[number][0] for number in own if number in matched})
        groups.append(group | _find_options(group, [state_dict["param_groups"][g] for g in sources]))
    saved.inners.load(groups, states, saved.device)
    for i in written:
        own, p = saved.parameters[i], saved.shards.parameters[i]
        if masters[i] is None or any(_lies_in(value, p) for value in matched[own.number][1].values()):
            masters[i] = initial_values(p)[own.shard.start : own.shard.end]
    pairs = zip(saved.parameters, masters, strict=True)
    stay = [own.label for own, master in pairs if own.shard.numel and master is None]
    obstacle = saved.sound.obstacle or moved
    if obstacle is not None and stay:
        raise ValueError(f"state_dict has no master of {', '.join(stay)}, and {obstacle}")
    if was_in_file and type(state_dict["param_groups"]) is tuple:
        # torch has read none, which a planner lets pass, and has copied those of this optimizer.
        warnings.warn(
            "the checkpoint has no param_groups that ZeroFP4Optimizer wrote: lr and other options stay as "
            "they are here. What get_state_dict() of torch.distributed.checkpoint.state_dict returned is "
            "loaded into what get_optimizer_state_dict(model, optimizer) returns, options too",
            stacklevel=3,
        )
    return masters, find_saves(state_dict, saved.save_id)


def _lies_in(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a value of a state dict is memory of a parameter, as in state_dict() of its own optimizer."""
    if not isinstance(value, Piece) or isinstance(parameter, QuantizedTensor):
        return False
    return 0 <= value.present().data_ptr() - parameter.data_ptr() < parameter.nbytes


def _match(
    state_dict: Mapping, ids: Sequence[Sequence[ParameterId]]
) -> dict[ParameterId, tuple[int, Mapping]]:
    """By parameter, its saved group and entries: by name if both sides have names, else by position."""
    state = {_name(key) or key: entries for key, entries in state_dict["state"].items()}
    groups = state_dict["param_groups"]
    names = [[_name(n) for n in group.get("param_names") or group["params"]] for group in groups]
    if groups and None not in itertools.chain(*names, *([number.name for number in own] for own in ids)):
        found = {}
        for g, group in enumerate(groups):
            # What was read into state_dict() has this optimizer's numbers in `state`, and not the groups'.
            for name, key in zip(names[g], group["params"], strict=True):
                found[name] = g, state.get(name, state.get(key, {}))
            found |= {name: (g, state[name]) for name in group.get("elsewhere", ()) if name in state}
        return {number: found[number.name] for own in ids for number in own if number.name in found}
    counts = [[len(own) for own in side] for side in (names, ids)]
    if counts[0] != counts[1]:
        raise ValueError(
            f"state_dict: param_groups have {counts[0]} parameters, and these {counts[1]}; other groups are "
            "loaded where both optimizers were built with named_parameters()"
        )
    return {
        number: (g, state.get(_name(key) or key, {}))
        for g, group in enumerate(groups)
        for number, key in zip(ids[g], group["params"], strict=True)
    }


def _name(key: Any) -> str | None:
    """The name of a parameter by which a state dict has its entries; None of a number."""
    name = getattr(key, "name", key)
    return own_name(name) if isinstance(name, str) else None


# One parameter


class Misfit(ValueError):
    """A value of a state dict that does not fit. kind: what is said of all such values in one list."""

    def __init__(self, kind: str, what: str):
        super().__init__(f"state_dict does not fit: {kind}: {what}")
        self.kind, self.what = kind, what


def _read_parameter(
    saved: SavedParameter,
    template: Mapping[str, Entry],
    entries: Mapping[str, Any],
    was_in_file: bool,
    problems: dict[str, list[str]],
) -> tuple[torch.Tensor | None, dict[str, Any]]:
    """This rank's part of what a state dict has of a parameter: the float32 master, None if it has none, and
    the state for the optimizer of the masters, empty if there is none yet. Either is converted where this
    optimizer keeps another kind. problems: takes what does not fit.
    """
    given, found = {name: value for name, value in entries.items() if value is not None}, {}
    if was_in_file:  # what was not read is what the optimizer had
        given = {k: v for k, v in given.items() if not isinstance(v, Piece) or v.loaded is not None}
    is_updated = was_in_file or given.keys() - ANY_MASTER.keys()
    own, theirs = (CODES, MOMENTS) if CODES.keys() <= template.keys() else (MOMENTS, CODES)
    is_converted = own.keys() <= template.keys() and theirs.keys() <= given.keys()
    if is_converted:
        template = _with_moments(template, theirs)
    masters = MASTERS["compact24" if "master_high" in given or "master_low" in given else "full"]
    if not given.keys().isdisjoint(ANY_MASTER):
        given |= {name: None for name in masters if name not in given}
    for name in dict.fromkeys([*given, *(template if is_updated else ())]):
        if name == STARTED and name not in given:
            continue
        try:
            entry = ANY_MASTER.get(name) or template.get(name)
            found[name] = read_value(saved, name, given.get(name), entry)
        except Misfit as misfit:
            problems.setdefault(misfit.kind, []).append(misfit.what)
    has_state = all(found.get(name, True) for name, entry in template.items() if entry.is_flag)
    planes, _ = [found.pop(name, None) for name in masters], found.pop(STARTED, None)
    master = planes[0] if len(planes) == 1 or None in planes else joined(*planes)
    if not (saved.shard.numel and has_state):
        return master, {}
    if is_converted and theirs.keys() <= found.keys():
        found |= _converted({name: found.pop(name) for name in theirs}, saved)
    return master, found


def _converted(moments: Mapping[str, torch.Tensor], saved: SavedParameter) -> dict[str, torch.Tensor]:
    """This rank's part of moments in full state as compact state, or the other way round."""
    cols = saved.shape[-1]
    if moments.keys() == MOMENTS.keys():
        return encode_shard(**{name: value.float() for name, value in moments.items()}, cols=cols)
    return decode_shard(**moments, start=saved.shard.start, cols=cols)


def read_value(saved: SavedParameter, name: str, value: Any, entry: Entry | None) -> Any:
    """This rank's part of an entry: 1D of a tensor, [] or a Python number of a scalar; None of a scalar that
    other ranks have. entry: what it must be; None if a first step does not make it.

    Raises Misfit. Collective for a DTensor, and for what another optimizer of these ranks has.
    """
    what = f"{saved.label}.{name}"
    if value is None:
        raise Misfit("missing", what)
    if entry is None:
        is_scalar = not torch.is_tensor(value) or (value.dim() == 0 and saved.shape != ())
        entry = Entry("scalar" if is_scalar else "tensor", torch.float32)
    (shape, shard), is_tensor = saved.extent(entry), entry.kind == "tensor"
    if isinstance(value, numbers.Number):
        value = torch.tensor(value, dtype=entry.dtype)
    elif not isinstance(value, Piece) and isinstance(value, DTensor):
        value = value.full_tensor()
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    is_dense = isinstance(value, Piece) or (is_plain and value.layout == torch.strided and not value.is_meta)
    if is_dense and entry.is_exact and value.dtype != entry.dtype:
        raise Misfit(f"no tensor of {entry.dtype}", f"{what} ({value.dtype})")
    is_number = entry.is_exact or value.dtype.is_floating_point if is_dense else False
    if not is_dense or not (is_number if is_tensor else value.numel() == 1):
        kind = "no dense tensor of floating dtype" if is_tensor else "no scalar"
        raise Misfit(kind, f"{what} ({type(value).__name__})")
    if is_tensor and tuple(value.shape) != shape:
        raise Misfit("other shapes", f"{what} ({tuple(value.shape)}, here {shape})")
    home = value.about.home if isinstance(value, Piece) else None
    if home not in (None, saved.home) and home.group.is_alive():  # of another optimizer
        value = gathered(value)
    if not isinstance(value, Piece):
        own = value.detach().reshape(-1)[shard.start : shard.end].clone()
    elif value.unread:
        raise Misfit("not whole in the checkpoint", what)
    elif value.shard == shard:
        own = value.present()
    elif value.is_whole:  # a file that a world of one wrote
        own = value.present()[shard.start : shard.end].clone()
    else:
        raise Misfit(OTHER_ELEMENTS, f"{what} ({value.start}..{value.shard.end - 1})")
    if is_tensor or not own.numel():
        return own if is_tensor else None
    number, is_count = own.item(), name in ("step", STARTED)
    if not math.isfinite(number) or (is_count and (number < 0 or number % 1)):
        # The next update would put it into the masters.
        raise Misfit("no whole number, 0 or more" if is_count else "not finite", f"{what} ({number})")
    return own.view(()) if entry.kind == "scalar" else entry.kind(number)


def _split(
    state: Mapping[str, Any], template: Mapping[str, Entry], optimized: Sequence[torch.Tensor]
) -> dict[int, dict[str, Any]]:
    """By id, the state of the parts of a parameter that are updated: its slice, or the matrices in it."""
    states: dict[int, dict[str, Any]] = {id(part): {} for part in optimized}
    for name, value in state.items() if optimized else ():
        entry = template.get(name, MASTER)
        if entry.per_group:  # of one slice
            parts = [value.view(-1, 2)]
        elif torch.is_tensor(value) and value.dim():
            parts = value.view(-1, *entry.shape(optimized[0].shape))
        else:
            parts = [value.clone() if torch.is_tensor(value) else value for _ in optimized]
        for own, part in zip(states.values(), parts, strict=True):
            own[name] = part
    return states


# Options


def _find_options(group: Mapping, sources: Sequence[Mapping]) -> dict[str, Any]:
    """The new options of a parameter group: those that all saved groups of its members agree on."""
    new = {}
    for key, value in options(group).items():
        found = [source[key] for source in sources if key in source]
        if key not in HOW and found and all(bool(found[0] == other) for other in found[1:]):
            new[key] = _option_like(value, found[0])
    if sources and "initial_lr" in sources[0].keys() - group.keys():  # of a scheduler
        new["initial_lr"] = sources[0]["initial_lr"]
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


def was_read(state_dict: Mapping) -> bool:
    """Whether torch.distributed.checkpoint has read a checkpoint into the pieces of a state dict."""
    return any(piece.loaded is not None for piece in pieces_of(state_dict))


def find_saves(state_dict: Mapping, present: str | None = None) -> Saves:
    """The saves that this rank has read. present: the optimizer's, which a partial load leaves in options."""
    was_in_file, saves = was_read(state_dict), {}
    for piece in pieces_of(state_dict):
        if piece.loaded is not None or not was_in_file:
            saves = piece.saves | saves
    save_id = getattr(state_dict.get("param_groups"), "save_id", None)
    if saves.keys() - {None} and save_id not in (None, present):  # tools drop the seals of tensors alone
        saves |= {save_id: "param_groups"}
    return saves


def load_error(failure: Exception) -> Exception:
    """The error of a load as every rank can raise it: one that no rule here has raised is a ValueError."""
    if isinstance(failure, TypeError | ValueError | CollectiveError):
        return failure
    return ValueError(f"state_dict cannot be loaded: {type(failure).__name__}: {failure}")
