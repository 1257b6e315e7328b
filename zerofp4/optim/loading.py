"""A state dict is read, by the parameters' names, and checked whole before anything changes."""

import numbers
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zerofp4.distributed import CollectiveError, first_difference
from zerofp4.optim.checkpoint import parameter_ids
from zerofp4.optim.entries import Found, Problems, Target, find, shown
from zerofp4.optim.inner import options
from zerofp4.optim.matching import Match, check_form
from zerofp4.optim.piece import Home, Piece
from zerofp4.optim.seal import SealedTuple, digest

HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how an optimizer computes and not what: those of the optimizer that loads stay."""


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
