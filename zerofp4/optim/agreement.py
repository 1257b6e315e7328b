"""The gradients of this rank, and the vote of all ranks on a step or a clip, before anything changes."""

import contextlib
import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerofp4 import ops
from zerofp4.distributed import (
    GroupReference,
    OwnError,
    Stage,
    exchange,
    raised_by_all,
    rank_and_size,
    reduce_max,
)
from zerofp4.engine import CHUNK, BucketExchange, Gradients, check_gradients, in_place, is_sendable
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.launch import backend_for
from zerofp4.optim.build import Announcement
from zerofp4.optim.inner import InnerOptimizers, show_options
from zerofp4.optim.sharded import ShardedParameters


class Call(NamedTuple):
    """The call that a rank is in, which must be the same on every rank."""

    is_clip: bool = False  # clip_grad_norm_(), not step()
    reduces: bool = True  # gradients are to be averaged; False if clip_grad_norm_ has averaged them
    max_norm: float = 0.0
    norm_type: float = 0.0
    passes: int = 0  # the number of backward passes whose gradients were added up on the host
    # begin() fills in these two:
    step: int = 0  # the number of steps taken before
    options: int = 0  # the first of InnerOptimizers.hash_options()


_EQUAL = len(Call._fields) + 1
"""The number of values that must be equal on all ranks: a Call, and the hash of tensor options."""

_FLAGS = ops.VOTE_FLAGS
"""The number of flags: Read.any_reduces, Read.again, the word of a NaN or Inf, 1 + a rank with an error."""

FOUND_INF = 1
"""The word of a found_inf that a user gave the inner optimizer. Words of parameters are even, and larger."""


class Vote(NamedTuple):
    """A vote that the host has not read."""

    vector: torch.Tensor  # on the host, once the event has happened
    event: torch.cuda.Event | None
    is_clip: bool
    error: OwnError  # of this rank, which it raises itself


class Read(NamedTuple):
    """The outcome of the votes that the host read last."""

    taken: int  # the number of steps, or buckets of a step, that the ranks took before they refused one
    # Of the last vote:
    any_reduces: bool = False  # a rank averages gradients in the call
    again: bool = False  # a rank must send all gradients again
    present: torch.Tensor | None = None  # the presence flags


class Agreement:
    """The ranks that step together, and their last vote: one MAX all-reduce of a small float64 vector.

        presence flags, by slot | _EQUAL values | their negatives, which show differences | _FLAGS flags

    announced: by all ranks. Ranks that share a parameter share its slot.

    [Note: who reads a vote] begin() waits for nothing. decide() has one kernel write the decision that the
    update and the cast read on the device, so a step that a rank refuses changes nothing. The host reads the
    vote at once, or, if it `defers`, in the first collective call of the next step, before that joins a
    collective: so calls stay paired. read() raises the ranks' error on every rank.

    [Note: a barrier in the middle of a step] may set `failed` after decide(). So if ranks share memory,
    FusedAdamW reads `failed` itself; a refusal or a NaN or Inf reaches it by the presence flags.
    """

    def __init__(
        self,
        announced: Sequence[Announcement],
        shards: ShardedParameters,
        inners: InnerOptimizers,
        group: dist.ProcessGroup | None,
        on_nonfinite: str,
    ):
        rank, self.world_size = rank_and_size(group)
        self._group, self._shards, self._inners = GroupReference(group), shards, inners
        device = shards.found_inf.device
        self.labels: list[str] = []  # by slot, the parameter's name in messages
        self.slots: list[int] = []  # by trainable parameter of this rank, its slot
        known: dict[tuple, int] = {}
        for r, other in enumerate(announced):
            for member in filter(operator.attrgetter("is_trainable"), other.members):
                slot = known.setdefault((member.ranks, member.group, member.position), len(known))
                if slot == len(self.labels):
                    of = "" if len(member.ranks) == len(announced) else f" (of ranks {list(member.ranks)})"
                    self.labels.append(member.label + of)
                self.slots += [slot] * (r == rank)
        count = len(self.labels)
        self.words = [2 * (count - slot) for slot in self.slots]
        """By trainable parameter of this rank, the word of a NaN or Inf in its gradient."""
        self._raises = on_nonfinite == "raise"
        self.defers = False  # whether the host leaves votes to the device
        self.steps = 0
        """How many steps the ranks have taken, skipped ones too, except one whose vote is unread."""
        failed = None if shards.peers is None else shards.peers.failed
        self.decision = ops.Decision(count if self.world_size > 1 else 0, device, failed)
        self.skip_in_kernels = self.decision.skip if failed is None else failed
        """float32 [], which FusedAdamW reads. [Note: a barrier in the middle of a step]"""
        self._vector = torch.zeros(count + 2 * _EQUAL + _FLAGS, dtype=torch.float64, device=device)
        self._unread: list[Vote] = []
        self.last = Read(0)

    def find_why_host_waits(self, sends_early: bool) -> str | None:
        """Why the host waits for the vote of each step, the same on every rank; None if it need not.

        sends_early: whether backward passes send gradients.
        """
        if self._shards.offload.is_used:
            return "offload has the host wait for gradients, which it updates masters with"
        if self.world_size == 1:
            return "a world of one has no vote"
        device = self._vector.device
        backend = backend_for(self._group(), device)
        waits = f"the group's backend for {device.type} is {backend}, whose collectives the host waits for"
        reasons = {
            waits: backend != "nccl",
            "on_nonfinite is 'raise'": self._raises,
            "backward passes send gradients": sends_early,
            "parameters have replicas": any(bucket.replica_count > 1 for bucket in self._shards.buckets),
        }
        return next((why for why, holds in reasons.items() if holds), None)

    def begin(
        self,
        present: Sequence[bool],
        error: OwnError,
        word: torch.Tensor | None,
        call: Call = Call(),  # noqa: B008
        again: bool = False,
    ) -> None:
        """Vote. Collective, of several ranks.

        present: by slot, or by parameter of a bucket, whether this rank has a gradient.
        word: of OwnGradients.find_word(); None if no gradients were looked at.
        call: of this rank; with an error only whether it reduces counts. again: as of Read.
        """
        options, tensors = (0, None) if error else self._inners.hash_options(self._vector.device)
        flags, equal = [float(call.reduces), float(again), 0.0, 0.0], [0.0] * _EQUAL
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
        on_host = torch.empty_like(vector, device="cpu", pin_memory=on_gpu).copy_(vector, non_blocking=True)
        event = torch.cuda.current_stream(vector.device).record_event() if on_gpu else None
        self._unread.append(Vote(on_host, event, call.is_clip, error))

    def read(self, at_once: bool = False, counts: bool = True) -> None:
        """Wait for the votes that the host has not read. Local, unless options differ and the votes count.

        at_once: whether the votes are of the present call, not of an earlier one, as messages say.
        counts: whether the votes count as read, and ranks list options that differ.

        Raises RuntimeError, the same on every rank, if no rank takes the step, or one of its buckets, which
        breaks the optimizer if others were taken. But if votes count, a rank raises its own error.
        """
        votes, taken, self.last = self._unread, 0, Read(0)
        if counts:
            self._unread = []
        for vote in votes:
            if vote.event is not None:
                vote.event.synchronize()
            words = vote.vector[-_FLAGS - 2 * _EQUAL :].tolist()
            self.last = Read(taken, *map(bool, words[-_FLAGS:-2]), vote.vector[: -len(words)])
            problem = self._find_problem(words, counts)
            if problem is not None:
                which = "all ranks have taken in part" if taken else "no rank has taken"
                prefix = "" if at_once else f"of the last step, which {which}: "
                self._shards.is_between = False
                if taken:
                    self._shards.mark_broken("step()", RuntimeError(prefix + problem))
                # Marked: a closure that calls clip_grad_norm_ must not bring it to another vote. A variable
                # would be in a reference cycle with its traceback.
                raise raised_by_all((counts and vote.error.take()) or RuntimeError(prefix + problem))
            taken += not vote.is_clip
            self.last = self.last._replace(taken=taken)
        if counts and not at_once:
            self.steps += taken > 0

    def raise_own(self) -> None:
        """Raise the error of this rank in a vote that the host has not read: of clip_grad_norm_."""
        for vote in self._unread:
            vote.error.raise_if_any()

    def forget(self, steps: int) -> None:
        """Before a load: forget the votes that the host has not read. steps: how many were taken by now."""
        self._unread, self.steps = [], steps
        self.decision.refused.zero_()

    def _find_problem(self, words: list[float], lists: bool) -> str | None:
        """Why no rank takes the step, the same text on every rank; None if all do. lists: whether ranks list
        options that differ, which is collective.
        """
        equal, minus, failed = words[:_EQUAL], words[_EQUAL : 2 * _EQUAL], words[-1]
        if failed:
            return f"rank {int(failed) - 1} found an error, and no rank takes this step"
        high, low = Call(*equal[:-1]), Call(*(-word for word in minus[:-1]))
        if low.is_clip != high.is_clip:
            return "some ranks called clip_grad_norm_ and others step(): no rank does either"
        if low.reduces != high.reduces:
            return (
                "some ranks have gradients to reduce and others have reduced theirs in clip_grad_norm_: call "
                "clip_grad_norm_ and zero_grad() on every rank or on none, and zero_grad() on all to start "
                "anew"
            )
        if low.step != high.step:
            return (
                f"the ranks are out of step: some have taken {int(low.step)} steps and others "
                f"{int(high.step)}; load the same state on all of them"
            )
        if low.passes != high.passes:
            return (
                f"offload_gradients has added up from {int(low.passes)} to {int(high.passes)} backward "
                "passes: run as many on every rank, and call zero_grad() on every rank or on none"
            )
        for name in ("max_norm", "norm_type"):
            values = getattr(low, name), getattr(high, name)
            if values[0] != values[1]:
                return f"{name} must be the same on every rank, got from {values[0]} to {values[1]}"
        if low.options != high.options or equal[-1] != -minus[-1]:
            listed = self._list_options() if lists else None  # None: they are equal again
            return listed or "options of param_groups differed between ranks"
        return None

    def _list_options(self) -> str | None:
        """The options in which rank 0 and the first other rank differ; None if none does. Collective."""
        shown = exchange(show_options(self._inners.param_groups), None, self._group(), "comparing options")
        rank = next((rank for rank, other in enumerate(shown) if other != shown[0]), None)
        if rank is None:
            return None
        own, other = (
            ", ".join(option for option in shown[r] if option not in shown[rank - r]) or "none"
            for r in (0, rank)
        )
        rule = "options of param_groups must be the same on every rank"
        return f"{rule}: rank 0 has {own}; rank {rank} has {other}"

    # The decision on the device

    def decide(
        self,
        word: torch.Tensor | None,
        *,
        is_shared: bool = False,
        found_inf: torch.Tensor | None = None,
        looks: bool = True,
        bucket: int | None = None,
    ) -> None:
        """Write the decision that the update and the cast read, after the vote of several ranks.

        word: as of begin(); it counts in a world of one.
        is_shared: whether it is the largest of all ranks instead, found after the vote.
        found_inf: of the optimizer, in a step; None in a clip.
        looks: whether gradients are averaged now; otherwise an earlier vote has looked for a NaN or Inf.
        bucket: the number of its parameters, if the vote is on one bucket of a step.

        With on_nonfinite="raise" waits for the device, and raises FloatingPointError for a NaN or Inf; not
        while a CUDA graph is captured, whose update reads the decision.
        """
        decision, vote, count = self.decision, None, 0
        if self.world_size > 1:
            count = len(self.labels) if bucket is None else bucket
            vote = self._vector[-count - 2 * _EQUAL - _FLAGS :]
            if is_shared:
                vote[-2] = word
        elif looks and word is None:
            decision.own.zero_()
        elif looks and word is not decision.own:
            decision.own.copy_(word)
        raises = self._raises and looks and not ops.is_capturing(self._vector.device)
        decision.decide(
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

    def presence(self, by_bucket: bool) -> dict[torch.Tensor, torch.Tensor]:
        """By master that an optimizer updates, float64 [1] where the master is: 0 if no rank has a
        gradient, or the step changes nothing. by_bucket: whether each bucket has a vote of its own; they
        share these flags.
        """
        count, positions = len(self.labels), dict(enumerate(self.slots))
        for bucket in self._shards.buckets if by_bucket else ():
            positions |= zip(bucket.indices, range(count - len(bucket.indices), count), strict=True)
        optimized, offloaded = self._shards.optimized, self._shards.offloaded
        flags, on_host = self.decision.present, self._shards.offload.present
        return {
            m: (on_host if i in offloaded else flags)[position:][:1]
            for i, position in positions.items()
            for m in optimized[i]
        }

    def count_step(self) -> None:
        """A step ends, skipped or not. If its vote is unread, it counts once the host knows."""
        if not self._unread:
            self.steps += 1

    def look(self) -> int:
        """Wait for an unread vote, whose error the next step raises. Returns the number of steps taken."""
        with contextlib.suppress(RuntimeError):
            self.read(counts=False)
            return self.steps + (self.last.taken > 0)
        return self.steps

    def first_nonfinite(self) -> str | None:
        """The name, in messages, of the first parameter with a NaN or Inf; None if there is none."""
        word = self.decision.first.item()
        if word == FOUND_INF:
            return "the optimizer of the masters, which was given a found_inf"
        return self.labels[len(self.labels) - word // 2] if word else None

    def check_one_rank_has_all(self, call: str) -> None:
        """Raise ValueError, on every rank, if no rank trains all parameters, as `call` needs."""
        if len(self.labels) > len(self.slots):
            raise ValueError(
                f"{call} needs a rank that trains all parameters, and other ranks train other parameters "
                "(experts, slices, stages): save with torch.distributed.checkpoint, or write what "
                "master_state_dict gives on a rank of each process group"
            )


# The gradients of this rank


class Clipped(NamedTuple):
    """The gradients that clip_grad_norm_ has averaged for the next step."""

    gradients: ops.Versions
    factor: torch.Tensor  # float32 [], by which they are still to be multiplied


class OwnGradients:
    """The gradients of this rank's trainable parameters, where backward passes leave them."""

    def __init__(
        self,
        shards: ShardedParameters,
        exchanges: Sequence[BucketExchange],
        agreement: Agreement,
        inners: InnerOptimizers,
    ):
        self._shards, self._exchanges, self._inners = shards, exchanges, inners
        self._world_size = agreement.world_size
        self._wire = exchanges[0].bucket.wire  # a gradient that it makes infinite counts as infinite
        is_alone = self._world_size == 1 and all(one.memory is None for one in exchanges)
        self.are_means = is_alone and not shards.offload.sums
        """Whether gradients are their own means, in p.grad: in a world of one if nothing rounds them."""
        # The sums of the squares of the means, for their norm:
        self.squares = torch.zeros(ops.SQUARES, dtype=torch.int64, device=shards.found_inf.device)
        self.clipped: Clipped | None = None
        """The gradients of the next step, if clip_grad_norm_ has averaged them."""
        self.scaler_found_inf: torch.Tensor | None = None  # the found_inf of a GradScaler
        self.unscaled: ops.Versions | None = None
        """The gradients that a step has divided by the scale of a GradScaler, until it has used them."""
        self._words, self._word = agreement.words, agreement.decision.own
        self.launches: ops.MultiTensor | None = None
        """Reads all gradients where they are; None unless they are sent as they are."""
        self._kinds: Any = None
        """TensorFacts.kinds of the gradients that were checked last: others of equal kinds need no check."""

    def collect(self) -> Gradients:
        """p.grad of all trainable parameters. Raises for one that cannot be sent."""
        gradients = ops.gradients_of(self._shards.parameters)
        facts = ops.plain_facts(gradients)
        is_known = facts is not None and facts.kinds == self._kinds
        if not is_known:
            self._kinds = self.launches = None
        for one in self._exchanges:
            check_gradients(one, [gradients[i] for i in one.bucket.indices], is_known)
        if not is_known and facts is not None:
            self._kinds = facts.kinds
            sent_as = {i: one.bucket.sent_as for one in self._exchanges for i in one.bucket.indices}
            present = [(g, sent_as[i]) for i, g in enumerate(gradients) if g is not None]
            if set(sent_as.values()) <= set(WEIGHT_DTYPES) and all(itertools.starmap(is_sendable, present)):
                self.launches = ops.MultiTensor(gradients, self._words)
        if self.launches is not None:
            self.launches.addresses = facts.addresses
        return gradients

    def to_average(self, gradients: Gradients, reduces: bool) -> Gradients | None:
        """Gradients as a step or clip sends or reads them; None if they are averaged already."""
        if not (reduces or self.are_means):
            return None
        if self.launches is not None or self._shards.offload.sums:
            return gradients
        found: list[torch.Tensor | None] = list(gradients)
        for one in self._exchanges:
            indices = one.bucket.indices
            for i, gradient in zip(indices, in_place(one, [gradients[i] for i in indices]), strict=True):
                found[i] = gradient
        return found

    def means(self, gradients: Gradients) -> list[torch.Tensor]:
        """This rank's part of the averaged gradients. Of several ranks with the same part, one counts."""
        if self.are_means:
            return [gradient for gradient in gradients if gradient is not None]
        return [bucket.gradients[bucket.part] for bucket in self._shards.buckets if bucket.is_counted]

    def find_word(
        self, gradients: Gradients, in_means: bool = False, known: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """scan() of all gradients, for the vote, or FOUND_INF of users and GradScalers. None if the optimizer
        of the masters could not read it in a CUDA graph. Waits for nothing.

        in_means: whether to look in this rank's slices of the means instead, if their `squares` count one.
        known: the word of the gradients, if they were scanned before.
        """
        device = self.squares.device
        if self._world_size == 1 and ops.is_capturing(device) and not self._inners.heed_found_inf():
            return None
        when = self.squares[:, -2:].sum(0) if in_means else None
        if in_means and not self.are_means:
            word = self._find_in_means(when)
        elif known is not None:
            word = known
        elif self.launches is None:
            word = self.scan(range(len(self._words)), gradients, when)
        else:
            word = self._word
            self.launches.find_nonfinite(word.zero_(), when)
        for flag in (self._inners.found_inf(), self.scaler_found_inf):
            if isinstance(flag, torch.Tensor):
                word = torch.maximum(word, (flag.reshape(()).to(device) != 0).int() * FOUND_INF)
        return word

    def _find_in_means(self, when: torch.Tensor) -> torch.Tensor:
        """scan() of this rank's slices of the means, on the device and on the host."""
        word = self._word.zero_()
        for device, launches in self._means_launches.items():
            found = word if device == word.device else torch.zeros_like(word, device=device)
            launches.find_nonfinite(found, when.to(device))
            word = torch.maximum(word, found.to(word.device))
        return word

    @functools.cached_property
    def _means_launches(self) -> dict[torch.device, ops.MultiTensor]:
        """By device, reads this rank's slices of the means there."""
        owned: dict[torch.device, list[tuple[torch.Tensor, int]]] = {}
        for bucket in self._shards.buckets:
            pairs = zip(bucket.gradient_views, bucket.indices, strict=True)
            owned.setdefault(bucket.home, []).extend((view, i) for view, i in pairs if view is not None)
        made = {}
        for device, pairs in owned.items():
            made[device] = ops.MultiTensor([view for view, _ in pairs], [self._words[i] for _, i in pairs])
            made[device].addresses = ops.pointers([view for view, _ in pairs])
        return made

    def scan(
        self, indices: Iterable[int], gradients: Gradients, when: torch.Tensor | None = None
    ) -> torch.Tensor:
        """int32 [] on the device: the word of the first gradient with a NaN or Inf, once it is rounded to the
        wire's dtype; 0 if there is none. Gradients may have any layouts and dtypes.

        indices: of their parameters. when: as of ops.find_nonfinite().
        """
        plain: list[tuple[int, torch.Tensor]] = []
        others: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
        most = torch.finfo(self._wire or torch.float32).max  # what rounding makes infinite is not plain
        read = {dtype for dtype in WEIGHT_DTYPES if torch.finfo(dtype).max <= most}
        for i, g in zip(indices, gradients, strict=True):
            if g is not None and g.numel():
                word = self._words[i]
                is_plain = g.dtype in read and is_sendable(g, g.dtype)
                (plain if is_plain else others.setdefault(g.dtype, [])).append((word, g))
        found = torch.zeros((), dtype=torch.int32, device=self.squares.device)
        ops.find_nonfinite([g for _, g in plain], [word for word, _ in plain], found, when)
        for own, rest in others.items():
            dtype = self._wire or (own if own in WEIGHT_DTYPES else torch.float32)
            # The largest element is finite in that dtype if all are.
            largest = torch.stack(torch._foreach_norm([g for _, g in rest], float("inf")))
            # In the arguments of a kernel: a replayed CUDA graph may find memory of the host changed.
            bad = torch.zeros(len(rest), dtype=torch.int32, device=largest.device)
            torch._foreach_add_(bad.unbind(), [word for word, _ in rest])
            found = torch.maximum(found, bad.masked_fill_(largest.to(dtype).isfinite(), 0).max())
        return found

    def add_squares(self, means: Sequence[torch.Tensor]) -> None:
        """Add to `squares` the squares of gradients that are their own means."""
        if self.launches is None:
            ops.add_squares(means, self.squares)
        else:
            self.launches.add_squares(self.squares)


# The norm


def global_norm(
    means: Iterable[torch.Tensor],
    p: float,
    group: dist.ProcessGroup | None,
    squares: torch.Tensor,
    word: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The p-norm of the averaged gradients of all ranks, float32 [], and the largest word; one all-reduce.

    means, squares, word: of OwnGradients. The 2-norm is made of squares, and does not depend on the number of
        ranks. Other norms add up in float64, and may round to another float32 in another world.
    """
    rank, size = rank_and_size(group)
    if p == 2.0:
        own = squares.sum(0)
    else:
        parts = [part for mean in means if mean.numel() for part in mean.view(-1).split(CHUNK)]
        norms = [torch.linalg.vector_norm(part, p, dtype=torch.float64).to(squares.device) for part in parts]
        own = torch.zeros(size, dtype=torch.float64, device=squares.device)
        own[rank] = torch.linalg.vector_norm(torch.stack([own[rank], *norms]), p)
    words = torch.zeros(size, dtype=own.dtype, device=own.device)
    if word is not None:
        words[rank] = word
    shared = torch.cat([own, words])
    if group is not None:
        with Stage("finding the norm of the gradients", group):
            dist.all_reduce(shared, group=group)
    total, words = shared.split([len(own), size])
    norm = ops.norm_of_squares(total) if p == 2.0 else torch.linalg.vector_norm(total, p).float()
    return norm, words.max()
