"""The agreement of all ranks on a step or a clip, before anything changes: one small MAX all-reduce.

It also says which gradient is the first with a NaN or Inf on any rank.
"""

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerofp4.distributed import (
    GroupReference,
    OwnError,
    exchange,
    raised_by_all,
    rank_and_size,
    reduce_max,
)
from zerofp4.engine import Sent, are_sendable, is_sendable
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.ops import MultiTensor, find_nonfinite, is_capturing
from zerofp4.optim.build import Slots
from zerofp4.optim.inner import OptionsHash, show_options

_dtype = operator.attrgetter("dtype")


class Call(NamedTuple):
    """What a rank is about to do, which must be the same on every rank."""

    is_clip: bool  # clip_grad_norm_(), not step()
    reduces: bool  # gradients are to be averaged; False where clip_grad_norm_ has averaged them
    step: int  # how many steps there were
    max_norm: float = 0.0
    norm_type: float = 0.0
    options: int = 0  # the first of OptionsHash.of(), which begin() fills in


_EQUAL = len(Call._fields) + 1
"""Words that must be equal on all ranks: a Call, the hash of tensor options. Each goes with its negative, so
that the maximum of both shows whether ranks differ."""

_FLAGS = 4
"""Words behind them: Sent, the word of a NaN or Inf, and 1 + the number of a rank with an error."""

FOUND_INF = 1
"""The word of a found_inf that a user gave the inner optimizer. Those of parameters are even, and larger."""


class Agreement:
    """The ranks that step together, and what they agreed on last: the maximum over all ranks of one vector of
    float64, on the device.

        presence of gradients, by slot | _EQUAL words | their negatives | _FLAGS words

    The word of a NaN or Inf stands for the first parameter whose gradient holds one: the larger the word, the
    earlier the parameter; 0 for none. It stays on the device; skipped_steps() and first_nonfinite() wait.

    slots: one position in the vector for each trainable parameter of any rank.
    group: all ranks that step together.
    wire: the dtype that gradients are rounded to when they are sent, None for their own. A gradient that
        becomes infinite by it counts, in a world of any size.
    failed: float32 [], 1 once a rank did not come to a barrier of the GPUs; None where ranks share no memory.
    buckets: which trainable parameters each has, where ranks agree on one bucket after the other. Then an
        agreement has only the presence words of its bucket, which are the last ones of the vector.

    [Note: when the host reads an agreement] begin() waits for nothing. The update reads `refused` and the
    words of presence() on the device, and changes nothing where the ranks do not take the step. read() waits,
    and raises what the ranks found, on every rank. Where no host needs the outcome, read() is the first thing
    in the first collective call of the next step, before it joins a collective: so calls stay paired. Where a
    host needs it, read() follows at once.

    [Note: flags on the device] `skip` is the maximum of `nonfinite` (a NaN or Inf in any rank's gradients),
    `refused` (a rank found an error, or ranks differ) and `failed`. A barrier may set `failed` in the middle
    of a step, so where ranks share memory FusedAdamW reads that one, and the other two in the words of
    presence().
    """

    def __init__(
        self,
        slots: Slots,
        device: torch.device,
        group: dist.ProcessGroup | None,
        on_nonfinite: str,
        wire: torch.dtype | None,
        failed: torch.Tensor | None,
        buckets: Sequence[Sequence[int]] | None,
    ):
        self.slots, self._device, self._on_nonfinite, self._wire = slots, device, on_nonfinite, wire
        self._count = len(slots.labels)
        self._group = GroupReference(group)
        self.rank, self.world_size = rank_and_size(group)
        self.sent = Sent()
        """Of the agreement that was read last: the largest of all ranks."""
        self._vector = torch.zeros(self._count + 2 * _EQUAL + _FLAGS, dtype=torch.float64, device=device)
        self.refused = torch.zeros((), dtype=torch.float32, device=device)
        """1 where the ranks do not take the step, by any agreement that the host has not read."""
        self._present = torch.zeros(self._count, dtype=torch.float64, device=device)
        self._in_buckets = buckets is not None
        self._positions = dict(enumerate(slots.own))
        """By trainable parameter of this rank, that of its word of presence()."""
        for indices in buckets or ():
            self._positions |= zip(indices, range(self._count - len(indices), self._count), strict=True)
        self._unread: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        """Agreements that the host has not read: words on the host, once the event has happened."""
        self.taken = 0
        """How many agreements read() has found that the ranks take, before one that they do not."""
        self._options_hash = OptionsHash(device)
        self.words = [2 * (self._count - slot) for slot in slots.own]
        """Of a NaN or Inf, by trainable parameter of this rank."""
        self._word_of_all = self._vector[-2]
        self._own = torch.zeros(2, dtype=torch.int32, device=device)
        """The word that find_word() finds on this rank, and the flag: a float32, 1 if the word is not 0."""
        own = self._own_word, self._own_flag = self._own[0], self._own.view(torch.float32)[1]
        of_all = [torch.zeros((), dtype=dtype, device=device) for dtype in (torch.float64, torch.float32)]
        self._first, self.nonfinite = own if self.world_size == 1 else of_all
        """The word of a NaN or Inf on any rank, when gradients were averaged last; 1 where that is not 0."""
        self._failed = failed
        self.skip = self.nonfinite if self.world_size == 1 else torch.zeros_like(self.nonfinite)
        """float32 [], what an update reads on the device: 1 where this step changes nothing."""
        self.defers = False
        """Whether the host leaves agreements to the device."""
        self._skipped = torch.zeros((), dtype=torch.float64, device=device)

    def begin(
        self,
        present: Sequence[bool],
        call: Call | None,
        error: OwnError,
        nonfinite: torch.Tensor | None,
        param_groups: Sequence[dict],
        sent: Sent,
    ) -> None:
        """One MAX all-reduce, of several ranks. Collective.

        present: by trainable parameter of this rank, or of the bucket, whether it has a gradient.
        call: what this rank is about to do; None with an error.
        error: of this rank.
        nonfinite: the word of the first of its gradients with a NaN or Inf, by slots; None without one.
        sent: what backward passes have sent for it.
        """
        options, tensors = (0, None) if error else self._options_hash.of(param_groups)
        words = self._ballot(present, call and call._replace(options=options), error, sent)
        on_gpu = self._device.type == "cuda"
        ballot = torch.tensor(words, dtype=torch.float64, device="cpu", pin_memory=on_gpu)
        self._vector[-len(words) :].copy_(ballot, non_blocking=True)
        if tensors is not None:
            last = self._count + _EQUAL - 1
            self._vector[last], self._vector[last + _EQUAL] = tensors, -tensors
        if nonfinite is not None and not error:
            self._word_of_all.copy_(nonfinite)
        is_clip = call is not None and call.is_clip
        vector = self._vector[-len(words) :]
        reduce_max(vector, self._group(), f"agreeing on {'clip_grad_norm_()' if is_clip else 'step()'}")
        pairs = self._vector[self._count : -_FLAGS].view(2, _EQUAL)
        # Compared, not added: inf - inf is a NaN.
        refused = pairs[0].ne(-pairs[1]).any() | self._vector[-1].ne(0)
        if self._unread:  # a step that no rank takes stays so, whatever a later call of it agrees on
            refused |= self.refused.ne(0)
        self.refused.copy_(refused)
        self._unread.append(self._to_host(vector))

    def _ballot(
        self, present: Sequence[bool], call: Call | None, error: OwnError, sent: Sent
    ) -> list[float]:
        equal = [0.0] * _EQUAL
        there, own = [0.0] * self._count, self.slots.own
        if self._in_buckets:
            there, own = [0.0] * len(present), range(len(present))
        if not error:
            for slot, is_present in zip(own, present, strict=True):
                there[slot] = float(is_present)
            equal[:-1] = map(float, call)
        failed = self.rank + 1.0 if error else 0.0
        flags = float(sent.all), float(sent.again), 0.0, failed
        return [*there, *equal, *(-word for word in equal), *flags]

    def _to_host(self, vector: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        if self._device.type != "cuda":
            return vector.clone(), None
        words = torch.empty_like(vector, device="cpu", pin_memory=True)
        words.copy_(vector, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return words, event

    def read(
        self, param_groups: Sequence[dict] | None = None, error: OwnError | None = None
    ) -> list[bool] | None:
        """Wait for the agreements that were not read. Returns, of the last one, by trainable parameter of
        this rank whether any rank that shares it has a gradient; None without one, or in buckets. Local,
        unless options differ.

        param_groups: the agreements count as read, and ranks list options that differ; None is to look.
        error: of this rank in the present step, which it raises where no rank takes the step. None where the
            agreements are of an earlier step, as messages say then.

        Raises RuntimeError where no rank takes the step, the same on every rank without an error.
        """
        present, unread, self.taken = None, self._unread, 0
        earlier = error is None
        if param_groups is not None:
            self._unread = []
        for words, event in unread:
            if event is not None:
                event.synchronize()
            found = words.tolist()
            problem = self._find_problem(found, param_groups)
            if problem is not None:
                is_partial = self._in_buckets and self.taken > 0
                taken = "all ranks have taken in part" if is_partial else "no rank has taken"
                prefix = f"of the last step, which {taken}: " if earlier else ""
                # Marked: a closure that calls clip_grad_norm_ must not bring it to another agreement.
                raise raised_by_all(error.take() if error else RuntimeError(prefix + problem))
            self.taken += 1
            present = None if self._in_buckets else [bool(found[slot]) for slot in self.slots.own]
        return present

    def drop_unread(self) -> None:
        """Forget the agreements that were not read."""
        self._unread = []
        self.refused.zero_()

    def _find_problem(self, words: list[float], param_groups: Sequence[dict] | None) -> str | None:
        """Why no rank takes the step, the same words on every rank; None where all do."""
        equal, minus = words[-_FLAGS - 2 * _EQUAL :][:_EQUAL], words[-_FLAGS - _EQUAL : -_FLAGS]
        is_sent, again, _, failed = words[-_FLAGS:]
        self.sent = Sent(bool(is_sent), bool(again))
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
        first, *others = exchange(show_options(param_groups), None, self._group(), "comparing options")
        for rank, other in enumerate(others, 1):
            if other != first:
                rule = "options of param_groups must be the same on every rank"
                return f"{rule}: rank 0 has {first}; rank {rank} has {other}"
        return None

    # What updates read on the device

    def presence(self, i: int) -> torch.Tensor:
        """float64 [1], by trainable parameter: 0 where no rank has a gradient, or write_skip() found that all
        are to be left alone. Buckets share these words: they are those of the last agreement.
        """
        position = self._positions[i]
        return self._present[position : position + 1]

    def write_skip(self) -> None:
        """Write `skip`, and the words of presence(). On the device. [Note: flags on the device]"""
        if self.world_size == 1:  # it is `nonfinite`, and nothing reads words of presence
            return
        torch.maximum(self.nonfinite, self.refused, out=self.skip)
        if self._failed is not None:
            torch.maximum(self.skip, self._failed, out=self.skip)
        torch.mul(self._vector[: self._count], self.skip == 0, out=self._present)

    @property
    def skip_in_kernels(self) -> torch.Tensor:
        """What FusedAdamW reads. [Note: flags on the device]"""
        return self.skip if self._failed is None else self._failed

    def check_one_rank_has_all(self, call: str) -> None:
        """Raise ValueError, on every rank, where ranks train different parameters. call: what cannot be done
        then.
        """
        if len(self.slots.labels) > len(self.slots.own):
            raise ValueError(
                f"{call} needs a rank that trains all parameters, and other ranks train other parameters "
                "(experts, slices, stages): save with torch.distributed.checkpoint, or write what "
                "master_state_dict gives on a rank of each process group"
            )

    # NaN and Inf

    def find_word(
        self,
        gradients: Sequence[torch.Tensor | None],
        indices: Sequence[int] | None = None,
        found_inf: torch.Tensor | None = None,
        when: torch.Tensor | None = None,
        launches: MultiTensor | None = None,
    ) -> torch.Tensor | None:
        """The word of this rank's gradients, on the device; None without gradients. Waits for nothing.

        indices: which trainable parameters the gradients are of; None for all.
        found_inf: what a user gave the optimizer of the masters.
        when: int64 [2] on the device: where both are 0, there is no NaN or Inf, and the gradients are not
            looked at for it.
        launches: of these gradients with these `words`, if they are of all parameters and known to be sent as
            they are.
        """
        words = self.words if indices is None else [self.words[i] for i in indices]
        if launches is None:
            word = first_nonfinite(gradients, words, self._wire, when)
        else:
            self._own.zero_()
            word = self._own_word
            launches.find_nonfinite(word, when, self._own_flag)
        if found_inf is None:
            return word
        given = (found_inf.reshape(()).to(self._device) != 0).int() * FOUND_INF
        return given if word is None else torch.maximum(word, given)

    def begin_buckets(self) -> None:
        """Buckets are agreed on one by one, from here to count_step()."""
        self._first.zero_()

    def accept_nonfinite(self, own: torch.Tensor | None) -> None:
        """Take over the word of all ranks for the gradients that are averaged now: all of a step, or those of
        one more bucket. own: the word of this rank, which counts in a world of one.

        Raises FloatingPointError for a NaN or Inf with on_nonfinite="raise", which waits for the device. Not
        while a CUDA graph is captured, whose update reads `nonfinite`.
        """
        word = own if self.world_size == 1 else self._word_of_all
        if word is None:
            word = torch.zeros_like(self._first)
        if word is not self._first:
            torch.ne(word, 0, out=self.nonfinite)
            self._first.copy_(torch.maximum(self._first, word) if self._in_buckets else word)
        if self._on_nonfinite == "raise" and not is_capturing(self._device):
            name = self.first_nonfinite()
            if name is not None:
                raise raised_by_all(
                    FloatingPointError(
                        f"the gradient of {name} holds a NaN or Inf on some rank, and on_nonfinite is "
                        "'raise'; no rank takes this step"
                    )
                )

    def count_step(self) -> None:
        """A step ends, skipped or not. One that took buckets one by one counts as skipped if a bucket was."""
        if self._in_buckets:
            torch.ne(self._first, 0, out=self.nonfinite)
        self._skipped.add_(self.nonfinite)

    def skipped_steps(self) -> int:
        return int(self._skipped.item())

    def first_nonfinite(self) -> str | None:
        """What messages call the first parameter with a NaN or Inf; None if there is none."""
        word = self._first.item()
        if word == FOUND_INF:
            return "the optimizer of the masters, which was given a found_inf"
        return self.slots.labels[self._count - int(word) // 2] if word else None


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


# NaN and Inf


def first_nonfinite(
    gradients: Sequence[torch.Tensor | None],
    words: Sequence[int],
    rounded_to: torch.dtype | None = None,
    when: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """int32 [] on the gradients' device: the word of the first gradient with a NaN or Inf, once it is rounded
    to a dtype, None for its own; 0 where there is none. None without gradients. Waits for nothing.

    words: of each gradient, the larger the earlier.
    when: as of ops.find_nonfinite().
    """
    pairs = zip(words, gradients, strict=True)
    present = [(word, g) for word, g in pairs if g is not None and g.numel()]
    if not present:
        return None
    plain, others = [g for _, g in present], {}
    words, dtypes = [word for word, _ in present], list(map(_dtype, plain))
    if not (all(_keeps_values(dtype, rounded_to) for dtype in set(dtypes)) and are_sendable(plain, dtypes)):
        plain, words = [], []
        for word, g in present:
            if _keeps_values(g.dtype, rounded_to) and is_sendable(g, g.dtype):
                plain.append(g)
                words.append(word)
            else:
                others.setdefault(g.dtype, []).append((word, g))
    found = torch.zeros((), dtype=torch.int32, device=present[0][1].device)
    find_nonfinite(plain, words, found, when)
    for own, rest in others.items():
        dtype = rounded_to or (own if own in WEIGHT_DTYPES else torch.float32)
        # The largest element is finite in that dtype if all are.
        largest = torch.stack(torch._foreach_norm([g for _, g in rest], float("inf")))
        # In the arguments of a kernel: a replayed CUDA graph may find memory of the host changed.
        bad = torch.zeros(len(rest), dtype=torch.int32, device=largest.device)
        torch._foreach_add_(bad.unbind(), [word for word, _ in rest])
        found = torch.maximum(found, bad.masked_fill_(largest.to(dtype).isfinite(), 0).max())
    return found


def _keeps_values(dtype: torch.dtype, rounded_to: torch.dtype | None) -> bool:
    """Whether find_nonfinite can look at a dtype, and rounding makes nothing infinite."""
    if dtype not in WEIGHT_DTYPES:
        return False
    return rounded_to is None or torch.finfo(rounded_to).max >= torch.finfo(dtype).max
