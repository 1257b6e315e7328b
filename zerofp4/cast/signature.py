"""What ranks tell each other before they cast or gather, and what must be the same on all of them."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from zerofp4.cast.request import weight_name
from zerofp4.distributed import first_difference
from zerofp4.shard import Shard
from zerofp4.storage import NVFP4Storage


class Description(NamedTuple):
    """A weight, which must be the same on all ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    block: tuple[int, int]
    experts: int | None
    four_over_six: str


class Signature(NamedTuple):
    """What a rank tells the others to build a plan. All but `shards` and `into_weights` must be the same."""

    weights: list[Description]
    amax_groups: list[int]
    on_nonfinite: str
    number: int
    """How many plans this rank has built in the group, to tell plans of the same weights apart."""
    shards: list[Shard]
    into_weights: bool


def describe(records: Sequence[NVFP4Storage]) -> list[Description]:
    return [
        Description(weight_name(i, r), tuple(r.shape), str(r.dtype), r.block, r.experts, str(r.four_over_six))
        for i, r in enumerate(records)
    ]


def plan_hash(signatures: Sequence[Signature]) -> int:
    """An integer below 2**24, which a float32 word holds exactly."""
    return int.from_bytes(hashlib.sha256(repr(signatures).encode()).digest()[:3], "big")


def check_same_weights(descriptions: Sequence[Sequence[Description]]) -> None:
    """Raises ValueError, the same on every rank, if a rank's weights differ from rank 0's."""
    difference = first_difference(descriptions)
    if difference is None:
        return
    rank, i = difference
    first, other = descriptions[0], descriptions[rank]
    if i is None:
        raise ValueError(f"rank 0 has {len(first)} model_weights, rank {rank} has {len(other)}")
    mine, theirs = first[i], other[i]
    for what in Description._fields[1:]:
        if getattr(mine, what) != getattr(theirs, what):
            raise ValueError(
                f"{mine.name} must be the same on all ranks, but has {what} {getattr(mine, what)} on rank 0 "
                f"and {getattr(theirs, what)} on rank {rank}"
            )
    raise ValueError(
        f"model_weights must be in the same order on all ranks, but {mine.name} of rank 0 is "
        f"{theirs.name} on rank {rank}"
    )


def check_agreement(signatures: Sequence[Signature]) -> None:
    """Raises ValueError, the same on every rank, if ranks ask for different casts."""
    check_same_weights([signature.weights for signature in signatures])
    names = ("amax_groups", "on_nonfinite")
    options = [[getattr(signature, name) for name in names] for signature in signatures]
    difference = first_difference(options)
    if difference is not None:
        rank, i = difference
        raise ValueError(
            f"{names[i]} must be the same on all ranks, but is {shown(options[0][i])} on rank 0 and "
            f"{shown(options[rank][i])} on rank {rank}"
        )


def shown(option: str | list[int]) -> str:
    """An option for a message; amax groups as lists of indices."""
    if isinstance(option, str):
        return repr(option)
    groups = [[i for i, group in enumerate(option) if group == g] for g in sorted(set(option))]
    return str([members for members in groups if len(members) > 1])
