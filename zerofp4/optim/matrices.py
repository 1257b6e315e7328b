"""Masters as an optimizer of whole matrices sees them, and its state as that of parameters.

A parameter [N, K] is one matrix, a stack [E, N, K] is E of them: they lie one behind the other with the rank
that owns the parameter, and each is a parameter of the optimizer.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerofp4.optim.state_dict import Entry, StateTemplate, entry_of


def matrices_of(piece: torch.Tensor, shape: Sequence[int]) -> list[torch.Tensor]:
    """2D views of a 1D tensor with all elements of a parameter of this shape."""
    rows, columns = shape[-2:]
    return [part.view(rows, columns) for part in piece.split(rows * columns)]


def join_states(
    states: Sequence[Mapping[str, Any]], template: StateTemplate, shape: Sequence[int]
) -> dict[str, Any]:
    """The state of a parameter of this shape from those of its matrices: what is of each of them is 1D, one
    behind the other, and of several matrices a copy.

    Raises ValueError for state that a first step does not make, unless it is like the matrices.
    """
    joined: dict[str, Any] = {}
    for name, value in states[0].items():
        joined[name] = value
        if value is not None and _is_of_each(_entry(template, name, value, shape)):
            parts = [state[name].reshape(-1) for state in states]
            joined[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined


def _entry(template: StateTemplate, name: str, value: Any, shape: Sequence[int]) -> Entry:
    entry = template.entries.get(name)
    if entry is None:
        entry = entry_of(name, value, torch.empty(tuple(shape[-2:]), device="meta"))
        if entry.kind == "matrix":
            raise ValueError(
                f"optimizer_class keeps {name} of shape {tuple(value.shape)} of a matrix "
                f"{tuple(shape[-2:])}, which it does not make in its first step: it cannot be saved"
            )
    return entry


def _is_of_each(entry: Entry) -> bool:
    return entry.kind in ("elements", "matrix")


def split_state(
    state: Mapping[str, Any], template: StateTemplate, shape: Sequence[int], count: int
) -> list[dict[str, Any]]:
    """Those of the `count` matrices of a parameter of this shape, from what was read of it."""
    parts: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in state.items():
        entry = template.entries.get(name)
        if entry is None and isinstance(value, torch.Tensor) and value.numel() == math.prod(shape):
            entry = Entry("elements", value.dtype, value.device)
        for e, part in enumerate(parts):
            if entry is not None and _is_of_each(entry):
                part[name] = value.view(count, *entry.shape(shape[-2:]))[e]
            else:
                part[name] = value.clone() if isinstance(value, torch.Tensor) else value
    return parts
