"""What a ZeRO optimizer saves: a state dict in torch's form, of pieces in the parameters' shapes."""

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zerofp4.optim.groups import options
from zerofp4.optim.inner import InnerClass, InnerOptimizers
from zerofp4.optim.piece import About, Home, Piece
from zerofp4.optim.seal import SealedTuple, make_id
from zerofp4.shard import Shard

# Names and numbers

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Modules around modules whose names are no part of a parameter's own, as torch.distributed.checkpoint has
it.
"""


class ParameterId(int):
    """The number of a parameter among all of param_groups, whose str() is the parameter's name: that is what
    torch.distributed.checkpoint makes keys from.
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
    """A parameter's name without those of modules that DDP, torch.compile and others put around it."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" and len(parts) > 1 else parts)


def _find_names(announced: Sequence[Any], rank: int) -> tuple[list[str | None], list[list[str]]]:
    """By trainable parameter of this rank, why no file can have it under its name (None if one can); and by
    parameter group, the names of those in it that this rank lacks and others have.

    announced: the Announcement of each rank. The same parameter is on the ranks that it is sharded over, and
    on those that replicated_over names with theirs; another one of that name would take its place.
    """
    own, by_rank = announced[rank], [{m.name for m in announcement.members} for announcement in announced]
    refusals = []
    for member in own.trainable():
        ranks, why = own.ranks[member.group], None
        others = [r for r, names in enumerate(by_rank) if member.name in names and r not in ranks]
        if member.name is None and len(ranks) < len(announced):
            why = f"on ranks {list(ranks)} only, and has no name that tells it from what others have"
        elif others and len(own.copies[member.group]) == 1:
            why = f"one parameter on ranks {list(ranks)} and another on ranks {others}, under one name"
        how = "build the optimizer with names of the whole model, as in [('experts.7.weight', p)]"
        refusals.append(why and f"{member.label} is {why}, and a checkpoint has one of each name: {how}")
    lacking: list[dict[str, None]] = [{} for _ in own.ranks]
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
    """

    kind: str | type
    dtype: torch.dtype
    device: torch.device | None = None
    trial_shape: tuple[int, ...] | None = None
    is_flag: bool = False

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what is kept of a slice, of a matrix or of a stack of matrices of this shape."""
        if self.kind != "tensor":
            return ()
        if self.trial_shape is None:
            return tuple(shape)
        sizes = dict(zip(TRIAL_SHAPE, shape[-2:], strict=True))
        return (*shape[:-2], *(sizes.get(size, size) for size in self.trial_shape))


MASTER = Entry("tensor", torch.float32)


def make_template(inner: InnerClass, group: dict, device: torch.device) -> dict[str, Entry]:
    """Entries by name, from a step with a parameter of two elements, or a small matrix, an lr of its own and
    no gradient but zeros.
    """
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
    shards, inners: the trainable parameters with their masters, and the optimizers of these.
    classes: by parameter group, what updates its masters.
    announced, rank: the Announcement of each rank, and which is this one.
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
    ):
        self.param_groups, self.shards, self.inners, self._classes = param_groups, shards, inners, classes
        self.token = token
        """Another one after each load."""
        self.steps = 0
        """How many steps the optimizer has taken, skipped ones too."""
        self.unsound: str | None = None
        """Why what is saved now must not be loaded: the optimizer is broken."""
        self.device = shards.parameters[0].device
        self.ids: list[list[ParameterId]] = []
        """By parameter group, the numbers of all parameters, frozen ones too."""
        refusals, self._elsewhere = _find_names(announced, rank)
        places, count = {}, itertools.count()
        for g, group in enumerate(param_groups()):
            names = [own_name(name) for name in group.get("param_names", ())] or [None] * len(group["params"])
            self.ids.append([ParameterId(next(count), name) for name in names])
            places |= {id(p): (g, number) for p, number in zip(group["params"], self.ids[-1], strict=True)}
        homes: dict[dist.ProcessGroup | None, Home] = {}
        self.parameters: list[SavedParameter] = []
        """The trainable ones, in the order of the shards."""
        rows = zip(shards.parameters, shards.names, shards.shards, shards.groups, refusals, strict=True)
        for p, label, shard, ranks, refusal in rows:
            g, number = places[id(p)]
            home = homes.setdefault(ranks(), Home(ranks, self.device))
            saved = SavedParameter(number, number.name or label, g, p.shape, shard, home, refusal)
            self.parameters.append(saved)
        self._indices = {id(p): i for i, p in enumerate(shards.parameters)}
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
        return self._templates[key]

    def piece(self, i: int, name: str, values: torch.Tensor | None, entry: Entry = MASTER) -> Piece:
        """A piece of trainable parameter i. values: 1D, those of this rank; None for zeros, which take no
        memory.
        """
        saved = self.parameters[i]
        shape, shard = saved.extent(entry)
        if values is None:
            zero = torch.zeros(min(1, shard.numel), dtype=entry.dtype, device=entry.device or self.device)
            values = zero.expand(shard.numel)
        label = None if saved.number.name is None else f"{saved.number.name}.{name}"
        about = About(label, saved.home, saved.refusal, self.unsound)
        return Piece(values, shape, shard.start, about, {self.save_id: label or "a tensor"})

    def masters(self) -> dict[int, Piece]:
        """Pieces of the masters, by the identity of the parameter."""
        rows = enumerate(zip(self.shards.parameters, self.shards.masters, strict=True))
        return {id(parameter): self.piece(i, "master", master) for i, (parameter, master) in rows}

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
        pieces = {"master": self.piece(i, "master", self.shards.masters[i])}
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
        i = self._indices.get(id(parameter))
        return {} if i is None else self.entries(i)  # frozen: as torch's defaultdict

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._indices

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.shards.parameters)

    def __len__(self) -> int:
        return len(self.parameters)
