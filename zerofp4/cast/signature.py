"""What ranks tell each other before they cast or gather, and what must then be the same on all of them."""

from collections.abc import Sequence
from typing import NamedTuple

from zerofp4.cast.request import CastRequest, weight_name
from zerofp4.shard import Shard
from zerofp4.storage import NVFP4Storage


class Signature(NamedTuple):
    """What a rank tells the others to build a plan. All but the last two must be the same on all ranks."""

    weights: list[tuple[str, tuple[int, ...], str]]
    amax_groups: list[int]
    on_nonfinite: str
    shards: list[Shard]
    into_weights: bool


def describe(records: Sequence[NVFP4Storage]) -> list[tuple[str, tuple[int, ...], str]]:
    """(name, shape, dtype) of each weight."""
    return [(weight_name(i, r), tuple(r.shape), str(r.dtype)) for i, r in enumerate(records)]


def signature_of(request: CastRequest) -> Signature:
    options = (request.amax_groups, request.on_nonfinite)
    return Signature(describe(request.records), *options, request.shards, request.shard_codes is None)


def check_same_weights(descriptions: Sequence[Sequence[tuple[str, tuple[int, ...], str]]]) -> None:
    """Raises ValueError, the same on every rank, where a rank's weights are not those of rank 0."""
    first = descriptions[0]
    for rank, other in enumerate(descriptions):
        if len(other) != len(first):
            raise ValueError(f"rank 0 has {len(first)} model_weights, rank {rank} has {len(other)}")
        for (name, *mine), (_, *theirs) in zip(first, other, strict=True):
            if mine != theirs:
                raise ValueError(
                    f"{name} must be the same on all ranks, but has shape {mine[0]} and dtype {mine[1]} "
                    f"on rank 0, {theirs[0]} and {theirs[1]} on rank {rank}"
                )


def check_agreement(signatures: Sequence[Signature]) -> None:
    """Raises ValueError, the same on every rank, where ranks ask for different casts."""
    check_same_weights([signature.weights for signature in signatures])
    first = signatures[0]
    for rank, other in enumerate(signatures):
        for option in ("amax_groups", "on_nonfinite"):
            mine, theirs = getattr(first, option), getattr(other, option)
            if mine != theirs:
                raise ValueError(
                    f"{option} must be the same on all ranks, but is {shown(mine)} on rank 0 and "
                    f"{shown(theirs)} on rank {rank}"
                )


def shown(option: str | list[int]) -> str:
    """An option for a message; amax groups as the lists of indices that share one."""
    if isinstance(option, str):
        return repr(option)
    groups = [[i for i, group in enumerate(option) if group == g] for g in sorted(set(option))]
    return str([members for members in groups if len(members) > 1])
