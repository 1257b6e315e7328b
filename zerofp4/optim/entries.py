"""What a state dict has of one parameter is read: this rank's range of it."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zerofp4.optim.piece import Home, Piece, gathered
from zerofp4.optim.template import STARTED, StateTemplate
from zerofp4.shard import Shard

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
