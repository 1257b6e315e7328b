"""A state dict is matched with the parameters by their names, and checked whole before anything changes."""

import math
import numbers
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zerofp4.distributed import CollectiveError, first_difference
from zerofp4.optim.groups import options
from zerofp4.optim.piece import Home, Piece, gathered
from zerofp4.optim.seal import SealedTuple, digest
from zerofp4.optim.state_dict import STARTED, StateTemplate, own_name, parameter_ids
from zerofp4.shard import Shard

HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how an optimizer computes and not what: those of the optimizer that loads stay."""

SHOWN = 10
"""Names that an error lists."""


class Target(NamedTuple):
    """What this rank is to find of a parameter. label: what messages call it."""

    label: str
    shape: torch.Size
    shard: Shard
    template: StateTemplate
    home: Home


class Found(NamedTuple):
    """master: 1D float32, this rank's range; None where the state dict has none. state: for the optimizer of
    the masters; empty where there is none yet.
    """

    master: torch.Tensor | None
    state: dict[str, Any]


class Problems:
    """What does not fit, all of it in one error."""

    def __init__(self):
        self._by_kind: dict[str, list[str]] = {}

    def add(self, kind: str, what: str) -> None:
        self._by_kind.setdefault(kind, []).append(what)

    def raise_if_any(self) -> None:
        if not self._by_kind:
            return
        parts = []
        for kind, items in self._by_kind.items():
            more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
            parts.append(f"{kind}: {', '.join(items[:SHOWN])}{more}")
        raise ValueError(f"state_dict does not fit: {'; '.join(parts)}")


# Matching entries by name, or by position


def check_form(state_dict: Any) -> None:
    """Raises TypeError or ValueError for what is not torch's form of a state dict."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
    for key, kind in {"state": Mapping, "param_groups": list | tuple}.items():
        if key not in state_dict:
            raise ValueError(f"state_dict is not one of an optimizer: it has no {key}")
        if not isinstance(state_dict[key], kind):
            raise ValueError(f"state_dict: {key} is a {type(state_dict[key]).__name__}")
    for g, group in enumerate(state_dict["param_groups"]):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            raise ValueError(f"state_dict: param_groups[{g}] must be a dict with a list of params")
        names = group.get("param_names")
        if names is not None and len(names) != len(group["params"]):
            raise ValueError(
                f"state_dict: param_groups[{g}] has {len(group['params'])} params, {len(names)} param_names"
            )
    for key, entries in state_dict["state"].items():
        if not isinstance(entries, Mapping):
            raise ValueError(f"state_dict: state[{key!r}] must be a dict, got {type(entries).__name__}")
    steps = state_dict.get("steps", 0)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"state_dict: steps must be an int, 0 or more, got {steps!r}")


class Match:
    """Which entry of a state dict is whose: by name where both sides have names, else by place."""

    def __init__(self, state_dict: Mapping, names: Sequence[Sequence[str | None]]):
        self._state = state_dict["state"]
        self._groups = state_dict["param_groups"]
        saved = [self._saved_names(group) for group in self._groups]
        named = all(name is not None for group in [*names, *saved] for name in group)
        self.by_name = named and bool(self._groups)
        if self.by_name:
            self._places = {n: (g, i) for g, group in enumerate(saved) for i, n in enumerate(group)}
        elif [len(group) for group in saved] != [len(group) for group in names]:
            counts = [[len(group) for group in side] for side in (saved, names)]
            raise ValueError(
                f"state_dict: param_groups have {counts[0]} parameters, and these {counts[1]}; other groups "
                "are loaded where both optimizers were built with named_parameters()"
            )
        own = {key: getattr(key, "name", key) for key in self._state}
        self._keys = {own_name(name): key for key, name in own.items() if isinstance(name, str)}
        known = [p for group in self._groups for p in group["params"]]
        for key in own.keys() - self._keys.values():
            if key not in known:
                raise ValueError(f"state_dict: state[{key!r}] is of no parameter of its param_groups")

    @staticmethod
    def _saved_names(group: Mapping) -> list[str | None]:
        if group.get("param_names") is not None:
            return [own_name(str(name)) for name in [*group["param_names"], *group.get("elsewhere", ())]]
        return [own_name(p) if isinstance(p, str) else None for p in group["params"]]

    def place(self, g: int, i: int, name: str | None) -> tuple[int, int] | None:
        """Group and position; None where there is nothing of it."""
        if not self.by_name:
            return g, i
        place = self._places.get(name)
        # What another rank had is there if it was read by name.
        elsewhere = place is not None and place[1] >= len(self._groups[place[0]]["params"])
        return None if elsewhere and name not in self._keys else place

    def entries(self, place: tuple[int, int], name: str | None) -> Mapping:
        """A checkpoint that was read into state_dict() has the numbers of this optimizer in `state`, whatever
        those in its groups.
        """
        if self.by_name and name in self._keys:
            return self._state[self._keys[name]]
        g, i = place
        return self._state.get(self._groups[g]["params"][i], {})

    def group(self, g: int) -> Mapping:
        return self._groups[g]


# One parameter


def find(target: Target, entries: Mapping, read: bool, problems: Problems) -> Found:
    """This rank's range of everything that the optimizer keeps of a parameter."""
    # Of what was not in a checkpoint the state dict still has what the optimizer had.
    entries = {k: v for k, v in entries.items() if not (read and isinstance(v, Piece) and v.loaded is None)}
    take, template = _Reader(target, problems), target.template
    master = take.elements("master", entries.pop("master")) if "master" in entries else None
    entries = {k: v for k, v in entries.items() if v is not None}
    if not read and not (template.entries.keys() | {STARTED}) & entries.keys():
        return Found(master, {})  # no update yet
    needed = [name for name in template.entries if name not in entries]
    for name in needed:
        problems.add("missing", f"{target.label}.{name}")
    if needed:
        return Found(master, {})
    state = {k: take.entry(k, v, template.entries.get(k)) for k, v in entries.items()}
    started = template.flag not in state or bool(state[template.flag])
    state.pop(STARTED, None)
    return Found(master, state if started and target.shard.numel else {})


class _Reader:
    def __init__(self, target: Target, problems: Problems):
        self.target, self._problems = target, problems

    def entry(self, name: str, value: Any, entry: Any) -> Any:
        kind = self._guess(name, value) if entry is None else entry.kind
        if kind == "elements":
            return self.elements(name, value)
        if kind == "matrix":
            shape = entry.shape(self.target.shape)
            return self.elements(name, value, shape, Shard(0, math.prod(shape) if self._has_matrices else 0))
        if kind == "scalar":
            return self.scalar(name, value, None if entry is None else entry.dtype)
        number = self.scalar(name, value, torch.float64)
        return None if number is None else kind(number.item())

    def _guess(self, name: str, value: Any) -> str:
        if name == STARTED or not isinstance(value, torch.Tensor):
            return "scalar"
        return "scalar" if value.dim() == 0 and self.target.shape != () else "elements"

    @property
    def _has_matrices(self) -> bool:
        """Whether the parameter's are with this rank, or are nothing and with all."""
        return self.target.shard.numel > 0 or not self.target.shape.numel()

    def elements(
        self, name: str, value: Any, shape: Sequence[int] | None = None, shard: Shard | None = None
    ) -> torch.Tensor | None:
        """1D, float32 or what floating dtype it has; None where there is a problem. shape, shard: of what is
        saved, and what this rank is to have of it, if they are not those of the parameter.
        """
        target, what = self.target, f"{self.target.label}.{name}"
        shape, shard = tuple(target.shape if shape is None else shape), shard or target.shard
        value = _local(value)
        if not _is_dense(value) or not value.dtype.is_floating_point:
            self._problems.add("no dense tensor of floating dtype", f"{what} ({shown(value)})")
        elif tuple(value.shape) != shape:
            self._problems.add("other shapes", f"{what} ({tuple(value.shape)}, here {shape})")
        elif not isinstance(value, Piece):
            return value.detach().reshape(-1)[shard.start : shard.end].clone()
        elif value.live and value.home is not target.home:  # of another optimizer of these ranks
            return gathered(value).view(-1)[shard.start : shard.end].clone()
        elif value.shard != shard:
            first, last = value.shard.start, value.shard.end - 1
            self._problems.add("saved by a rank with other elements", f"{what} ({first}..{last})")
        elif value.has_unread():
            self._problems.add("not whole in the checkpoint", what)
        else:
            return value.present()
        return None

    def scalar(self, name: str, value: Any, dtype: torch.dtype | None) -> torch.Tensor | None:
        """Of shape (); None where there is a problem, or another rank has it."""
        found, what = self._scalar(name, value, dtype), f"{self.target.label}.{name}"
        if found is None:
            return None
        number, counts = found.item(), name in ("step", STARTED)
        if counts and not (number >= 0 and number % 1 == 0):  # nor is NaN, and inf % 1 is NaN
            self._problems.add("no whole number, 0 or more", f"{what} ({number})")
        elif not math.isfinite(number):  # the next update would put it into the masters
            self._problems.add("not finite", f"{what} ({number})")
        else:
            return found
        return None

    def _scalar(self, name: str, value: Any, dtype: torch.dtype | None) -> torch.Tensor | None:
        target, what = self.target, f"{self.target.label}.{name}"
        value = _local(value)
        if isinstance(value, numbers.Number):
            value = torch.tensor(value, dtype=dtype)
        if not _is_dense(value) or value.numel() != 1:
            self._problems.add("no scalar", f"{what} ({shown(value)})")
            return None
        if not isinstance(value, Piece):
            return value.detach().reshape(()).clone()
        if value.has_unread():
            self._problems.add("not whole in the checkpoint", what)
            return None
        if value.live and value.home is not target.home:
            return gathered(value)
        return value.present().view(()) if value.is_whole else None


def _local(value: Any) -> Any:
    """A replicated DTensor as the tensor that it is."""
    if isinstance(value, Piece) or not hasattr(value, "placements"):
        return value
    return value.to_local() if all(p.is_replicate() for p in value.placements) else value


def _is_dense(value: Any) -> bool:
    kinds = (torch.Tensor, torch.nn.Parameter)
    return isinstance(value, Piece) or (
        type(value) in kinds and value.layout == torch.strided and not value.is_meta
    )


def shown(value: Any) -> str:
    """A value in a message: what tensor it is, or what else."""
    if isinstance(value, torch.Tensor):
        layout = "" if value.layout == torch.strided else f" of layout {value.layout}"
        kind = "" if type(value) is torch.Tensor else f" in a {type(value).__name__}"
        return f"{value.dtype} {list(value.shape)} on {value.device}{layout}{kind}"
    return type(value).__name__


# The whole state dict


def read(
    state_dict: Any, param_groups: Sequence[dict], targets: Mapping[int, Target], homes: Sequence[Home]
) -> tuple[dict[int, Found], list[dict[str, Any]]]:
    """This rank's part of each trainable parameter, and the options that each group is to have.

    targets: by the identity of the parameter, as is what is found.

    Raises TypeError or ValueError, with the names of all that does not fit. Nothing has changed then.
    """
    check_form(state_dict)
    ids = parameter_ids(param_groups)
    match = Match(state_dict, [[number.name for number in own] for own in ids])
    was_in_file, anothers = was_read(state_dict), is_anothers(state_dict, homes)
    problems, found = Problems(), {}
    for g, (group, own) in enumerate(zip(param_groups, ids, strict=True)):
        for i, (p, number) in enumerate(zip(group["params"], own, strict=True)):
            if id(p) not in targets:  # frozen
                continue
            place = match.place(g, i, number.name)
            if place is not None:
                entries = match.entries(place, number.name)
                found[id(p)] = find(targets[id(p)], entries, was_in_file, problems)
                continue
            found[id(p)] = Found(None, {})
            if not anothers:  # where it is new
                problems.add("missing", targets[id(p)].label)
    problems.raise_if_any()
    return found, find_options(param_groups, match, ids)


def pieces_of(state_dict: Mapping) -> Iterator[Piece]:
    for entries in state_dict["state"].values():
        yield from (value for value in entries.values() if isinstance(value, Piece))


def was_read(state_dict: Mapping) -> bool:
    """Whether torch.distributed.checkpoint has read a checkpoint into the pieces of a state dict."""
    return any(piece.loaded is not None for piece in pieces_of(state_dict))


def find_saves(state_dict: Mapping, present: str) -> tuple[dict[str | None, str], dict[str, str]]:
    """What check_one_save() takes of this rank. present: the id of what the optimizer has, which a partial
    load leaves there.
    """
    was_in_file, tensors = was_read(state_dict), {}
    for piece in pieces_of(state_dict):
        if piece.loaded is not None if was_in_file else not piece.live:
            tensors = piece.save_ids | tensors
    ids = {getattr(state_dict.get(key), "save_id", None): key for key in ("steps", "param_groups")}
    return tensors, {save_id: key for save_id, key in ids.items() if save_id not in (None, present)}


def is_anothers(state_dict: Mapping, homes: Sequence[Home]) -> bool:
    """Whether it is the state_dict() of another optimizer in this process, as it is. homes: of this one's."""
    own = set(map(id, homes))
    return any(piece.live and id(piece.home) not in own for piece in pieces_of(state_dict))


def check_same_steps(by_rank: Sequence[int]) -> None:
    """Raises ValueError, the same on every rank, unless their states are of the same step."""
    difference = first_difference([[steps] for steps in by_rank])
    if difference is not None:
        rank, _ = difference
        raise ValueError(
            f"state_dict is of step {by_rank[0]} on rank 0 and of step {by_rank[rank]} on rank {rank}: every "
            "rank loads what was saved in the same step"
        )


def load_error(failure: Exception) -> Exception:
    """What every rank can raise for it: an error of the rules here and one of a collective as they are, any
    other as a ValueError.
    """
    if type(failure) in (TypeError, ValueError, CollectiveError):
        return failure
    return ValueError(f"state_dict cannot be loaded: {type(failure).__name__}: {failure}")


# Options


def find_options(groups: Sequence[dict], match: Match, ids: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """The options that each group is to have: those that all saved groups of its members agree on."""
    chosen = []
    for g, (group, own) in enumerate(zip(groups, ids, strict=True)):
        places = [match.place(g, i, number.name) for i, number in enumerate(own)]
        sources = {place[0] for place in places if place is not None}
        sources = [match.group(source) for source in sorted(sources)]
        new = {}
        for key, value in options(group).items():
            found = [source[key] for source in sources if key in source]
            if key in HOW or not found or any(not _equal(found[0], other) for other in found[1:]):
                continue
            new[key] = option_like(value, found[0], f"param_groups[{g}][{key!r}]")
        extra = {k: v for source in sources[:1] for k, v in source.items() if k not in group}
        chosen.append(new | {k: option_like(v, v, k) for k, v in extra.items() if k == "initial_lr"})
    return chosen


def _equal(a: Any, b: Any) -> bool:
    return bool(a == b)


def option_like(present: Any, value: Any, what: str) -> Any:
    """The saved value of an option as the kind of value that the option has here."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(f"state_dict: {what} must have one element, got {shown(value)}")
    if isinstance(present, torch.Tensor):
        return torch.as_tensor(value, dtype=present.dtype, device=present.device).view(present.shape).clone()
    if isinstance(present, list | tuple) and isinstance(value, list | tuple) and len(present) == len(value):
        return type(present)(option_like(p, v, what) for p, v in zip(present, value, strict=True))
    if isinstance(value, torch.Tensor):
        return value.item()
    if value is not None and not isinstance(value, numbers.Real | str):
        raise ValueError(f"state_dict: {what} must be a number, got {type(value).__name__}")
    return value


def warn_of_options(state_dict: Mapping, own: SealedTuple) -> None:
    """Where a checkpoint was read that has no param_groups in this form, which a planner lets pass: then
    there are still this optimizer's own. From a file they would be sealed. own: what it saves of them.
    """
    groups = state_dict["param_groups"]
    if was_read(state_dict) and type(groups) is tuple and digest(groups) == digest(own):
        warnings.warn(
            "the checkpoint has no param_groups that ZeroFP4Optimizer wrote: lr and other options stay as "
            "they are here. What get_state_dict() of torch.distributed.checkpoint.state_dict returned is "
            "loaded into what get_optimizer_state_dict(model, optimizer) returns, options too",
            stacklevel=3,
        )
