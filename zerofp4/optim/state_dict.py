"""What a ZeRO optimizer saves: a state dict in torch's form, of pieces in the parameters' shapes."""

import contextlib
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zerofp4.optim.groups import options
from zerofp4.optim.initial import HeldMaster
from zerofp4.optim.inner import InnerClass
from zerofp4.optim.piece import Home, Piece, make_piece

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

    def __deepcopy__(self, memo: dict) -> "ParameterId":
        return self


torch.serialization.add_safe_globals([ParameterId])


def own_name(name: str) -> str:
    """A parameter's name without those of modules that DDP, torch.compile and others put around it."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" and len(parts) > 1 else parts)


def parameter_id(group: dict, i: int, number: int) -> ParameterId:
    """Of parameter i of a group, with its number over all groups."""
    names = group.get("param_names")
    return ParameterId(number, own_name(names[i]) if names else None)


def parameter_ids(param_groups: Sequence[dict]) -> list[list[ParameterId]]:
    """By group, numbered over all of them."""
    ids, count = [], 0
    for group in param_groups:
        ids.append([parameter_id(group, i, count + i) for i in range(len(group["params"]))])
        count += len(ids[-1])
    return ids


# What an optimizer keeps of a parameter, found out before it has kept any

STARTED = "started"
"""In a state dict, of an optimizer that counts no steps: 1 once the parameter has a state, else 0."""

ROWS, COLUMNS = 5, 7
"""Of the matrix in a trial, by which the sizes of state are told apart."""


class Entry(NamedTuple):
    """kind: "elements" for a value per element of the parameter, "scalar" for a tensor of one, "matrix" for a
    tensor of another shape of each matrix of the parameter, or the type of a Python number. trial_shape: of
    the third, for a matrix [ROWS, COLUMNS].
    """

    kind: str | type
    dtype: torch.dtype
    device: torch.device
    trial_shape: tuple[int, ...] = ()

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """What is kept of a parameter of this shape, of one or of a stack of matrices."""
        if self.kind == "elements":
            return tuple(shape)
        if self.kind != "matrix":
            return ()
        *stack, rows, columns = shape
        sizes = {ROWS: rows, COLUMNS: columns}
        return (*stack, *(sizes.get(size, size) for size in self.trial_shape))


class StateTemplate(NamedTuple):
    """entries: by name. lazy: whether a parameter has no state before its first update."""

    entries: dict[str, Entry]
    lazy: bool

    @property
    def flag(self) -> str | None:
        """The scalar that is 0 of a parameter without state yet; None where each has one from the
        beginning.
        """
        if not self.lazy or not self.entries:
            return None
        return "step" if "step" in self.entries else STARTED


def template_key(inner: InnerClass, group: dict) -> Hashable:
    """Equal where the optimizer of a group keeps the same state: its class, and all of its options but the
    value of a float that is not 0.
    """

    def kind(value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            return torch.Tensor
        if isinstance(value, float):
            return float, value == 0
        return tuple(map(kind, value)) if isinstance(value, list | tuple) else repr(value)

    return inner.optimizer_class, inner.whole, *((k, kind(v)) for k, v in sorted(options(group).items()))


def make_template(inner: InnerClass, group: dict, device: torch.device) -> StateTemplate:
    """From a step with a parameter of two elements, or a small matrix, an lr of its own and no gradient but
    zeros.
    """
    trial = torch.zeros((ROWS, COLUMNS) if inner.whole else 2, dtype=torch.float32, device=device)
    chosen = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options(group).items()}
    optimizer = inner.optimizer_class([chosen | {"params": [trial]}], **inner.defaults)
    lazy = not optimizer.state.get(trial)
    trial.grad = torch.zeros_like(trial)
    with _no_global_hooks():
        optimizer.step()
    found = optimizer.state.get(trial, {})
    return StateTemplate({k: entry_of(k, v, trial) for k, v in found.items() if v is not None}, lazy)


@contextlib.contextmanager
def _no_global_hooks() -> Iterator[None]:
    """A trial is no step of the run. To call the function that torch has wrapped is not enough: a class may
    call the step() of the class that it is based on.
    """
    kept = [(hooks, dict(hooks)) for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in kept:
            hooks.update(own)


def entry_of(name: str, value: Any, trial: torch.Tensor) -> Entry:
    """Of the state of a parameter with more than one element."""
    if not isinstance(value, torch.Tensor):
        return Entry(type(value), torch.float64, torch.device("cpu"))
    if value.numel() == trial.numel():
        return Entry("elements", value.dtype, value.device)
    is_count = name == "step" and value.numel() == 1  # the same of all matrices of a stack
    if trial.dim() == 1 or is_count:
        return Entry("scalar", value.dtype, value.device)
    return Entry("matrix", value.dtype, value.device, tuple(value.shape))


# What is saved


def saved_groups(param_groups: Sequence[dict], elsewhere: Sequence[Sequence[str]]) -> tuple[dict, ...]:
    """The options, and whose they are. A tuple, which torch.distributed.checkpoint writes as one value: other
    groups than those that were saved can load it.

    elsewhere: by group, names of parameters that other ranks have in it: one rank writes the value for all.
    """
    groups = []
    for group, own, others in zip(param_groups, parameter_ids(param_groups), elsewhere, strict=True):
        chosen = {
            k: v.detach().cpu() if isinstance(v, torch.Tensor) else v for k, v in options(group).items()
        }
        names = {} if own and own[0].name is None else {"param_names": [p.name for p in own]}
        more = {"elsewhere": list(others)} if others else {}
        groups.append(chosen | names | more | {"params": list(own)})
    return tuple(groups)


def saved_entries(
    parameter_name: str | None,
    parameter: torch.Tensor,
    held: HeldMaster,
    state: Mapping[str, Any],
    template: StateTemplate,
    home: Home,
    refusal: str | None,
) -> dict[str, Piece]:
    """Pieces of what this rank holds of a parameter of that name: `master`, and the optimizer's state by
    its names.

    state: of the master here, empty where there is none yet or the rank owns nothing: then all is zeros. So
    every rank has the same names. refusal: why no file can have it under its name, None where one can.
    """
    shape, shard = parameter.shape, held.shard
    own = torch.zeros(0, device=home.device) if held.piece is None else held.piece
    pieces = {"master": make_piece(own, shape, shard.start, home)}
    entries = dict(template.entries)
    for name, value in state.items():
        if name not in entries and value is not None:
            entries[name] = _entry_like(value, own)
    is_held = shard.numel > 0 or not parameter.numel()
    for name, entry in entries.items():
        value = state.get(name)
        if entry.kind == "elements":
            if value is None:  # takes no memory
                value = torch.zeros(min(1, shard.numel), dtype=entry.dtype, device=entry.device)
                value = value.expand(shard.numel) if shard.numel > 1 else value
            pieces[name] = make_piece(value.view(-1), shape, shard.start, home)
        elif entry.kind == "matrix":
            pieces[name] = _of_matrices(value, entry, entry.shape(shape), is_held, home)
        else:
            pieces[name] = _scalar(value, entry, is_held, home)
    if template.flag == STARTED:
        entry = Entry("scalar", torch.float32, torch.device("cpu"))
        pieces[STARTED] = _scalar(torch.tensor(float(bool(state))), entry, is_held, home)
    for name, piece in pieces.items():
        piece.label = None if parameter_name is None else f"{parameter_name}.{name}"
        piece.refusal = refusal
    return pieces


def _entry_like(value: Any, own: torch.Tensor) -> Entry:
    if not isinstance(value, torch.Tensor):
        return Entry(type(value), torch.float64, torch.device("cpu"))
    return Entry("elements" if value.shape == own.shape else "scalar", value.dtype, value.device)


def _of_matrices(value: Any, entry: Entry, shape: tuple[int, ...], is_held: bool, home: Home) -> Piece:
    """Whole with the rank that has the matrices."""
    if value is None:
        value = torch.zeros(math.prod(shape) if is_held else 0, dtype=entry.dtype, device=entry.device)
    return make_piece(value.reshape(-1), shape, 0, home)


def _scalar(value: Any, entry: Entry, is_held: bool, home: Home) -> Piece:
    """Of the ranks that have some of a parameter's elements, which know it."""
    value = torch.as_tensor(0 if value is None else value, dtype=entry.dtype, device=entry.device).view(-1)
    return make_piece(value if is_held else value[:0], (), 0, home)


class StateView(Mapping):
    """optimizer.state: by parameter, what state_dict() has of it. Each look makes new pieces of the same
    values.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], entries_of: Any):
        self._positions = {id(p): i for i, p in enumerate(parameters)}
        self._parameters, self._entries_of = list(parameters), entries_of

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Piece]:
        if id(parameter) not in self._positions:
            return {}  # frozen: as torch's defaultdict
        return self._entries_of(self._positions[id(parameter)])

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._positions

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)
