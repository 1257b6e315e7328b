"""What ranks of a ZeRO optimizer tell each other before a step: one small vector, reduced by maximum."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerofp4.distributed import (
    GroupReference,
    OwnError,
    exchange,
    first_difference,
    raised_by_all,
    rank_and_size,
    reduce_max,
)
from zerofp4.optim.build import Slots
from zerofp4.optim.nonfinite import from_word
from zerofp4.optim.param_groups import host_options, tensor_options_hash


class Intent(NamedTuple):
    """What a rank is about to do, and every other must do too.

    clip: clip_grad_norm_ was called, not step(). reduce: gradients are to be reduced, not those used that
    clip_grad_norm_ reduced before. step: how many steps there were. options: host_options_hash().
    cleared: how often zero_grad() was called since the last vote. max_norm, norm_type: of clip_grad_norm_, no
    NaN.
    """

    clip: bool
    reduce: bool
    step: int
    options: int
    cleared: int
    max_norm: float = 0.0
    norm_type: float = 0.0


class Agreement(NamedTuple):
    """present: which of this rank's parameters have a gradient on any rank that shares them. nonfinite: the
    slot of the first parameter whose gradient holds a NaN or Inf on any rank, as far as the ranks told each
    other; None where none does. in_sequence:
    whether a rank must do one thing after the other, so that all do: collectives have one order. again:
    whether what has been reduced before the vote is not all, or not right, on some rank.
    """

    present: list[bool]
    nonfinite: int | None
    in_sequence: bool
    again: bool = False


class Travelled(NamedTuple):
    """What a rank has sent of its gradients before a vote.

    rounds: how many rounds of all buckets, ever. again: one more is needed. broken: it is of no use.
    """

    rounds: int = 0
    again: bool = False
    broken: bool = False


NOTHING = Travelled()


class Votes:
    """Agreement of all ranks that step together over what they do with the gradients of their parameters.

    slots: a word each, so that a parameter of some ranks is not taken for another one of others.
    """

    def __init__(self, slots: Slots, device: torch.device, group: dist.ProcessGroup | None):
        self.slots, self._count, self._device = slots, len(slots.labels), device
        self.group = GroupReference(group)
        self.rank, self.world_size = rank_and_size(group)
        self.held = 0  # votes, so far
        self._last: tuple[list[bool], list[bool]] | None = None
        """Of the last agreement, which gradients this rank had, and which were present."""
        self.travelled = NOTHING
        """The most rounds that a rank told of in the last vote, and whether what they brought is right."""

    def agree(
        self,
        gradients: Sequence[torch.Tensor | None],
        intent: Intent | None,
        error: OwnError,
        nonfinite: torch.Tensor | None,
        param_groups: Sequence[dict],
        in_sequence: bool = True,
        travelled: Travelled = NOTHING,
    ) -> Agreement:
        """Collective: one MAX all-reduce; nothing in a world of one.

        nonfinite: first_nonfinite() of this rank's gradients, by slots; None where they are not looked at.

        A rank that brings an error (its gradients and intent are not looked at) raises it, and the others
        raise RuntimeError; so do all where their intents differ. The answer is read on the host, also on a
        GPU: a rank that went on without it would wait in the next collective for one that does not come, or
        update its masters alone.
        """
        self.travelled = travelled
        self.held += 1
        if self.world_size == 1:
            error.raise_if_any()
            present = [gradient is not None for gradient in gradients]
            return Agreement(present, None, in_sequence, travelled.again)
        votes = self._ballot(gradients, intent, error, nonfinite, param_groups, in_sequence, travelled)
        is_clip = intent is not None and intent.clip
        reduce_max(votes, self.group(), f"agreeing on {'clip_grad_norm_()' if is_clip else 'step()'}")
        *words, rounds, minus_rounds, again, broken, sequence, tensors, minus_tensors, first, failed = (
            votes.tolist()
        )
        self.travelled = Travelled(int(rounds), bool(again), bool(broken) or rounds != -minus_rounds)
        width = len(Intent._fields)
        highest = Intent(*words[self._count : self._count + width])
        lowest = Intent(*(-word for word in words[self._count + width :]))
        if failed:
            message = f"rank {int(failed) - 1} found an error, and no rank takes this step"
        else:
            message = find_difference(lowest, highest)
            if message is None and (lowest.options != highest.options or tensors != -minus_tensors):
                message = self._find_different_option(param_groups)
            if message is None and rounds != -minus_rounds:
                message = (
                    "the ranks took part in different numbers of backward passes, some in "
                    f"{int(rounds + minus_rounds)} more than others, and accumulate='sharded' adds up every "
                    "one: run as many outside of no_sync() on each of them"
                )
        if message is None:
            present = [bool(words[slot]) for slot in self.slots.own]
            self._last = [gradient is not None for gradient in gradients], present
            return Agreement(present, from_word(first, self._count), bool(sequence), bool(again))
        # A closure that calls clip_grad_norm_ must not bring it to another vote.
        raise raised_by_all(error.take() or RuntimeError(message))

    def expected(self, gradients: Sequence[torch.Tensor | None]) -> list[bool]:
        """What an agreement is expected to find present: what the last one did, where this rank has gradients
        as it had them then.
        """
        own = [gradient is not None for gradient in gradients]
        return self._last[1] if self._last is not None and self._last[0] == own else own

    def repeat(self, gradients: Sequence[torch.Tensor | None]) -> list[bool]:
        """Which parameters have a gradient on any rank, where that is as in the last agreement. Not
        collective. Raises RuntimeError where this rank knows that it is not.
        """
        if self._last is None or self._last[0] != [gradient is not None for gradient in gradients]:
            raise RuntimeError(
                "which parameters have gradients is not what the ranks agreed on last: take a step with "
                "these, and capture the next one in a CUDA graph"
            )
        return self._last[1]

    def agree_on_device(self, nonfinite: torch.Tensor | None) -> torch.Tensor:
        """Collective: the largest of what the ranks vote of a NaN or Inf, int32 []. Nothing is read."""
        words = torch.zeros(1, dtype=torch.int32, device=self._device)
        if nonfinite is not None:
            words.copy_(nonfinite)
        reduce_max(words, self.group(), "agreeing on step()")
        return words[0]

    def _ballot(
        self,
        gradients: Sequence[torch.Tensor | None],
        intent: Intent | None,
        error: OwnError,
        nonfinite: torch.Tensor | None,
        param_groups: Sequence[dict],
        in_sequence: bool,
        travelled: Travelled,
    ) -> torch.Tensor:
        """float64: which gradients there are, the intent, also negated, what travelled, its rounds also
        negated, in_sequence, the hash of tensor options, also negated, then nonfinite and 1 + the number of a
        rank with an error.
        """
        sent = [travelled.rounds, -travelled.rounds, travelled.again, travelled.broken]
        if error:
            zeros = [0.0] * (self._count + 2 * len(Intent._fields))
            words = [*zeros, *sent, 0.0, 0.0, 0.0, 0.0, self.rank + 1.0]
            return self._to_device(words)
        present = [False] * self._count
        for slot, gradient in zip(self.slots.own, gradients, strict=True):
            present[slot] = gradient is not None
        minus = Intent(*(-word for word in intent))
        if not any(present):  # nothing of this rank's could be taken for another step's
            intent, minus = intent._replace(cleared=-math.inf), minus._replace(cleared=-math.inf)
        words = [*present, *intent, *minus, *sent, in_sequence, 0.0, 0.0, 0.0, 0.0]
        votes = self._to_device(words)
        tensors = tensor_options_hash(param_groups, self._device)
        if tensors is not None:
            votes[-4], votes[-3] = tensors, -tensors
        if nonfinite is not None:
            votes[-2] = nonfinite
        return votes

    def _to_device(self, words: list[float]) -> torch.Tensor:
        """Queued behind what a GPU does by then; only the answer is waited for."""
        on_gpu = self._device.type == "cuda"
        votes = torch.tensor(words, dtype=torch.float64, pin_memory=on_gpu)
        return votes.to(self._device, non_blocking=True)

    def _find_different_option(self, param_groups: Sequence[dict]) -> str | None:
        """Collective, after a vote that told all ranks that there is one. None where only the bits of a NaN
        differ.
        """
        by_rank = exchange(
            host_options(param_groups, read_tensors=True), None, self.group(), stage="comparing options"
        )
        difference = first_difference(by_rank)
        if difference is None:
            return None
        rank, i = difference
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
    if lowest.cleared < highest.cleared:
        return (
            f"since the last step some ranks called zero_grad() {int(lowest.cleared)} times and others "
            f"{int(highest.cleared)}: a rank that leaves out a step alone would add its gradients to those "
            "that the others have of another batch. Call it equally often on every rank that has gradients"
        )
    for name in ("max_norm", "norm_type"):
        low, high = getattr(lowest, name), getattr(highest, name)
        if low != high:
            return f"{name} must be the same on every rank, got from {low} to {high}"
    return None
