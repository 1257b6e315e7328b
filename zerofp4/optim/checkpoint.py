"""The sharded state dict: a rank saves what it owns, and loads it in the same place of the same world."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from zerofp4.optim.flat import FlatBuffer

KEYS = ("state", "param_groups", "masters", "fingerprint")


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
        if not isinstance(saved, torch.Tensor) or saved.shape != buffer.masters.shape:
            raise ValueError(
                f"state_dict: masters of kind {buffer.kind!r} must have {buffer.slice_numel} elements"
            )
    saved_counts = [len(group["params"]) for group in state_dict["param_groups"]]
    if saved_counts != [len(group["params"]) for group in inner_groups]:
        raise ValueError(
            f"state_dict: param_groups have {saved_counts} parameters, which this rank's have not"
        )
