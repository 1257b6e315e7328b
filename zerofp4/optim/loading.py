"""A state dict is read, by the parameters' names, and checked whole before anything changes."""

import numbers
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zerofp4.distributed import CollectiveError, first_difference
from zerofp4.optim.checkpoint import own_name
from zerofp4.optim.inner import options
from zerofp4.optim.piece import Home, Piece, gathered
from zerofp4.optim.sealing import DamagedFileError, SealedTuple, same_values
from zerofp4.optim.template import STARTED, StateTemplate
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
            return [own_name(str(name)) for name in group["param_names"]]
        return [own_name(p) if isinstance(p, str) else None for p in group["params"]]

    def place(self, g: int, i: int, name: str | None) -> tuple[int, int] | None:
        return self._places.get(name) if self.by_name else (g, i)

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


def was_read(state_dict: Mapping) -> bool:
    """Whether torch.distributed.checkpoint has read a checkpoint into the pieces of a state dict."""
    return any(
        isinstance(value, Piece) and value.asked
        for entries in state_dict["state"].values()
        for value in entries.values()
    )


def check_seals(state_dict: Mapping) -> None:
    """Raises DamagedFileError where some of what was read has a checksum and the rest has none. One optimizer
    wrote all of it: a damaged index leads to elements of a model, say, which have none.
    """
    pieces = [
        value
        for entries in state_dict["state"].values()
        for value in entries.values()
        if isinstance(value, Piece) and value.asked
    ]
    sealed = {part.sealed for piece in pieces for part in piece.received or ()}
    if len(sealed) == 2:
        bare = [p.label or "a tensor" for p in pieces if not all(part.sealed for part in p.received or ())]
        raise DamagedFileError(
            f"elements of {', '.join(bare)} have no checksum where others have: the file is damaged"
        )


def warn_of_options(state_dict: Mapping, own: SealedTuple) -> None:
    """Where a checkpoint was read that has no param_groups in this form, which a planner lets pass: then
    there are still this optimizer's own. From a file they would be sealed.
    """
    groups = state_dict["param_groups"]
    if was_read(state_dict) and type(groups) is tuple and same_values(groups, own):
        warnings.warn(
            "the checkpoint has no param_groups that ZeroFP4Optimizer wrote: lr and other options stay as "
            "they are here. What get_state_dict() of torch.distributed.checkpoint.state_dict returned is "
            "loaded into what get_optimizer_state_dict(model, optimizer) returns, options too",
            stacklevel=3,
        )


def is_anothers(state_dict: Mapping, home: Home) -> bool:
    """Whether it is the state_dict() of another optimizer in this process, as it is."""
    return any(
        isinstance(value, Piece) and value.live and value.home is not home
        for entries in state_dict["state"].values()
        for value in entries.values()
    )


def find(target: Target, entries: Mapping, read: bool, problems: Problems) -> Found:
    """This rank's range of everything that the optimizer keeps of a parameter."""
    # Of what was not in a checkpoint the state dict still has what the optimizer had.
    entries = {k: v for k, v in entries.items() if not (read and isinstance(v, Piece) and not v.asked)}
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
        if kind == "scalar":
            return self.scalar(name, value, None if entry is None else entry.dtype)
        number = self.scalar(name, value, torch.float64)
        return None if number is None else kind(number.item())

    def _guess(self, name: str, value: Any) -> str:
        if name == STARTED or not isinstance(value, torch.Tensor):
            return "scalar"
        return "scalar" if value.dim() == 0 and self.target.shape != () else "elements"

    def elements(self, name: str, value: Any) -> torch.Tensor | None:
        """1D, float32 or what floating dtype it has; None where there is a problem."""
        target, what = self.target, f"{self.target.label}.{name}"
        value = _local(value)
        if not _is_dense(value) or not value.dtype.is_floating_point:
            self._problems.add("no dense tensor of floating dtype", f"{what} ({shown(value)})")
        elif value.shape != target.shape:
            self._problems.add("other shapes", f"{what} ({tuple(value.shape)}, here {tuple(target.shape)})")
        elif not isinstance(value, Piece):
            own = value.detach().reshape(-1)[target.shard.start : target.shard.end]
            return own.clone()
        elif value.live and value.home is not target.home:  # of another optimizer of these ranks
            return gathered(value).view(-1)[target.shard.start : target.shard.end].clone()
        elif value.shard != target.shard:
            first, last = value.shard.start, value.shard.end - 1
            self._problems.add("saved by a rank with other elements", f"{what} ({first}..{last})")
        elif value.has_unread():
            self._problems.add("not whole in the checkpoint", what)
        else:
            return value.present()
        return None

    def scalar(self, name: str, value: Any, dtype: torch.dtype | None) -> torch.Tensor | None:
        """Of shape (); None where there is a problem, or another rank has it."""
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
