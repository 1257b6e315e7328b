"""What a step and a clip look for in gradients before an update: a NaN or Inf, and their norm."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofp4 import ops
from zerofp4.distributed import Stage, raised_by_all, reduce_max
from zerofp4.engine import ALIGNMENT, are_sendable, is_sendable
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.ops import find_nonfinite, is_capturing
from zerofp4.optim.build import Slots

BEGINNING = 16
"""So many gradients are handed to a GPU first, which reads them while the host looks at the others."""

NORM = "finding the norm of the gradients"
"""The stage of global_norm()."""

FOUND_INF = 0.5
"""The word of a found_inf that a user gave the optimizer of the masters: below those of all parameters."""


class NonfiniteGradients:
    """The first parameter whose gradient held a NaN or Inf, on any rank, when gradients were averaged last.

    A word stands for a parameter: the larger the word, the earlier the parameter; 0 for none. So a maximum
    over ranks is the first one. Words and counts stay on the device; the properties wait for it.

    policy: "skip" or "raise".
    slots: the positions of the parameters among those of all ranks.
    device: where gradients are.
    wire: the dtype that gradients are rounded to when they are sent, None for their own. A gradient that
        becomes infinite by it counts, in a world of any size.
    """

    def __init__(self, policy: str, slots: Slots, device: torch.device, wire: torch.dtype | None):
        self.policy, self._wire, self._device = policy, wire, device
        self._labels = [*slots.labels, "the optimizer of the masters, which was given a found_inf"]
        self._words = [len(slots.labels) - slot for slot in slots.own]
        self._word = torch.zeros((), dtype=torch.float64, device=device)
        self.found = torch.zeros((), dtype=torch.float32, device=device)
        """1 where the word is not 0. The update reads it on the device."""
        self._skipped = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def skipped(self) -> int:
        """How many steps were skipped."""
        return int(self._skipped.item())

    @property
    def first_name(self) -> str | None:
        """What messages call the first parameter with a NaN or Inf; None if there is none."""
        first = from_word(self._word.item(), len(self._labels) - 1)
        return None if first is None else self._labels[first]

    def word(
        self,
        gradients: Sequence[torch.Tensor | None],
        indices: Sequence[int] | None = None,
        found_inf: torch.Tensor | None = None,
        when: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """The word of this rank's gradients, on the device; None without gradients. Waits for nothing.

        indices: which trainable parameters the gradients are of; None for all.
        found_inf: what a user gave the optimizer of the masters.
        when: int64 [2] on the device: where both are 0, there is no NaN or Inf, and the gradients are not
            looked at for it.
        """
        words = self._words if indices is None else [self._words[i] for i in indices]
        word = first_nonfinite(gradients, self._wire, words, when)
        if found_inf is None:
            return word
        given = (found_inf.reshape(()).to(self._device) != 0).double() * FOUND_INF
        return given if word is None else torch.maximum(word.double(), given)

    def hear(self, word: torch.Tensor | None) -> None:
        """The word of all ranks, on the device, is this; None is that of no parameter."""
        if word is None:
            self._word.zero_()
        else:
            self._word.copy_(word)
        self.found.copy_(self._word != 0)

    def raise_if_asked(self) -> None:
        """Raise FloatingPointError for a NaN or Inf if the policy is "raise", which waits for the device.
        Nothing is raised while a CUDA graph is captured, whose update reads `found`.
        """
        if self.policy != "raise" or is_capturing(self._device):
            return
        name = self.first_name
        if name is not None:
            raise raised_by_all(
                FloatingPointError(
                    f"the gradient of {name} holds a NaN or Inf on some rank, and on_nonfinite is 'raise'; "
                    "no rank takes this step"
                )
            )

    def count(self) -> None:
        """A step ends, skipped or not."""
        self._skipped.add_(self.found)


def first_nonfinite(
    gradients: Sequence[torch.Tensor | None],
    rounded_to: torch.dtype | None = None,
    words: Sequence[int] | None = None,
    when: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """int32 [] on the gradients' device: the word of the first gradient with a NaN or Inf, for from_word(),
    once it is rounded to a dtype, None for its own; 0 where there is none. None without gradients. Waits for
    nothing.

    words: of each gradient, the larger the earlier; None is for their own order.
    when: as of ops.find_nonfinite().
    """
    if words is None:
        words = range(len(gradients), 0, -1)
    pairs = zip(words, gradients, strict=True)
    present = [(word, g) for word, g in pairs if g is not None and g.numel()]
    if not present:
        return None
    found = torch.zeros((), dtype=torch.int32, device=present[0][1].device)
    for some in filter(None, (present[:BEGINNING], present[BEGINNING:])):
        found = _find_first(some, rounded_to, found, when)
    return found


def _find_first(
    present: Sequence[tuple[int, torch.Tensor]],
    rounded_to: torch.dtype | None,
    found: torch.Tensor,
    when: torch.Tensor | None,
) -> torch.Tensor:
    """The largest of `found`, which may be raised, and the words of gradients with a NaN or Inf."""
    tensors = [g for _, g in present]
    dtypes = [g.dtype for g in tensors]
    if rounded_to is None and set(dtypes) <= set(WEIGHT_DTYPES) and are_sendable(tensors, dtypes):
        find_nonfinite(tensors, [word for word, _ in present], found, when)
        return found
    plain = [(word, g) for word, g in present if _keeps_its_values(g, rounded_to)]
    find_nonfinite([g for _, g in plain], [word for word, _ in plain], found, when)
    known = {word for word, _ in plain}
    others: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
    for word, g in present:
        if word not in known:
            others.setdefault(g.dtype, []).append((word, g))
    for own, pairs in others.items():
        dtype = rounded_to or (own if own in WEIGHT_DTYPES else torch.float32)
        # The largest element is finite in that dtype if all are.
        largest = torch.stack(torch._foreach_norm([g for _, g in pairs], float("inf")))
        # In the arguments of a kernel: a replayed CUDA graph may find memory of the host changed.
        words = torch.zeros(len(pairs), dtype=torch.int32, device=largest.device)
        torch._foreach_add_(words.unbind(), [word for word, _ in pairs])
        found = torch.maximum(found, words.masked_fill_(largest.to(dtype).isfinite(), 0).max())
    return found


def _keeps_its_values(gradient: torch.Tensor, rounded_to: torch.dtype | None) -> bool:
    """Whether find_nonfinite can look at it: its bytes, and rounding makes nothing infinite."""
    dtype = gradient.dtype
    if dtype not in WEIGHT_DTYPES or not is_sendable(gradient, dtype):
        return False
    return rounded_to is None or torch.finfo(rounded_to).max >= torch.finfo(dtype).max


def from_word(word: float, count: int) -> int | None:
    """The position that a word stands for, of `count`."""
    return count - int(word) if word else None


# The norm


def clip_arguments(max_norm: Any, norm_type: Any) -> tuple[float, float]:
    """Both as floats; raises ValueError for what is no number or cannot be a limit or a norm."""
    numbers = []
    for name, value, rule in (("max_norm", max_norm, "0 or more"), ("norm_type", norm_type, "positive")):
        try:
            number = float(value)
        except Exception:  # a value's own __float__ may raise anything
            raise ValueError(f"{name} must be a number, {rule}, got {value!r}") from None
        if not (number > 0 or (number == 0 and name == "max_norm")):
            raise ValueError(f"{name} must be {rule}, got {value!r}")
        numbers.append(abs(number))  # -0.0 is 0
    return numbers[0], numbers[1]


def global_norm(
    means: Iterable[torch.Tensor],
    p: float,
    group: dist.ProcessGroup | None,
    device: torch.device,
    squares: torch.Tensor | None = None,
) -> torch.Tensor:
    """The p-norm of the reduced gradients of all ranks, float32 []. Collective: one all-reduce.

    means: those that this rank counts, 1D, contiguous, cut at multiples of ALIGNMENT elements of a parameter
    or at its end. group: of all ranks that step together. squares: the sums that ops.average left of them.
    The 2-norm is that of exact sums of short ones, and does not depend on the number of ranks. For others
    FP32 sums are kept short and added up in float64: one long FP32 sum is off by percents for 10**8 elements.
    Those take a launch for each mean, or two: a rank alone has one for each gradient.
    """
    if p == 2.0:
        if squares is None:
            squares = torch.zeros(ops.SQUARES, dtype=torch.int64, device=device)
            ops.add_squares(list(means), squares)
        words = squares.sum(0)
        if group is not None:
            with Stage(NORM, group):
                dist.all_reduce(words, group=group)
        return ops.norm_of_squares(words)
    rows = [torch.linalg.vector_norm(short, p, dim=1, dtype=torch.float32) for short in _short_rows(means)]
    norms = torch.cat([*rows, torch.zeros(1, device=device)]).double()
    if p != math.inf:
        total = norms.pow(p).sum()
        if group is not None:
            with Stage(NORM, group):
                dist.all_reduce(total, group=group)
        return total.pow(1 / p).float()
    largest = norms.max()
    # Not every backend's MAX keeps a NaN, so it travels as a flag.
    pair = torch.stack([largest.where(~largest.isnan(), 0.0), largest.isnan().double()])
    reduce_max(pair, group, NORM)
    return pair[0].where(pair[1] == 0, math.nan).float()


def _short_rows(means: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Matrices of at most ALIGNMENT columns."""
    for mean in means:
        whole = mean.numel() // ALIGNMENT * ALIGNMENT
        yield from (
            part for part in (mean[:whole].view(-1, ALIGNMENT), mean[whole:].view(1, -1)) if part.numel()
        )
