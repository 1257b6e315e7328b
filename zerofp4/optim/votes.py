"""What ranks of a ZeRO optimizer tell each other before a step: one small vector, reduced by maximum."""

import hashlib
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerofp4.distributed import GroupReference, exchange, first_difference, rank_and_size, reduce_max
from zerofp4.optim.inner import options
from zerofp4.optim.nonfinite import from_word

HASH_BITS = 48
"""Of the options; a float64 word holds it exactly."""


class Intent(NamedTuple):
    """What a rank is about to do, and every other must do too.

    clip: clip_grad_norm_ was called, not step(). reduce: gradients are to be reduced, not those used that
    clip_grad_norm_ reduced before. step: how many steps there were. options: host_options_hash().
    max_norm, norm_type: of clip_grad_norm_, no NaN.
    """

    clip: bool
    reduce: bool
    step: int
    options: int
    max_norm: float = 0.0
    norm_type: float = 0.0


class Agreement(NamedTuple):
    """present: which parameters have a gradient on any rank. nonfinite: the first parameter whose gradient
    holds a NaN or Inf on any rank, as far as the ranks told each other; None where none does.
    """

    present: list[bool]
    nonfinite: int | None


class Votes:
    """Agreement of the ranks of a group over what they do with the gradients of `count` parameters."""

    def __init__(self, count: int, device: torch.device, group: dist.ProcessGroup | None):
        self._count, self._device = count, device
        self.group = GroupReference(group)
        self.rank, self.world_size = rank_and_size(group)

    def agree(
        self,
        gradients: Sequence[torch.Tensor | None],
        intent: Intent | None,
        error: BaseException | None,
        nonfinite: torch.Tensor | None,
        param_groups: Sequence[dict],
    ) -> Agreement:
        """Collective: one MAX all-reduce; nothing in a world of one.

        nonfinite: first_nonfinite() of this rank's gradients; None where they are not looked at.

        A rank that brings an error (its gradients and intent are not looked at) raises it, and the others
        raise RuntimeError; so do all where their intents differ. The answer is read on the host, also on a
        GPU: a rank that went on without it would wait in the next collective for one that does not come, or
        update its masters alone.
        """
        if self.world_size == 1:
            if error is not None:
                raise error
            return Agreement([gradient is not None for gradient in gradients], None)
        width = len(Intent._fields)
        mine = [0.0] * (self._count + 2 * width + 1) + [self.rank + 1.0]
        if error is None:
            present = [gradient is not None for gradient in gradients]
            mine = [*present, *intent, *(-word for word in intent), 0.0, 0.0]
        votes = torch.tensor(mine, dtype=torch.float64, device=self._device)
        if error is None and nonfinite is not None:
            votes[-2] = nonfinite
        reduce_max(votes, self.group())
        *words, first, failed = votes.tolist()
        highest = Intent(*words[self._count : self._count + width])
        lowest = Intent(*(-word for word in words[self._count + width :]))
        if failed:
            message = f"rank {int(failed) - 1} found an error, and no rank takes this step"
        else:
            message = find_difference(lowest, highest)
            if message is None and lowest.options != highest.options:
                message = self._find_different_option(param_groups)
        if message is None:
            return Agreement([bool(word) for word in words[: self._count]], from_word(first, self._count))
        error = error or RuntimeError(message)
        error.all_ranks_raise = True  # a closure that calls clip_grad_norm_ must not bring it to another vote
        raise error

    def _find_different_option(self, param_groups: Sequence[dict]) -> str:
        """Collective, after a vote that told all ranks that there is one."""
        by_rank = exchange(host_options(param_groups), None, self.group())
        rank, i = first_difference(by_rank)
        if i is None:
            return f"param_groups: rank 0 has {len(by_rank[0])} options, rank {rank} has {len(by_rank[rank])}"
        (name, mine), (other, theirs) = by_rank[0][i], by_rank[rank][i]
        if name != other:
            return f"the options of param_groups differ: rank 0 has {name} where rank {rank} has {other}"
        return f"{name} must be the same on every rank, but is {mine} on rank 0 and {theirs} on rank {rank}"


def find_difference(lowest: Intent, highest: Intent) -> str | None:
    """What the ranks do not agree on, in words that are the same on all of them; options are looked at
    elsewhere.
    """
    if lowest.clip != highest.clip:
        return "some ranks called clip_grad_norm_ and others step(): no rank does either"
    if lowest.reduce != highest.reduce:
        return (
            "some ranks have gradients to reduce and others have reduced theirs in clip_grad_norm_: call "
            "clip_grad_norm_ and zero_grad() on every rank or on none, and zero_grad() on all to start anew"
        )
    if lowest.step != highest.step:
        return (
            f"the ranks are out of step: some have taken {int(lowest.step)} steps and others "
            f"{int(highest.step)}; load the same state on all of them"
        )
    for name in ("max_norm", "norm_type"):
        low, high = getattr(lowest, name), getattr(highest, name)
        if low != high:
            return f"{name} must be the same on every rank, got from {low} to {high}"
    return None


def host_options(param_groups: Sequence[dict]) -> list[tuple[str, Any]]:
    """The options of groups that are numbers or lists of numbers, by what messages call them, sorted.

    Not those that are tensors, whose values may be on a GPU.
    """
    found = []
    for g, group in enumerate(param_groups):
        for name, value in options(group).items():
            several = isinstance(value, tuple | list)
            values = value if several else (value,)
            if all(isinstance(v, numbers.Real) for v in values):
                plain = tuple(map(float, values))
                found.append((f"param_groups[{g}]['{name}']", plain if several else plain[0]))
    return sorted(found)


def host_options_hash(param_groups: Sequence[dict]) -> int:
    digest = hashlib.sha256(repr(host_options(param_groups)).encode()).digest()
    return int.from_bytes(digest[: HASH_BITS // 8], "big")
