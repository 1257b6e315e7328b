"""State dicts of a ZeRO optimizer, in torch's form: pieces in the parameters' shapes.

A load matches a state dict with the parameters by name, and checks all of it before anything changes.
"""

import collections
import copy
import itertools
import math
import numbers
import secrets
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from zerofp4.distributed import GroupReference, OwnError, exchange
from zerofp4.engine import joined
from zerofp4.optim.inner import InnerClass, InnerOptimizers, are_unchanged, on_trial, options
from zerofp4.optim.moments import COMPACT, FULL, decode, encode, scales_shape
from zerofp4.optim.piece import ONE_PART, About, Piece, SavedOptions, the_one
from zerofp4.shard import Shard, state_groups

# Names and numbers

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Wrapper modules that torch.distributed.checkpoint leaves out of a parameter's name."""


class ParameterId(int):
    """The number of a parameter among all of param_groups. Its str(), from which torch.distributed.checkpoint
    makes keys, is the parameter's name, or the number if it has none.
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


def _find_refusal(member: Any, names: Sequence[set[str | None]]) -> str | None:
    """Why no file can have a parameter of this rank under its name; None if one can.

    member: from this rank's Announcement. It is on the ranks that shard it and those that its replicated_over
        names. Elsewhere a parameter of its name is another one, and would replace it.
    names: of the parameters of each rank.
    """
    others = [r for r, own in enumerate(names) if member.name in own and r not in member.ranks]
    if not others or len(member.copies) > 1:
        return None
    return (
        f"{member.label} is one parameter on ranks {list(member.ranks)}, another on ranks {others}, and a "
        "checkpoint has one of each name: build the optimizer with names of the whole model, as in "
        "[('experts.7.weight', p)]"
    )


# The entries that an optimizer keeps of a parameter, found before it has kept any

STARTED = "started"
"""The entry that is 1 once a parameter has state, else 0, if its optimizer counts no steps."""

TRIAL_SHAPE = (5, 7)
"""The shape of a trial's matrix. Its sizes differ, so that the state's sizes can be told apart."""


class Entry(NamedTuple):
    """An entry of the state of a parameter.

    kind: "elements": one for each element of the shard or matrix. "groups": two for each group of compact
        state. "matrices": a tensor of another shape for each matrix. "scalar": a tensor of one element. The
        type of a Python number.
    """

    dtype: torch.dtype
    kind: str | type = "elements"
    device: torch.device | None = None  # None for the device of the masters
    trial_shape: tuple[int, ...] = ()  # of "matrices", for a matrix of TRIAL_SHAPE
    is_flag: bool = False  # whether it is 0 until the parameter has state

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the entry for a parameter or a matrix of this shape."""
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
"""The entries of a master of 24 bits. Their names differ, so that a plane is never taken for a master."""

MASTERS = {"master", *PLANES}
MOMENTS, CODES = (
    {k: Entry(dtype, "groups" if k == "scales" else "elements") for k, dtype in kept.items() if k != "step"}
    for kept in (FULL, COMPACT)
)
KNOWN = {"master": MASTER} | PLANES | MOMENTS | CODES

State = dict[Any, dict[str, Any]]
"""`state` of a state dict: by number, the entries of a parameter, by name."""


def make_template(inner: InnerClass, group: dict, device: torch.device) -> dict[str, Entry]:
    """Entries by name, from a trial step with zeros as the gradient of two elements, or of a small matrix."""
    trial = torch.zeros(TRIAL_SHAPE if inner.whole else 2, dtype=torch.float32, device=device)
    optimizer = inner.optimizer_class([options(group) | {"params": [trial]}], **inner.defaults)
    is_lazy = not optimizer.state.get(trial)
    trial.grad = torch.zeros_like(trial)
    with on_trial(device):
        optimizer.step()
    found = optimizer.state.get(trial, {})
    entries = {name: entry_of(name, value, trial) for name, value in found.items() if value is not None}
    if entries and is_lazy:
        flag = "step" if "step" in entries else STARTED
        cpu_scalar = Entry(torch.float32, "scalar", torch.device("cpu"))
        entries[flag] = entries.get(flag, cpu_scalar)._replace(is_flag=True)
    return entries


def entry_of(name: str, value: Any, of: torch.Tensor) -> Entry:
    """The entry for a value that an optimizer keeps of a tensor: a 1D slice, or a matrix."""
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
    """A trainable parameter in checkpoints."""

    number: ParameterId  # in state dicts; it has the name
    label: str  # its name in messages
    group: int  # the number of its group
    shape: torch.Size
    shard: Shard  # of this rank
    ranks: GroupReference  # among which it is sharded
    refusal: str | None  # as in About

    def extent(self, entry: Entry) -> tuple[tuple[int, ...], Shard]:
        """The shape of an entry, and this rank's shard of it. "scalar" and "matrices" are whole on the ranks
        that own elements of the parameter, or on all if it has none.
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
        """This rank's part of an entry of a state dict, 1D, in the dtype of the entry. ValueError if it does
        not fit. Collective for a DTensor, and for a piece of another optimizer.
        """
        (shape, shard), what = self.extent(entry), f"state_dict does not fit: {self.label}.{name}"
        if isinstance(value, numbers.Number):
            value = torch.tensor(value, dtype=entry.dtype, device="cpu")
        ranks = value.about.ranks if isinstance(value, Piece) else None
        is_elsewhere = ranks not in (None, self.ranks) and ranks.is_alive()
        if is_elsewhere or isinstance(value, DTensor):
            value = value.full_tensor()
        if math.prod(shape) != value.numel() or (shape and shape != tuple(value.shape)):
            raise ValueError(f"{what} has shape {tuple(value.shape)}, here {shape}")
        if isinstance(value, Piece):
            if value.unread:
                raise ValueError(f"{what} is not whole in the checkpoint")
            if value.shard == shard:
                # A state dict in memory may be loaded again, so steps must not write to its state.
                is_kept = value.unread is None and name not in MASTERS
                return value.values.to(entry.dtype, copy=is_kept)
            if not value.is_whole:  # as in a file that a world of one wrote
                raise ValueError(f"{what} has the elements of another rank. {ONE_PART}")
            value = value.values
        return value.detach().reshape(-1)[shard.start : shard.end].to(entry.dtype, copy=True)

    def check_complete(self, names: Iterable[str], found: Mapping[str, Any]) -> None:
        """Raise ValueError for the first of these entries that a state dict lacks."""
        for name in names:
            if name not in found:
                raise ValueError(f"state_dict does not fit: {self.label}.{name} is missing")


# Saving


class SavedState(Mapping):
    """`state` of an optimizer: by parameter, its entries in state_dict(), which are its master and the state
    of its optimizer of masters. Each access makes new pieces of the same values.

    token: of the ids of saves, the same on every rank; a new one after each load.
    """

    def __init__(
        self,
        shards: Any,
        inners: InnerOptimizers,
        announced: Sequence[Any],
        rank: int,
        token: str,
        steps: Callable[[], int],
    ):
        self.shards, self.inners, self.token = shards, inners, token
        self._count_steps = steps
        self.consolidated: State | None = None
        """`state` of the next state_dict(), gathered on this rank by consolidate_state_dict()."""
        self.device = shards.parameters[0].device
        # By parameter group, the numbers of all parameters, frozen ones too:
        self.ids: list[list[ParameterId]] = [[] for _ in inners.classes]
        self.parameters: list[SavedParameter] = []  # the trainable parameters, in the order of the shards
        # By parameter group, the names that only other ranks have:
        self._elsewhere: list[dict[str, None]] = [{} for _ in inners.classes]
        names = [{member.name for member in one.members} for one in announced]
        ranks = shards.by_parameter(lambda bucket: [bucket.group] * len(bucket.indices))
        trained = zip(shards.parameters, shards.shards, ranks, strict=True)
        for n, member in enumerate(announced[rank].members):
            number, g = ParameterId(n, member.name), member.group
            self.ids[g].append(number)
            if member.is_trainable:
                (parameter, *held), refusal = next(trained), _find_refusal(member, names)
                label, shape = member.name or member.label, parameter.shape
                self.parameters.append(SavedParameter(number, label, g, shape, *held, refusal))
        for member in itertools.chain.from_iterable(one.members for one in announced):
            if member.name is not None and member.name not in names[rank]:
                self._elsewhere[member.group][member.name] = None
        self.indices = {id(p): i for i, p in enumerate(shards.parameters)}
        """By id() of a trainable parameter, its position among these."""
        self._templates: dict[int, tuple[dict, dict[str, Entry]]] = {}
        """By parameter group, a copy of the group, and the template that was made for it."""

    @property
    def save_id(self) -> str:
        """The id of a save now: the token and the steps. Its width is fixed, so that chunks of two saves lie
        at the same bytes of a file, and a mixture can be read.
        """
        return f"{self.token}-{self._count_steps():012d}"

    def template(self, i: int) -> dict[str, Entry]:
        """The entries of trainable parameter i, by the present options of its group."""
        g = self.parameters[i].group
        group = self.inners.param_groups[g]
        if g not in self._templates or not are_unchanged([group], [self._templates[g][0]]):
            try:
                self._templates[g] = dict(group), make_template(self.inners.classes[g], group, self.device)
            except ValueError:  # for options with which no step was taken, so the last template is right
                if g not in self._templates:
                    raise
        template = self._templates[g][1]
        if self.shards.trained[i].state != "full":
            template = {name: entry for name, entry in template.items() if name not in MOMENTS} | CODES
        if i in self.shards.offloaded:
            template = {name: e._replace(device=torch.device("cpu")) for name, e in template.items()}
        return template

    def piece(self, i: int, values: torch.Tensor | None, entry: Entry = MASTER) -> Piece:
        """A piece of trainable parameter i. values: 1D, of this rank; None for zeros without memory."""
        saved = self.parameters[i]
        shape, shard = saved.extent(entry)
        if values is None:
            zero = torch.zeros(min(1, shard.numel), dtype=entry.dtype, device=entry.device or self.device)
            values = zero.expand(shard.numel)
        about = About(saved.ranks, self.device, saved.refusal, self.shards.obstacle)
        return Piece(values, shape, shard.start, about, {self.save_id})

    def check_continued(self, trained: Sequence[Any]) -> None:
        """Raise ValueError unless a later optimizer of these parameters (Trained) can take over the masters
        of those that are also here: one at least.
        """
        if self.shards.obstacle is not None:
            raise ValueError(f"masters_from cannot hand over its masters: {self.shards.obstacle}")
        taken = [one for one in trained if one.parameter in self]
        if not taken:
            raise ValueError("masters_from has the master of none of the trainable parameters of params")
        written = self.shards.versions.written()
        for one in taken:
            i = self.indices[id(one.parameter)]
            if not self.parameters[i].ranks.refers_to(one.sharding.group):
                raise ValueError(f"{one.name} is sharded over another process group than in masters_from")
            if i in written:
                raise ValueError(
                    f"{one.name} was written to since the last step of masters_from, whose master would undo "
                    "that"
                )

    def master(self, parameter: torch.Tensor, follows_writes: bool = False) -> Piece | None:
        """A piece of the float32 master; None without one. follows_writes: by saved_planes()."""
        i = self.indices.get(id(parameter))
        if i is None:
            return None
        planes = self.shards.saved_planes(i) if follows_writes else self.shards.planes[i]
        return self.piece(i, joined(*planes))

    def entries(self, i: int) -> dict[str, Piece]:
        """The entries of trainable parameter i: pieces of its master and state. The state is zeros before the
        first update, so that every rank has the same names, and a copy if there are several matrices.
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
        kept = PLANES if self.shards.trained[i].state == "compact24" else {"master": MASTER}
        found |= zip(kept, self.shards.saved_planes(i), strict=False)  # one or both
        return {name: self.piece(i, found.get(name), entry) for name, entry in (kept | entries).items()}

    def groups(self) -> SavedOptions:
        """`param_groups` of a state dict: options and numbers of parameters. torch.distributed.checkpoint
        writes a tuple as one value, so that other groups than the saved ones can load it. One rank writes the
        value for all, so `elsewhere` has the names that only other ranks have.
        """
        groups = []
        for group, own, elsewhere in zip(self.inners.param_groups, self.ids, self._elsewhere, strict=True):
            saved = {k: v.detach().cpu() if torch.is_tensor(v) else v for k, v in options(group).items()}
            if not own or own[0].name is not None:
                saved["param_names"] = [number.name for number in own]
            if elsewhere:
                saved["elsewhere"] = list(elsewhere)
            groups.append(saved | {"params": list(own)})
        return SavedOptions(groups, self.save_id)

    def consolidate(self, state: State, keeps: bool) -> None:
        """Gather the whole state, own_state() with_entries_of_all_ranks(), for the next state_dict() if this
        rank keeps it. Collective.
        """
        whole: State = {number: {} for number in state}
        for number, pieces in state.items():
            for name, piece in pieces.items():
                tensor = piece.full_tensor()
                if keeps:
                    whole[number][name] = tensor.cpu()
        self.consolidated = whole if keeps else None

    def own_state(self) -> State:
        return {saved.number: self.entries(i) for i, saved in enumerate(self.parameters)}

    def state_dict(self) -> dict[str, Any]:
        state, self.consolidated = self.consolidated, None
        if state is None:
            state = self.own_state()
        return {"state": state, "param_groups": self.groups(), "steps": self._count_steps()}

    def load(
        self, state_dict: Mapping, error: OwnError, written: Sequence[int], obstacle: str | None, group: Any
    ) -> tuple[list[torch.Tensor | None], int]:
        """read_state_dict() on all ranks, of one save. Collective. Raises load_error() of any rank.

        error: of this rank. Returns the masters, and the number of steps that were taken before the save.
        """
        state, here = {}, {own.ranks for own in self.parameters}
        with error:
            state = dict(state_dict["state"])
        failure = OwnError(load_error(error.take()))
        state = with_entries_of_all_ranks(state, failure, group, here)
        masters, saves, steps = [], set(), 0
        with error:
            state_dict = {**state_dict, "state": state}
            masters, saves = read_state_dict(self, state_dict, written, obstacle)
            steps = int(state_dict.get("steps", 0))
        save_id, self.token = agree_on_save(saves, error, group, "load_state_dict()")
        self.consolidated = None
        return masters, steps if save_id is None else int(save_id.partition("-")[2])

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
"""Options that say how an optimizer computes and keeps its state. A load leaves them as they are."""


def read_state_dict(
    saved: SavedState, state_dict: Mapping, written: Sequence[int], obstacle: str | None
) -> tuple[list[torch.Tensor | None], set[str]]:
    """Check a state dict, and load options and state into the optimizers of the masters, as new objects, so
    that the old ones can come back.

    written: trainable parameters that were written to. Their masters follow them unless the state dict has
        masters.
    obstacle: why every master must be loaded; None if masters may stay.

    Returns this rank's shard of each master, 1D, None if it stays; and the saves that this rank has read.
    Raises ValueError for a state dict that does not fit.
    """
    matched = match(state_dict, saved.ids)
    was_in_file, saves = find_saves(state_dict, saved.save_id)
    ranks = {None, *(own.ranks for own in saved.parameters)}
    is_of_another = any(piece.about.ranks not in ranks for piece in pieces_of(state_dict))
    may_lack = matched and is_of_another and not was_in_file  # parameters that only this optimizer has

    def is_given(value: Any) -> bool:  # else torch has not read it, and it is this optimizer's own
        is_own = was_in_file and isinstance(value, Piece) and value.unread is None
        return value is not None and not is_own

    given = {number: {k: v for k, v in own.items() if is_given(v)} for number, (_, own) in matched.items()}
    has_masters = any(not MASTERS.isdisjoint(entries) for entries in given.values())  # else from torch.optim
    masters, states, error = [], {}, OwnError()
    for i, own in enumerate(saved.parameters):
        master, entries = None, given.get(own.number)
        with error:  # the other ranks may gather the next parameter
            if entries is None and not may_lack:
                raise ValueError(f"state_dict does not fit: {own.label} is missing")
            master, state = _read_parameter(saved, i, entries or {}, was_in_file, i in written)
            states |= state
            if master is None and has_masters and (entries or not may_lack):
                own.check_complete(["master"], ())  # it would be trained beside parameters of another model
            if master is None and i in written:
                master = joined(*saved.shards.written_planes(i))
            if master is None and own.shard.numel and obstacle is not None:
                raise ValueError(f"state_dict has no master of {own.label}, and {obstacle}")
        masters.append(master)
    error.raise_if_any()
    groups = []
    for group, own in zip(saved.inners.param_groups, saved.ids, strict=True):
        sources = sorted({matched[number][0] for number in own if number in matched})
        groups.append(group | _find_options(group, [state_dict["param_groups"][g] for g in sources]))
    saved.inners.load(groups, states, saved.device)
    if was_in_file and type(state_dict["param_groups"]) is tuple:  # a planner let torch read none
        warnings.warn(
            "the checkpoint has no param_groups of a ZeroFP4Optimizer: lr and other options stay as they are "
            "here. What get_optimizer_state_dict(model, optimizer) returns loads options, too",
            stacklevel=3,
        )
    return masters, saves


def match(
    state_dict: Mapping, ids: Sequence[Sequence[ParameterId]]
) -> dict[ParameterId, tuple[int, Mapping]]:
    """By parameter, its saved group and entries: by name if both sides have names, else by position."""
    state = {_name(key) or key: entries for key, entries in state_dict["state"].items()}
    groups, own = state_dict["param_groups"], list(itertools.chain(*ids))
    names: list[str | None] = []
    found: list[tuple[int, Mapping]] = []
    for g, group in enumerate(groups):
        here = [_name(key) for key in group.get("param_names") or group["params"]]
        # After a read into state_dict(), `state` has this optimizer's numbers, and the groups the saved ones.
        pairs = zip(here, group["params"], strict=True)
        found += [(g, state.get(name, state.get(key, {}))) for name, key in pairs]
        names += here
    is_by_name = groups and None not in (*names, *(number.name for number in own))
    for name, count in collections.Counter(names).items():
        if count > 1 and name is not None and (is_by_name or name in state):
            raise ValueError(f"state_dict: {count} parameters are called {name!r}, so none can be matched")
    if is_by_name:
        elsewhere = [(name, g) for g, group in enumerate(groups) for name in group.get("elsewhere", ())]
        by_name = dict(zip(names, found, strict=True))
        by_name |= {name: (g, state[name]) for name, g in elsewhere if name in state}
        return {number: by_name[number.name] for number in own if number.name in by_name}
    counts = [len(group["params"]) for group in groups], list(map(len, ids))
    if counts[0] != counts[1]:
        raise ValueError(
            f"state_dict: param_groups have {counts[0]} parameters, and these {counts[1]}; other groups are "
            "loaded where both optimizers were built with named_parameters()"
        )
    return dict(zip(own, found, strict=True))


def _name(key: Any) -> str | None:
    """The name under which a state dict has the entries of a parameter; None for a number."""
    name = getattr(key, "name", key)
    return own_name(name) if isinstance(name, str) else None


def _read_parameter(
    saved: SavedState, i: int, entries: Mapping[str, Any], was_in_file: bool, is_written: bool
) -> tuple[torch.Tensor | None, dict[int, dict[str, Any]]]:
    """This rank's part of the entries of a parameter, in the kinds that this optimizer keeps: the float32
    master or None; and by id() of the tensors that optimizers update, their state, if there is any.
    """
    own, template, found, error = saved.parameters[i], saved.template(i), {}, OwnError()
    known = KNOWN | template
    for name, value in entries.items():
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
    if not found.keys().isdisjoint(PLANES):
        own.check_complete(PLANES, found)
        master = joined(*map(found.pop, PLANES))
    kept, given = saved.shards.planes[i], entries.get("master", entries.get("master_high"))
    is_of_now = isinstance(given, Piece) and given.about.ranks is not None and given.unread is None
    if is_written and is_of_now and given.saves == {saved.save_id} and kept[0] is not None:
        # The entry has the weight's values, but the master stays. accelerate loads a state dict that was
        # never saved, after DDP has written to all weights.
        master = joined(*kept)
    parts = saved.shards.optimized[i]
    if not parts or not (found or was_in_file):  # of other ranks, or never updated
        return master, {}
    if CODES.keys() <= template.keys() and MOMENTS.keys() <= found.keys():
        found |= encode(*map(found.pop, MOMENTS), own.shape[-1])
    elif MOMENTS.keys() <= template.keys() and CODES.keys() <= found.keys():
        found |= decode(*map(found.pop, CODES), own.shard.start, own.shape[-1])
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


def _find_options(group: Mapping, sources: Sequence[Mapping]) -> dict[str, Any]:
    """The new options of a parameter group: those on which all saved groups of its members agree, also
    options that it lacks, which a scheduler has kept there.
    """
    new = {}
    for key in dict.fromkeys(key for source in sources for key in options(source)):
        found = [source[key] for source in sources if key in source]
        is_option = key not in (*HOW, "elsewhere")
        if is_option and all(bool(found[0] == other) for other in found[1:]):
            new[key] = _option_like(group[key], found[0]) if key in group else copy.deepcopy(found[0])
    return new


def _option_like(present: Any, value: Any) -> Any:
    """The saved value of an option, in the type that the option has here."""
    if isinstance(present, torch.Tensor):
        return torch.as_tensor(value, dtype=present.dtype, device=present.device).view(present.shape).clone()
    if isinstance(present, list | tuple) and isinstance(value, list | tuple) and len(present) == len(value):
        return type(present)(_option_like(p, v) for p, v in zip(present, value, strict=True))
    return value.item() if isinstance(value, torch.Tensor) else value


def pieces_of(state_dict: Mapping) -> Iterator[Piece]:
    for entries in state_dict["state"].values():
        yield from (value for value in entries.values() if isinstance(value, Piece))


def find_saves(state_dict: Mapping, present: str | None = None) -> tuple[bool, set[str]]:
    """Whether torch.distributed.checkpoint has read a checkpoint into the state dict, and the saves that this
    rank has read. present: the id that a load leaves in options that it does not read.
    """
    was_in_file = any(piece.unread is not None for piece in pieces_of(state_dict))
    read = (p.saves for p in pieces_of(state_dict) if p.unread is not None or not was_in_file)
    of_options = getattr(state_dict.get("param_groups"), "save_id", None)
    return was_in_file, set().union(*read, {of_options} - {None, present})


def with_entries_of_all_ranks(
    state: State, error: OwnError, group: Any, besides: Collection[GroupReference | None] = ()
) -> State:
    """`state` of a state dict with each entry that any rank has, in one order, so that its pieces can be
    gathered one by one: ranks without elements of a parameter may not know of state that was made before an
    option changed. Collective. Raises an error of any rank. besides: ranks whose pieces stay as they are.
    """
    layouts: dict[tuple, dict[str, tuple]] = {}  # shapes and dtypes
    found: list[tuple[Any, tuple, About]] = []
    with error:
        for key, entries in state.items():
            pieces = {name: value for name, value in entries.items() if isinstance(value, Piece)}
            about = next((piece.about for piece in pieces.values()), About())
            ranks = None if about.ranks in (None, *besides) or not about.ranks.is_alive() else about.ranks()
            if ranks is not None:
                shared = str(key), *dist.get_process_group_ranks(ranks)
                layouts[shared] = {name: (piece.shape, piece.dtype) for name, piece in pieces.items()}
                found.append((key, shared, about))
    of_ranks = exchange(layouts, error, group, "comparing entries of the state")
    state = dict(state)
    for key, shared, about in found:
        known = collections.ChainMap(*(own.get(shared, {}) for own in of_ranks))
        nothing = {
            name: Piece(torch.zeros(0, dtype=dtype, device="cpu"), shape, 0, about)
            for name, (shape, dtype) in known.items()
        }
        state[key] = nothing | dict(state[key])
    return state


def agree_on_save(saves: set[str], error: OwnError, group: Any, call: str) -> tuple[str | None, str]:
    """The save that all ranks have read, and a new token. Collective. Raises load_error() of any rank."""
    told = exchange((saves, secrets.token_hex(8)), OwnError(load_error(error.take())), group, call)
    return the_one(set().union(*(own for own, _ in told))), told[0][1]


def load_error(failure: BaseException | None) -> BaseException | None:
    """What a load raises for it."""
    if failure is None or isinstance(failure, TypeError | ValueError):
        return failure
    return ValueError(f"state_dict cannot be loaded: {type(failure).__name__}: {failure}")
