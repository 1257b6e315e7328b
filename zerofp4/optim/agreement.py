"""The vote of all ranks on a step or a clip, before anything changes: one small MAX all-reduce."""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerofp4 import ops
from zerofp4.distributed import (
    GroupReference,
    OwnError,
    exchange,
    raised_by_all,
    rank_and_size,
    reduce_max,
)
from zerofp4.engine import Sent
from zerofp4.ops import is_capturing
from zerofp4.optim.build import Slots
from zerofp4.optim.inner import OptionsHash, show_options


class Call(NamedTuple):
    """What a rank is about to do, which must be the same on every rank."""

    is_clip: bool  # clip_grad_norm_(), not step()
    reduces: bool  # gradients are to be averaged; False if clip_grad_norm_ has averaged them
    max_norm: float = 0.0
    norm_type: float = 0.0
    # begin() fills in these two:
    step: int = 0  # how many steps there were
    options: int = 0  # the first of OptionsHash.of()


_EQUAL = len(Call._fields) + 1
"""So many words must be equal on all ranks: a Call, and the hash of tensor options."""

_FLAGS = ops.VOTE_FLAGS
"""So many flags follow: Sent, the word of a NaN or Inf, and 1 + the number of a rank with an error."""

FOUND_INF = 1
"""The word of a found_inf that a user gave the inner optimizer. Those of parameters are even, and larger."""


class Vote(NamedTuple):
    """A vote that the host has not read."""

    words: torch.Tensor  # on the host, once the event has happened
    event: torch.cuda.Event | None
    is_clip: bool
    error: OwnError  # of this rank, which it raises itself


class Read(NamedTuple):
    """What the host found when it last read votes."""

    taken: int  # how many steps, or buckets of a step, the ranks took before one that they refused
    # Of the last vote:
    sent: Sent
    present: torch.Tensor | None  # the presence flags


class Agreement:
    """The ranks that step together, and their last vote: the maximum over all ranks of float64 words.

        presence flags, by slot | _EQUAL words | their negatives, which show differences | _FLAGS flags

    slots: one position in the vector for each trainable parameter of any rank.
    group: all ranks that step together.
    failed: float32 [], 1 once a rank did not come to a barrier of the GPUs; None if ranks share no memory.

    [Note: who reads a vote] begin() waits for nothing, and decide() has one kernel write what the update and
    the cast read on the device (`decision`): a step that a rank refuses changes nothing. The host reads the
    vote at once, or, if it `defers`, in the first collective call of the next step, before that joins a
    collective: so calls stay paired. read() raises what the ranks found, on every rank.

    [Note: a barrier in the middle of a step] may set `failed` after decide(). So if ranks share memory,
    FusedAdamW reads `failed` itself; a refusal or a NaN or Inf reaches it by the presence flags.
    """

    def __init__(
        self,
        slots: Slots,
        device: torch.device,
        group: dist.ProcessGroup | None,
        on_nonfinite: str,
        failed: torch.Tensor | None,
    ):
        count = len(slots.labels)
        self.slots, self._group, self.world_size = slots, GroupReference(group), rank_and_size(group)[1]
        self._raises = on_nonfinite == "raise"
        self.defers = False
        """Whether the host leaves votes to the device."""
        self.steps = 0
        """How many steps the ranks have taken, skipped ones too, but for one whose vote is unread."""
        self.decision = ops.Decision(count if self.world_size > 1 else 0, device, failed)
        self._vector = torch.zeros(count + 2 * _EQUAL + _FLAGS, dtype=torch.float64, device=device)
        self._unread: list[Vote] = []
        self.last = Read(0, Sent(), None)
        self._options_hash = OptionsHash(device)

    def begin(
        self,
        present: Sequence[bool],
        call: Call,
        error: OwnError,
        word: torch.Tensor | None,
        param_groups: Sequence[dict],
        sent: Sent,
    ) -> None:
        """Vote. Collective, of several ranks.

        present: by slot, or by parameter of a bucket, whether this rank has a gradient.
        call: what this rank is about to do; it counts without an error.
        error: of this rank.
        word: of OwnGradients.find_word(); None if nothing was looked at.
        sent: what backward passes have sent for it.
        """
        options, tensors = (0, None) if error else self._options_hash.of(param_groups)
        flags, equal = [float(sent.all), float(sent.again), 0.0, 0.0], [0.0] * _EQUAL
        if error:
            present, flags[-1] = [0.0] * len(present), rank_and_size(self._group())[0] + 1.0
        else:
            equal[:-1] = map(float, call._replace(step=self.steps, options=options))
        ballot = [*map(float, present), *equal, *(-each for each in equal), *flags]
        vector, on_gpu = self._vector[-len(ballot) :], self._vector.is_cuda
        words = torch.tensor(ballot, dtype=torch.float64, device="cpu", pin_memory=on_gpu)
        vector.copy_(words, non_blocking=True)
        if tensors is not None:
            vector[-_FLAGS - _EQUAL - 1], vector[-_FLAGS - 1] = tensors, -tensors
        if word is not None and not error:
            vector[-2].copy_(word)
        reduce_max(vector, self._group(), f"agreeing on {'clip_grad_norm_()' if call.is_clip else 'step()'}")
        words = torch.empty_like(vector, device="cpu", pin_memory=on_gpu)
        words.copy_(vector, non_blocking=True)
        event = torch.cuda.Event() if on_gpu else None
        if event is not None:
            event.record()
        self._unread.append(Vote(words, event, call.is_clip, error))

    def read(self, param_groups: Sequence[dict] | None = None, at_once: bool = False) -> None:
        """Wait for the votes that the host has not read. Local, unless options differ.

        param_groups: the votes count as read, and ranks list options that differ; None is to look.
        at_once: the votes are of the present call, not of an earlier one, as messages say then.

        Raises RuntimeError if no rank takes the step, the same on every rank. But once the vote counts as
        read, a rank whose error is the reason raises that.
        """
        votes, taken, self.last = self._unread, 0, Read(0, Sent(), None)
        if param_groups is not None:
            self._unread = []
        for vote in votes:
            if vote.event is not None:
                vote.event.synchronize()
            words = vote.words[-_FLAGS - 2 * _EQUAL :].tolist()
            sent = Sent(*map(bool, words[-_FLAGS : -_FLAGS + 2]))
            self.last = Read(taken, sent, vote.words[: -len(words)])
            problem = self._find_problem(words, param_groups)
            if problem is not None:
                which = "all ranks have taken in part" if taken else "no rank has taken"
                prefix = "" if at_once else f"of the last step, which {which}: "
                # Marked: a closure that calls clip_grad_norm_ must not bring it to another vote. A variable
                # would be in a reference cycle with its traceback.
                raise raised_by_all(
                    (param_groups is not None and vote.error.take()) or RuntimeError(prefix + problem)
                )
            taken += not vote.is_clip
            self.last = self.last._replace(taken=taken)
        if param_groups is not None and not at_once:
            self.steps += taken > 0

    def raise_own(self) -> None:
        """Raise the error of this rank in a vote that the host has not read: of clip_grad_norm_."""
        for vote in self._unread:
            vote.error.raise_if_any()

    def forget(self, steps: int) -> None:
        """A load comes: forget the votes that the host has not read. steps: how many there were by now."""
        self._unread, self.steps = [], steps
        self.decision.refused.zero_()

    def _find_problem(self, words: list[float], param_groups: Sequence[dict] | None) -> str | None:
        """Why no rank takes the step, the same words on every rank; None if all do."""
        equal, minus, failed = words[:_EQUAL], words[_EQUAL : 2 * _EQUAL], words[-1]
        if failed:
            return f"rank {int(failed) - 1} found an error, and no rank takes this step"
        highest, lowest = Call(*equal[:-1]), Call(*(-word for word in minus[:-1]))
        difference = _find_difference(lowest, highest)
        if difference is None and (lowest.options != highest.options or equal[-1] != -minus[-1]):
            listed = None if param_groups is None else self._list_options(param_groups)
            difference = listed or "options of param_groups differed between ranks"  # and may be equal again
        return difference

    def _list_options(self, param_groups: Sequence[dict]) -> str | None:
        """The options of rank 0 and of the first rank that has others; None without one. Collective."""
        shown = exchange(show_options(param_groups), None, self._group(), "comparing options")
        rank = next((rank for rank, other in enumerate(shown) if other != shown[0]), None)
        rule = "options of param_groups must be the same on every rank"
        return None if rank is None else f"{rule}: rank 0 has {shown[0]}; rank {rank} has {shown[rank]}"

    # What the device decides

    def decide(
        self,
        word: torch.Tensor | None,
        *,
        is_shared: bool = False,
        found_inf: torch.Tensor | None = None,
        looks: bool = True,
        bucket: int | None = None,
    ) -> None:
        """Write what the update and the cast read, after the vote of several ranks.

        word: as of begin(), which counts in a world of one.
        is_shared: whether it is the largest of all ranks instead, found after the vote.
        found_inf: of the optimizer, in a step; None in a clip.
        looks: whether gradients are averaged now; otherwise an earlier vote has looked for a NaN or Inf.
        bucket: how many parameters it has, if the vote is on one bucket of a step.

        Raises FloatingPointError for a NaN or Inf with on_nonfinite="raise", which waits for the device. Not
        while a CUDA graph is captured, whose update reads the decision.
        """
        made, vote, count = self.decision, None, 0
        if self.world_size > 1:
            count = len(self.slots.labels) if bucket is None else bucket
            vote = self._vector[-count - 2 * _EQUAL - _FLAGS :]
            if is_shared:
                vote[-2] = word
        elif looks and word is None:
            made.own.zero_()
        elif looks and word is not made.own:
            made.own.copy_(word)
        raises = self._raises and looks and not is_capturing(self._vector.device)
        made.decide(
            vote,
            count,
            found_inf=found_inf,
            looks=looks,
            counts=found_inf is not None and not raises,
            goes_on=bucket is not None,
            keeps=len(self._unread) > 1,
        )
        name = self.first_nonfinite() if raises else None
        if name is not None:
            raise raised_by_all(
                FloatingPointError(
                    f"the gradient of {name} holds a NaN or Inf on some rank, and on_nonfinite is 'raise'; "
                    "no rank takes this step"
                )
            )

    def presence(self, buckets: Sequence[Sequence[int]] | None) -> list[torch.Tensor]:
        """By trainable parameter, float64 [1] on the device: 0 if no rank has a gradient, or a step changes
        nothing.

        buckets: the parameters of each, if each has a vote of its own; then buckets share these flags.
        """
        count = len(self.slots.labels)
        positions = dict(enumerate(self.slots.own))
        for indices in buckets or ():
            positions |= zip(indices, range(count - len(indices), count), strict=True)
        return [self.decision.present[positions[i] :][:1] for i in range(len(positions))]

    @property
    def skip_in_kernels(self) -> torch.Tensor:
        """float32 [], which FusedAdamW reads. [Note: a barrier in the middle of a step]"""
        return self.decision.skip if self.decision.failed is None else self.decision.failed

    def begin_buckets(self) -> None:
        """Each bucket of a step has a vote of its own, up to count_step()."""
        self.decision.first.zero_()

    def count_step(self) -> None:
        """A step ends, skipped or not. If its vote is unread, it counts once the host knows."""
        if not self._unread:
            self.steps += 1

    def steps_taken(self) -> int:
        """How many steps the ranks have taken, skipped ones too. Waits for an unread vote."""
        with contextlib.suppress(RuntimeError):  # the next step raises it
            self.read()
            return self.steps + (self.last.taken > 0)
        return self.steps

    @property
    def words(self) -> list[int]:
        """By trainable parameter of this rank, the word of a NaN or Inf in its gradient."""
        return [2 * (len(self.slots.labels) - slot) for slot in self.slots.own]

    def first_nonfinite(self) -> str | None:
        """What messages call the first parameter with a NaN or Inf; None if there is none."""
        word = self.decision.first.item()
        if word == FOUND_INF:
            return "the optimizer of the masters, which was given a found_inf"
        return self.slots.labels[len(self.slots.labels) - word // 2] if word else None

    def check_one_rank_has_all(self, call: str) -> None:
        """Raise ValueError, on every rank, if ranks train different parameters. call: what cannot be done
        then.
        """
        if len(self.slots.labels) > len(self.slots.own):
            raise ValueError(
                f"{call} needs a rank that trains all parameters, and other ranks train other parameters "
                "(experts, slices, stages): save with torch.distributed.checkpoint, or write what "
                "master_state_dict gives on a rank of each process group"
            )


def _find_difference(lowest: Call, highest: Call) -> str | None:
    """What the calls of the ranks differ in, options aside; the same words on every rank."""
    if lowest.is_clip != highest.is_clip:
        return "some ranks called clip_grad_norm_ and others step(): no rank does either"
    if lowest.reduces != highest.reduces:
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
