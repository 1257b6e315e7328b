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
from zerofp4.ops import is_capturing
from zerofp4.optim.build import Slots
from zerofp4.optim.groups import OptionsHash, compared_options, show_option
from zerofp4.optim.nonfinite import from_word


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
    """The first of OptionsHash.of()."""


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
    nonfinite: int | None = None
    """The slot of the first parameter whose gradient holds a NaN or Inf on any rank; in a world of one None.
    """
    in_sequence: bool = False
    """Whether a rank must update all masters at once, so that all ranks do: collectives have one order."""
    again: bool = False
    """Whether gradients are to be sent once more."""


class _Unread(NamedTuple):
    """An agreement of which the host knows nothing yet. words: on the host once the event has happened; None
    where they are there. own: which gradients this rank had.
    """

    words: torch.Tensor
    event: torch.cuda.Event | None
    own: list[bool]


_PAIRS = len(Call._fields) + 2
"""Words that must be equal on all ranks: a Call, the number of rounds, the hash of tensor options. Each goes
with its negative, so that the maximum of both shows whether ranks differ."""


class Agreement:
    """The ranks that step together, and what they have agreed on last: the maximum over all ranks of one
    vector of float64, on the device.

        presence of gradients, by slot | _PAIRS words | their negatives
        | again, broken, in_sequence, NaN or Inf, 1 + the number of a rank with an error

    slots: one place of the vector for each trainable parameter of any rank.
    device: where the vector is reduced.
    group: all ranks that step together.

    [Note: deferred agreements] Where no host needs the outcome, none waits for it: the update reads `refused`
    and the words of presence() on the device. read() raises what the ranks have found, on every rank; it is
    the first thing in the first collective call of the next step.
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
        self._vector = torch.zeros(self._count + 2 * _PAIRS + 5, dtype=torch.float64, device=device)
        self.nonfinite = self._vector[-2]
        """The word of a NaN or Inf in the gradients of any rank."""
        self.refused = torch.zeros((), dtype=torch.float32, device=device)
        """1 where the ranks do not take the step of the last deferred agreement."""
        self._options_hash = OptionsHash(device)
        self._present = torch.zeros(self._count, dtype=torch.float64, device=device)
        self._unread: list[_Unread] = []

    def agree(
        self,
        gradients: Sequence[torch.Tensor | None],
        call: Call | None,
        error: OwnError,
        nonfinite: torch.Tensor | None,
        param_groups: Sequence[dict],
        in_sequence: bool = True,
        rounds: Rounds = Rounds(),  # noqa: B008
        deferred: bool = False,
    ) -> Outcome:
        """One MAX all-reduce; nothing in a world of one. Collective.

        gradients: of this rank's trainable parameters.
        call: what this rank is about to do; None with an error.
        error: of this rank. It raises that; the other ranks raise RuntimeError.
        nonfinite: the word of the first of its gradients with a NaN or Inf, by slots; None without one.
        in_sequence: whether this rank must update all masters at once.
        rounds: what it has sent in backward passes.
        deferred: the host does not wait, nothing is raised, and every gradient counts as present.

        Raises RuntimeError on every rank where their calls, options or rounds differ.
        """
        self.calls += 1
        self.rounds = rounds
        own = [gradient is not None for gradient in gradients]
        if self.world_size == 1:
            error.raise_if_any()
            return Outcome(own, None, in_sequence, rounds.again)
        self._cast_ballot(own, call, error, nonfinite, param_groups, in_sequence, rounds)
        is_clip = call is not None and call.is_clip
        reduce_max(self._vector, self._group(), f"agreeing on {'clip_grad_norm_()' if is_clip else 'step()'}")
        if not deferred:
            self.refused.zero_()
            return self._decode(self._vector.tolist(), own, error, param_groups)
        pairs = self._vector[self._count : -5].view(2, _PAIRS)
        self.refused.copy_(pairs.sum(0).ne(0).any() | self._vector[-1].ne(0))
        self._unread.append(self._to_host(own))
        return Outcome([True] * len(own))

    def _cast_ballot(self, own, call, error, nonfinite, param_groups, in_sequence, rounds) -> None:
        present, equal, tensors = [0.0] * self._count, [0.0] * _PAIRS, None
        if not error:
            options, tensors = self._options_hash.of(param_groups)
            for slot, there in zip(self.slots.own, own, strict=True):
                present[slot] = float(there)
            equal[:-2] = call._replace(options=options)
        equal[-2] = rounds.count
        failed = self.rank + 1.0 if error else 0.0
        votes = map(float, (rounds.again, rounds.broken, in_sequence and not error, 0.0, failed))
        words = [*present, *equal, *(-word for word in equal), *votes]
        on_gpu = self._device.type == "cuda"
        self._vector.copy_(torch.tensor(words, dtype=torch.float64, pin_memory=on_gpu), non_blocking=True)
        if error:
            return
        if tensors is not None:
            last = self._count + _PAIRS - 1
            self._vector[last], self._vector[last + _PAIRS] = tensors, -tensors
        if nonfinite is not None:
            self.nonfinite.copy_(nonfinite)

    def _decode(
        self,
        words: list[float],
        own: list[bool],
        error: OwnError,
        param_groups: Sequence[dict] | None,
        deferred: bool = False,
    ) -> Outcome:
        """param_groups: None where other ranks may not be asked which option differs."""
        equal, minus = words[self._count : -5][:_PAIRS], words[self._count : -5][_PAIRS:]
        again, broken, sequence, first, failed = words[-5:]
        count, minus_count = equal[-2], minus[-2]
        self.rounds = Rounds(int(count), bool(again), bool(broken) or count != -minus_count)
        highest, lowest = Call(*equal[:-2]), Call(*(-word for word in minus[:-2]))
        if failed:
            message = f"rank {int(failed) - 1} found an error, and no rank takes this step"
        else:
            message = find_difference(lowest, highest)
            if message is None and (lowest.options != highest.options or equal[-1] != -minus[-1]):
                message = None if param_groups is None else self._find_different_option(param_groups)
                if message is None and deferred:  # they may be equal again by now
                    message = "options of param_groups differed between ranks"
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

    # Deferred agreements

    def _to_host(self, own: list[bool]) -> _Unread:
        if self._device.type != "cuda":
            return _Unread(self._vector.clone(), None, own)
        words = torch.empty_like(self._vector, device="cpu", pin_memory=True)
        words.copy_(self._vector, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _Unread(words, event, own)

    def read(self, param_groups: Sequence[dict] | None = None) -> Outcome | None:
        """What the deferred agreements since the last read() found; None if there was none.

        param_groups: the outcome counts as read, and ranks may be asked for their options: collective then.

        Raises RuntimeError, the same on every rank, where no rank took the step.
        """
        unread, outcome = self._unread, None
        if param_groups is not None:
            self._unread = []
        for one in unread:
            if one.event is not None and not is_capturing(self._device):  # else it came before the capture
                one.event.synchronize()
            try:
                outcome = self._decode(one.words.tolist(), one.own, OwnError(), param_groups, deferred=True)
            except RuntimeError as error:
                raise RuntimeError(f"of the last step, which no rank has taken: {error}") from None
        return outcome

    def drop_unread(self) -> None:
        """Nobody is to hear of earlier agreements."""
        self._unread = []
        self.refused.zero_()

    # What updates read on the device

    def presence(self, i: int) -> torch.Tensor | None:
        """float64 [1], by trainable parameter: 0 where no rank has a gradient, or admit() found that all are
        to be left alone; None in a world of one.
        """
        slot = self.slots.own[i]
        return self._present[slot : slot + 1] if self.world_size > 1 else None

    def admit(self, skip: torch.Tensor) -> None:
        """Write the words of presence(), zeros where skip, float32 [], is not 0. On the device."""
        torch.mul(self._vector[: self._count], skip == 0, out=self._present)

    def has_other_parameters_elsewhere(self) -> bool:
        """Whether there is a rank that trains other parameters than this one. The same on every rank."""
        return len(self.slots.labels) > len(self.slots.own)

    # In a CUDA graph

    def repeat(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Raise RuntimeError unless this rank has the gradients of the last agreement, whose words of
        presence count on. Not collective.
        """
        if self._last is None or self._last[0] != [gradient is not None for gradient in gradients]:
            raise RuntimeError(
                "which parameters have gradients is not what the ranks agreed on last: take a step with "
                "these, and capture the next one in a CUDA graph"
            )

    def agree_on_device(self, nonfinite: torch.Tensor | None) -> torch.Tensor:
        """The largest word of a NaN or Inf of any rank, float64 []. Collective; the host reads nothing."""
        words = torch.zeros(1, dtype=torch.float64, device=self._device)
        if nonfinite is not None:
            words.copy_(nonfinite)
        reduce_max(words, self._group(), "agreeing on step()")
        return words[0]

    def _find_different_option(self, param_groups: Sequence[dict]) -> str | None:
        """Which option of param_groups differs; None where only the bits of a NaN do. Collective."""
        own = [(name, show_option(value)) for name, value in compared_options(param_groups)]
        by_rank = exchange(own, None, self._group(), stage="comparing options")
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
