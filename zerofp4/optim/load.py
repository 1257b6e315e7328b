"""A state dict is matched with the parameters by their names, and checked whole before anything changes."""

import itertools
import math
import numbers
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zerofp4.distributed import CollectiveError
from zerofp4.optim.groups import options
from zerofp4.optim.initial import initial_values
from zerofp4.optim.piece import Piece, gathered
from zerofp4.optim.seal import Saves
from zerofp4.optim.state_dict import (
    MASTER,
    STARTED,
    Entry,
    ParameterId,
    SavedParameter,
    SavedState,
    own_name,
)

HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how an optimizer computes and not what: those of the optimizer that loads stay."""

OTHER_ELEMENTS = "saved by a rank with other elements"
WHOLE = (
    ". torch.save writes one rank's part: call consolidate_state_dict() on every rank before a save on one, "
    "or save with torch.distributed.checkpoint"
)


def read_state_dict(
    saved: SavedState, state_dict: Mapping, written: Sequence[int], moved: str | None
) -> tuple[list[torch.Tensor | None], Saves]:
    """Check a state dict, and give the optimizers of the masters their part as new objects, so that the old
    ones can come back.

    written: trainable parameters that somebody wrote to. Without a saved master, theirs follows them.
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
        how = WHOLE if OTHER_ELEMENTS in problems else ""
        raise ValueError(f"state_dict does not fit: {'; '.join(parts)}{how}")
    groups = []
    for group, own in zip(saved.param_groups(), saved.ids, strict=True):
        sources = sorted({matched[number][0] for number in own if number in matched})
        groups.append(group | _find_options(group, [state_dict["param_groups"][g] for g in sources]))
    saved.inners.load(groups, states, saved.device)
    for i in written:
        if masters[i] is None:
            shard = saved.parameters[i].shard
            masters[i] = initial_values(saved.shards.parameters[i])[shard.start : shard.end]
    pairs = zip(saved.parameters, masters, strict=True)
    stay = [own.label for own, master in pairs if own.shard.numel and master is None]
    obstacle = saved.unsound or moved
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


def _match(
    state_dict: Mapping, ids: Sequence[Sequence[ParameterId]]
) -> dict[ParameterId, tuple[int, Mapping]]:
    """The number of the saved group and the saved entries of each parameter: by name if both sides have
    names, else by position.
    """
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
    """This rank's part of what a state dict has of a parameter: the master, None if it has none, and the
    state for the optimizer of the masters, empty if there is none yet. problems: takes what does not fit.
    """
    given, found = {name: value for name, value in entries.items() if value is not None}, {}
    if was_in_file:  # what was not read is what the optimizer had
        given = {k: v for k, v in given.items() if not isinstance(v, Piece) or v.loaded is not None}
    is_updated = was_in_file or given.keys() - {"master"}
    for name in dict.fromkeys([*given, *(template if is_updated else ())]):
        if name == STARTED and name not in given:
            continue
        try:
            entry = MASTER if name == "master" else template.get(name)
            found[name] = read_value(saved, name, given.get(name), entry)
        except Misfit as misfit:
            problems.setdefault(misfit.kind, []).append(misfit.what)
    has_state = all(found.get(name, True) for name, entry in template.items() if entry.is_flag)
    master, _ = found.pop("master", None), found.pop(STARTED, None)
    return master, found if saved.shard.numel and has_state else {}


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
    elif isinstance(value, DTensor) and not isinstance(value, Piece):
        value = value.full_tensor()
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    is_dense = isinstance(value, Piece) or (is_plain and value.layout == torch.strided and not value.is_meta)
    if not is_dense or not (value.dtype.is_floating_point if is_tensor else value.numel() == 1):
        kind = "no dense tensor of floating dtype" if is_tensor else "no scalar"
        raise Misfit(kind, f"{what} ({type(value).__name__})")
    if is_tensor and tuple(value.shape) != shape:
        raise Misfit("other shapes", f"{what} ({tuple(value.shape)}, here {shape})")
    if isinstance(value, Piece) and value.about.home not in (None, saved.home):  # of another optimizer
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
    """The state of a parameter as that of the parts that are updated, its slice or the matrices in it. By the
    identity of the part.
    """
    states: dict[int, dict[str, Any]] = {id(part): {} for part in optimized}
    for name, value in state.items() if optimized else ():
        if torch.is_tensor(value) and value.dim():
            parts = value.view(-1, *template.get(name, MASTER).shape(optimized[0].shape))
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
    """The saves that this rank has read. present: the id of what the optimizer has, which a partial load
    leaves in the options.
    """
    was_in_file, saves = was_read(state_dict), {}
    for piece in pieces_of(state_dict):
        if piece.loaded is not None or not was_in_file:
            saves = piece.saves | saves
    save_id = getattr(state_dict.get("param_groups"), "save_id", None)
    if saves.keys() - {None} and save_id not in (None, present):  # tools drop the seals of tensors alone
        saves |= {save_id: "param_groups"}
    return saves


def load_error(failure: Exception) -> Exception:
    """What every rank can raise for it: an error of the rules here and one of a collective as they are, any
    other as a ValueError.
    """
    if isinstance(failure, TypeError | ValueError | CollectiveError):
        return failure
    return ValueError(f"state_dict cannot be loaded: {type(failure).__name__}: {failure}")
