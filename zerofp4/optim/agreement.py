"""Agreement of all ranks on a step, before anything changes: one small vector, reduced by maximum."""

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
from zerofp4.optim.param_groups import host_options, host_options_hash, tensor_options_hash


class Call(NamedTuple):
    """What a rank is about to do, which must be the same on every rank."""

    is_clip: bool
    """clip_grad_norm_(), not step()."""
    averages: bool
    """Gradients are to be averaged; False where clip_grad_norm_ has averaged them."""
    step: int
    """How many steps there were."""
    max_norm: float = 0.0
    norm_type: float = 0.0
    options: int = 0
    """host_options_hash()."""


class Rounds(NamedTuple):
    """What a rank has sent in backward passes."""

    count: int = 0
    """How many rounds of all buckets there were, ever."""
    again: bool = False
    """One more is needed."""
    broken: bool = False
    """What was sent must not be used."""


class Outcome(NamedTuple):
    """What the ranks have agreed on."""

    present: list[bool]
    """By trainable parameter of this rank, whether it has a gradient on any rank that shares it."""
    nonfinite: int | None
    """The slot of the first parameter whose gradient holds a NaN or Inf on any rank; in a world of one None.
    """
    in_sequence: bool
    """Whether a rank must update all masters at once, so that all ranks do: collectives have one order."""
    again: bool
    """Whether gradients are to be sent once more."""


class Agreement:
    """The ranks that step together, and what they have agreed on last.

    slots: one place of the vector for each trainable parameter of any rank.
    device: where the vector is reduced.
    group: all ranks that step together.
    """

    def __init__(self, slots: Slots, device: torch.device, group: dist.ProcessGroup | None):
        self.slots, self._device = slots, device
        self._count = len(slots.labels)
        self._group = GroupReference(group)
        self.rank, self.world_size = rank_and_size(group)
        self.calls = 0
        """How many agreements there were."""
        self.rounds = Rounds()
        """Of the last agreement: the most rounds that a rank took part in, and whether any is broken."""
        self._last: tuple[list[bool], list[bool]] | None = None
        """Of the last agreement: which gradients this rank had, and which any rank had."""

    def agree(
        self,
        gradients: Sequence[torch.Tensor | None],
        call: Call | None,
        error: OwnError,
        nonfinite: torch.Tensor | None,
        param_groups: Sequence[dict],
        in_sequence: bool = True,
        rounds: Rounds = Rounds(),  # noqa: B008
    ) -> Outcome:
        """One MAX all-reduce, which the host waits for; nothing in a world of one. Collective.

        gradients: of this rank's trainable parameters.
        call: what this rank is about to do; None with an error.
        error: of this rank. It raises that; the other ranks raise RuntimeError.
        nonfinite: the word of the first of its gradients with a NaN or Inf, by slots; None without one.
        in_sequence: whether this rank must update all masters at once.
        rounds: what it has sent in backward passes.

        Raises RuntimeError on every rank where their calls, options or rounds differ.
        """
        self.calls += 1
        self.rounds = rounds
        own = [gradient is not None for gradient in gradients]
        if self.world_size == 1:
            error.raise_if_any()
            return Outcome(own, None, in_sequence, rounds.again)
        words = self._ballot(own, call, error, nonfinite, param_groups, in_sequence, rounds)
        is_clip = call is not None and call.is_clip
        reduce_max(words, self._group(), f"agreeing on {'clip_grad_norm_()' if is_clip else 'step()'}")
        return self._read(words.tolist(), own, error, param_groups)

    def _ballot(self, own, call, error, nonfinite, param_groups, in_sequence, rounds) -> torch.Tensor:
        """float64 on the device: presence of gradients; the call and its negative, so that the maximum of
        both shows whether ranks differ; rounds likewise; again, broken, in_sequence; the hash of tensor
        options likewise; nonfinite; 1 + the number of a rank with an error.
        """
        sent = [rounds.count, -rounds.count, rounds.again, rounds.broken]
        if error:
            absent = [0.0] * (self._count + 2 * len(Call._fields))
            return self._to_device([*absent, *sent, 0.0, 0.0, 0.0, 0.0, self.rank + 1.0])
        present = [False] * self._count
        for slot, there in zip(self.slots.own, own, strict=True):
            present[slot] = there
        call = call._replace(options=host_options_hash(param_groups))
        minus = [-word for word in call]
        words = self._to_device([*present, *call, *minus, *sent, in_sequence, 0.0, 0.0, 0.0, 0.0])
        tensors = tensor_options_hash(param_groups, self._device)
        if tensors is not None:
            words[-4], words[-3] = tensors, -tensors
        if nonfinite is not None:
            words[-2] = nonfinite
        return words

    def _to_device(self, words: list[float]) -> torch.Tensor:
        on_gpu = self._device.type == "cuda"
        vector = torch.tensor(words, dtype=torch.float64, pin_memory=on_gpu)
        return vector.to(self._device, non_blocking=True)

    def _read(self, reduced: list[float], own: list[bool], error: OwnError, param_groups) -> Outcome:
        *words, count, minus_count, again, broken, sequence, tensors, minus_tensors, first, failed = reduced
        self.rounds = Rounds(int(count), bool(again), bool(broken) or count != -minus_count)
        end = self._count + len(Call._fields)
        highest, lowest = Call(*words[self._count : end]), Call(*(-word for word in words[end:]))
        if failed:
            message = f"rank {int(failed) - 1} found an error, and no rank takes this step"
        else:
            message = find_difference(lowest, highest)
            if message is None and (lowest.options != highest.options or tensors != -minus_tensors):
                message = self._find_different_option(param_groups)
            if message is None and count != -minus_count:
                message = (
                    "the ranks took part in different numbers of backward passes, some in "
                    f"{int(count + minus_count)} more than others, and accumulate='sharded' adds up every "
                    "one: run as many outside of no_sync() on each of them"
                )
        if message is not None:
            # Marked: a closure that calls clip_grad_norm_ must not bring it to another agreement.
            raise raised_by_all(error.take() or RuntimeError(message))
        present = [bool(words[slot]) for slot in self.slots.own]
        self._last = own, present
        return Outcome(present, from_word(first, self._count), bool(sequence), bool(again))

    def has_other_parameters_elsewhere(self) -> bool:
        """Whether there is a rank that trains other parameters than this one. The same on every rank."""
        return len(self.slots.labels) > len(self.slots.own)

    # In a CUDA graph

    def repeat(self, gradients: Sequence[torch.Tensor | None]) -> list[bool]:
        """The last outcome's `present`. Not collective. Raises RuntimeError where this rank has other
        gradients now.
        """
        if self._last is None or self._last[0] != [gradient is not None for gradient in gradients]:
            raise RuntimeError(
                "which parameters have gradients is not what the ranks agreed on last: take a step with "
                "these, and capture the next one in a CUDA graph"
            )
        return self._last[1]

    def agree_on_device(self, nonfinite: torch.Tensor | None) -> torch.Tensor:
        """The largest word of a NaN or Inf of any rank, float64 []. Collective; the host reads nothing."""
        words = torch.zeros(1, dtype=torch.float64, device=self._device)
        if nonfinite is not None:
            words.copy_(nonfinite)
        reduce_max(words, self._group(), "agreeing on step()")
        return words[0]

    def _find_different_option(self, param_groups: Sequence[dict]) -> str | None:
        """Which option of param_groups differs; None where only the bits of a NaN do. Collective."""
        by_rank = exchange(
            host_options(param_groups, read_tensors=True), None, self._group(), stage="comparing options"
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


def find_difference(lowest: Call, highest: Call) -> str | None:
    """What the calls of the ranks differ in, options aside; the same words on every rank."""
    if lowest.is_clip != highest.is_clip:
        return "some ranks called clip_grad_norm_ and others step(): no rank does either"
    if lowest.averages != highest.averages:
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
