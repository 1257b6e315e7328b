"""The sharded state dict: a rank saves what it owns, and loads it in the same place of the same world."""

import hashlib
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from zerofp4.distributed import first_difference
from zerofp4.optim.flat import FlatBuffer

KEYS = {"state": dict, "param_groups": list, "masters": dict, "fingerprint": dict}


def fingerprint(description: Sequence[str], buffers: Sequence[FlatBuffer]) -> dict[str, Any]:
    """What must be the same for a state to fit: the rank's place, the parameters, the optimizer's class."""
    layout = [(buffer.kind, buffer.offsets, buffer.slice_numel) for buffer in buffers]
    digest = hashlib.sha256(repr((list(description), layout)).encode()).hexdigest()
    return {"world_size": buffers[0].world_size, "rank": buffers[0].rank, "layout": digest}


def masters(buffers: Sequence[FlatBuffer]) -> dict[str, torch.Tensor]:
    """This rank's slice of masters by kind; a copy where a larger tensor would be saved along with it."""
    return {
        b.kind: b.masters.clone() if b.masters.untyped_storage().nbytes() > b.masters.nbytes else b.masters
        for b in buffers
    }


def check_state(
    state_dict: Any, expected: dict[str, Any], buffers: Sequence[FlatBuffer], inner_groups: Sequence[dict]
) -> None:
    """Raises TypeError or ValueError unless the state dict is what this rank saved; changes nothing."""
    if not isinstance(state_dict, dict):
        raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
    missing = [key for key in KEYS if key not in state_dict]
    if missing:
        raise ValueError(f"state_dict is not one of a ZeroFP4Optimizer: it has no {', '.join(missing)}")
    for key, kind in KEYS.items():
        if not isinstance(state_dict[key], kind):
            raise ValueError(
                f"state_dict: {key} must be a {kind.__name__}, got {type(state_dict[key]).__name__}"
            )
    found = state_dict["fingerprint"]
    where = [f"rank {f.get('rank')} of {f.get('world_size')}" for f in (found, expected)]
    if where[0] != where[1]:
        raise ValueError(
            f"state_dict was saved by {where[0]} and this is {where[1]}: the state is sharded, so every rank "
            "loads what it saved, in a world of the same size"
        )
    if found != expected:
        raise ValueError(
            "state_dict is of other parameters, groups or another optimizer class: their layout differs"
        )
    for buffer in buffers:
        saved = state_dict["masters"].get(buffer.kind)
        wanted = buffer.masters
        if not is_plain(saved) or (saved.shape, saved.dtype) != (wanted.shape, wanted.dtype):
            raise ValueError(
                f"state_dict: masters of kind {buffer.kind!r} must have {buffer.slice_numel} elements of "
                f"float32, got {shown(saved)}"
            )
    saved_counts = [len(group["params"]) for group in state_dict["param_groups"]]
    if saved_counts != [len(group["params"]) for group in inner_groups]:
        raise ValueError(
            f"state_dict: param_groups have {saved_counts} parameters, which this rank's have not"
        )
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    if ids != list(range(len(ids))):
        raise ValueError(f"state_dict: param_groups must number the parameters 0, 1, 2 and so on, got {ids}")
    steps = state_dict.get("steps", 0)
    if type(steps) is not int or steps < 0:
        raise ValueError(f"state_dict: steps must be an int, 0 or more, got {steps!r}")
    check_entries(state_dict["state"], [master for group in inner_groups for master in group["params"]])


def check_entries(state: dict, pieces: Sequence[torch.Tensor]) -> None:
    """Raises ValueError unless state[i] can be an elementwise optimizer's state of pieces[i]."""
    for i, entries in state.items():
        if type(i) is not int or not 0 <= i < len(pieces):
            raise ValueError(f"state_dict: state[{i!r}] is of no parameter, there are {len(pieces)} here")
        if not isinstance(entries, dict):
            raise ValueError(f"state_dict: state[{i}] must be a dict, got {type(entries).__name__}")
        for name, value in entries.items():
            if isinstance(value, numbers.Number):
                continue
            if not is_plain(value) or (value.numel() != 1 and value.shape != pieces[i].shape):
                raise ValueError(
                    f"state_dict: state[{i}][{name!r}] must be one element or 1D with the "
                    f"{pieces[i].numel()} of its master, got {shown(value)}"
                )


def is_plain(value: Any) -> bool:
    """Whether a value is a dense tensor with elements that torch can copy from."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and not value.is_meta
    )


def check_same_steps(by_rank: Sequence[int]) -> None:
    """Raises ValueError, the same on every rank, unless their states are of the same step."""
    difference = first_difference([[steps] for steps in by_rank])
    if difference is not None:
        rank, _ = difference
        raise ValueError(
            f"state_dict is of step {by_rank[0]} on rank 0 and of step {by_rank[rank]} on rank {rank}: every "
            "rank loads what was saved in the same step"
        )


def shown(value: Any) -> str:
    """A value in a message: what tensor it is, or what else."""
    if isinstance(value, torch.Tensor):
        layout = "" if value.layout == torch.strided else f" of layout {value.layout}"
        kind = "" if type(value) is torch.Tensor else f" in a {type(value).__name__}"
        return f"{value.dtype} {list(value.shape)} on {value.device}{layout}{kind}"
    return type(value).__name__


def load_inner(
    inner: torch.optim.Optimizer,
    state_dict: Any,
    expected: dict[str, Any],
    buffers: Sequence[FlatBuffer],
) -> None:
    """Check the state dict, then give the inner optimizer its part: new objects, so the old can come back."""
    check_state(state_dict, expected, buffers, inner.param_groups)
    inner.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


def load_error(failure: Exception) -> Exception:
    """What every rank can raise for it: an error of the rules here as it is, any other as a ValueError."""
    if type(failure) in (TypeError, ValueError):
        return failure
    return ValueError(f"state_dict cannot be loaded: {type(failure).__name__}: {failure}")
