"""The gradients of this rank: collected from p.grad, looked at for a NaN or Inf, and their norm."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerofp4 import ops
from zerofp4.distributed import Stage, rank_and_size
from zerofp4.engine import (
    BucketExchange,
    Gradients,
    are_as_sent,
    are_sendable,
    check_gradients,
    in_place,
    is_sendable,
)
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.optim.agreement import FOUND_INF, Agreement
from zerofp4.optim.sharded import ShardedParameters

_dtype = operator.attrgetter("dtype")


class Clipped(NamedTuple):
    """What clip_grad_norm_ leaves for the next step: the gradients that it has averaged, and float32 [], the
    factor that they are still to be multiplied by.
    """

    gradients: ops.Versions
    factor: torch.Tensor


class OwnGradients:
    """The gradients of this rank's trainable parameters, where backward passes leave them.

    exchanges: of the buckets.
    wire: the dtype that gradients are rounded to when they are sent, None for their own. One that becomes
        infinite by it counts, in a world of any size.
    """

    def __init__(
        self,
        shards: ShardedParameters,
        exchanges: Sequence[BucketExchange],
        agreement: Agreement,
        wire: torch.dtype | None,
    ):
        self._shards, self._exchanges, self._agreement, self._wire = shards, exchanges, agreement, wire
        self.are_means = agreement.world_size == 1 and all(one.memory is None for one in exchanges)
        """Whether they are their own means, in p.grad: in a world of one if nothing rounds them."""
        self.squares = torch.zeros(ops.SQUARES, dtype=torch.int64, device=shards.found_inf.device)
        """The sums of the squares of the means, for their norm."""
        self.scaler_found_inf: torch.Tensor | None = None
        """What a GradScaler has found in them."""
        self._words = agreement.words
        self.launches: ops.MultiTensor | None = None
        """What reads all of them where they are, if they are sent as they are."""
        self._in_means: ops.MultiTensor | None = None
        self._kinds: Any = None
        """TensorFacts.kinds of those that were checked last: gradients of equal kinds need no check."""

    def collect(self) -> Gradients:
        """p.grad of all trainable parameters. Raises for one that cannot be sent."""
        gradients = ops.gradients_of(self._shards.parameters)
        facts = ops.plain_facts(gradients)
        is_known = facts is not None and facts.kinds == self._kinds
        if not is_known:
            self._kinds = self.launches = None
        for exchange in self._exchanges:
            own = [gradients[i] for i in exchange.bucket.indices]
            names = [self._shards.names[i] for i in exchange.bucket.indices]
            check_gradients(exchange, own, names, is_known)
        if not is_known and facts is not None:
            self._kinds = facts.kinds
            if are_as_sent(self._exchanges, gradients):
                self.launches = ops.MultiTensor(gradients, self._words)
        if self.launches is not None:
            self.launches.addresses = facts.addresses
        return gradients

    def to_average(self, gradients: Gradients, reduces: bool) -> Gradients | None:
        """Gradients as this call sends or reads them; None if they are averaged already."""
        if not (reduces or self.are_means):
            return None
        return gradients if self.launches is not None else in_place(self._exchanges, gradients)

    def means(self, gradients: Gradients) -> list[torch.Tensor]:
        """This rank's part of the averaged gradients; of what several ranks have, one of them counts."""
        if self.are_means:
            return [gradient for gradient in gradients if gradient is not None]
        return [bucket.gradients[bucket.part] for bucket in self._shards.buckets if bucket.is_counted]

    def find_word(
        self,
        gradients: Gradients,
        indices: Sequence[int] | None = None,
        found_inf: torch.Tensor | None = None,
        in_means: bool = False,
    ) -> torch.Tensor | None:
        """int32 [] on the device, for the vote: the word of the first gradient with a NaN or Inf, 0 if there
        is none. None without gradients. Waits for nothing.

        indices: which parameters the gradients are of; None for all.
        found_inf: what a user gave the optimizer of the masters.
        in_means: whether to look in the means of this rank instead. Their `squares` count NaNs and Infs, so
            that they are read once more only if there is one.
        """
        when = self.squares[:, -2:].sum(0) if in_means else None
        launches = self._means_launches() if in_means and not self.are_means else self.launches
        if launches is None or indices is not None:
            words = self._words if indices is None else [self._words[i] for i in indices]
            word = first_nonfinite(gradients, words, self._wire, when)
        else:
            word = self._agreement.decision.own
            launches.find_nonfinite(word.zero_(), when)
        if found_inf is None:
            return word
        given = (found_inf.reshape(()).to(self.squares.device) != 0).int() * FOUND_INF
        return given if word is None else torch.maximum(word, given)

    def _means_launches(self) -> ops.MultiTensor:
        """What reads this rank's part of the means, whose memory stays."""
        if self._in_means is None:
            pairs = [zip(b.gradient_views, b.indices, strict=True) for b in self._shards.buckets]
            owned = [(view, i) for pair in pairs for view, i in pair if view is not None]
            self._in_means = ops.MultiTensor([view for view, _ in owned], [self._words[i] for _, i in owned])
            self._in_means.addresses = ops.pointers([view for view, _ in owned])
        return self._in_means

    def add_squares(self, means: Sequence[torch.Tensor]) -> None:
        """Add those of gradients that are their own means."""
        if self.launches is None:
            ops.add_squares(means, self.squares)
        else:
            self.launches.add_squares(self.squares)


# The norm

NORM = "finding the norm of the gradients"
_AT_ONCE = 1 << 22
"""So many elements have a copy in float64 at a time."""


def global_norm(
    means: Iterable[torch.Tensor],
    p: float,
    group: dist.ProcessGroup | None,
    squares: torch.Tensor,
    word: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The p-norm of the averaged gradients of all ranks, float32 [], and the largest word. Collective: one
    all-reduce.

    means: those that this rank counts, contiguous.
    squares: the sums that ops.average left of the means, for the 2-norm. It does not depend on the number of
        ranks. Other norms add up in float64, and differ between worlds where that rounds to another float32.
    word: as of OwnGradients.find_word(); None counts as 0.
    """
    rank, size = rank_and_size(group)
    if p == 2.0:
        own = squares.sum(0)
    else:
        parts = [part for mean in means if mean.numel() for part in mean.view(-1).split(_AT_ONCE)]
        norms = [torch.linalg.vector_norm(part, p, dtype=torch.float64) for part in parts]
        own = torch.zeros(size, dtype=torch.float64, device=squares.device)
        own[rank] = torch.linalg.vector_norm(torch.stack([own[rank], *norms]), p)
    words = torch.zeros(size, dtype=own.dtype, device=own.device)
    if word is not None:
        words[rank] = word
    shared = torch.cat([own, words])
    if group is not None:
        with Stage(NORM, group):
            dist.all_reduce(shared, group=group)
    total, words = shared.split([len(own), size])
    norm = ops.norm_of_squares(total) if p == 2.0 else torch.linalg.vector_norm(total, p).float()
    return norm, words.max()


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
    ops.find_nonfinite(plain, words, found, when)
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
