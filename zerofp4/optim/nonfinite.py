"""Gradients that hold a NaN or Inf, found before an update, in one pass over them."""

from collections.abc import Sequence

import torch

from zerofp4.distributed import raised_by_all
from zerofp4.engine import are_sendable, is_sendable
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.ops import find_nonfinite, is_capturing
from zerofp4.optim.build import Slots

BEGINNING = 16
"""So many gradients are handed to a GPU first, which reads them while the host looks at the others."""

FOUND_INF = 0.5
"""The word of a found_inf that a user gave the optimizer of the masters: below those of all parameters."""


class NonfiniteGradients:
    """What is known of a NaN or Inf in the gradients that were averaged last, and what follows from it.

    A word stands for a parameter: the larger the word, the earlier the parameter; 0 for none.

    policy: "skip_step" or "raise".
    slots: the places of the parameters among those of all ranks.
    device: where gradients are.
    wire: the dtype that gradients are rounded to when they are sent, None for their own. A gradient that
    becomes infinite by it counts, in a world of any size.
    """

    def __init__(self, policy: str, slots: Slots, device: torch.device, wire: torch.dtype | None):
        self._policy, self._wire, self._device = policy, wire, device
        self._labels = [*slots.labels, "the optimizer of the masters, which was given a found_inf"]
        self._words = [len(slots.labels) - slot for slot in slots.own]
        self.found = torch.zeros((), dtype=torch.float32, device=device)
        """1 where a gradient of any rank holds a NaN or Inf. The update reads it on the device."""
        self._skipped = torch.zeros((), dtype=torch.float64, device=device)
        self._word = torch.zeros((), dtype=torch.float64, device=device)
        """The largest of all ranks. Made here: what a CUDA graph makes holds nothing before its first replay.
        """
        self._first: int | None = None
        """What the host knows of it."""
        self._is_on_device = False
        """Whether the host may not know it: in a world of one, and once a CUDA graph may write it."""

    @property
    def skipped(self) -> int:
        """How many steps were skipped. Waits for the device."""
        return int(self._skipped.item())

    @property
    def first_name(self) -> str | None:
        """What messages call the first parameter with a NaN or Inf; None if there is none. Waits for the
        device where the host does not know it.
        """
        if self._is_on_device:
            self._first = from_word(self._word.item(), len(self._labels) - 1)
        return None if self._first is None else self._labels[self._first]

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

    def hear(self, first: int | None) -> None:
        """The ranks have agreed. first: the slot of the first parameter with a NaN or Inf on any rank."""
        # `found` is what the last call wrote, unless a CUDA graph writes it.
        is_zero = self._first is None and not self._is_on_device
        self._first = first
        if first is not None or not is_zero:  # else nothing is queued in front of an update
            self.found.fill_(first is not None)
            self._word.fill_(0 if first is None else len(self._labels) - 1 - first or FOUND_INF)

    def hear_on_device(self, word: torch.Tensor | None) -> None:
        """The same where the host does not know it: a word on the device; None is that of no parameter."""
        self._is_on_device = True
        if word is None:
            self._word.zero_()
        else:
            self._word.copy_(word)
        self.found.copy_(self._word != 0)

    def raise_if_asked(self) -> None:
        """Raise FloatingPointError for a NaN or Inf if the policy says so. Waits for the device where the
        host does not know it; does nothing while a CUDA graph is captured, whose update reads `found`.
        """
        if self._policy != "raise" or is_capturing(self._device):
            return
        name = self.first_name
        if name is None:
            return
        raise raised_by_all(
            FloatingPointError(
                f"the gradient of {name} holds a NaN or Inf on some rank, and on_nonfinite is 'raise'; no "
                "rank takes this step"
            )
        )

    def must_skip(self, reads_found: bool) -> bool:
        """Whether the host leaves out the update. reads_found: whether the update reads `found` on the
        device; if not, the host waits for it.
        """
        if not self._is_on_device:
            return self._first is not None
        return not reads_found and not is_capturing(self._device) and bool(self.found.item())

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
    for some in (present[:BEGINNING], present[BEGINNING:]):
        if some:
            found = _look_at(some, rounded_to, found, when)
    return found


def _look_at(
    present: Sequence[tuple[int, torch.Tensor]],
    rounded_to: torch.dtype | None,
    found: torch.Tensor,
    when: torch.Tensor | None,
) -> torch.Tensor:
    """The largest of `found`, which may be raised, and the words of gradients with a NaN or Inf."""
    tensors, plain = [g for _, g in present], present
    dtypes = [g.dtype for g in tensors]
    if rounded_to is not None or not set(dtypes) <= set(WEIGHT_DTYPES) or not are_sendable(tensors, dtypes):
        plain = [pair for pair in present if _holds_what_it_becomes(pair[1], rounded_to)]
    find_nonfinite([g for _, g in plain], [word for word, _ in plain], found, when)
    if len(plain) == len(present):
        return found
    known = {word for word, _ in plain}
    others: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
    for word, g in present:
        if word not in known:
            others.setdefault(g.dtype, []).append((word, g))
    for pairs in others.values():
        finite = _are_finite([g for _, g in pairs], rounded_to)
        # In the arguments of a kernel: a replayed CUDA graph may find memory of the host changed.
        words = torch.zeros(len(pairs), dtype=torch.int32, device=finite.device)
        torch._foreach_add_(words.unbind(), [word for word, _ in pairs])
        found = torch.maximum(found, words.masked_fill_(finite, 0).max())
    return found


def _holds_what_it_becomes(gradient: torch.Tensor, rounded_to: torch.dtype | None) -> bool:
    """Whether find_nonfinite can look at it: its bytes, and rounding makes nothing infinite."""
    dtype = gradient.dtype
    if dtype not in WEIGHT_DTYPES or not is_sendable(gradient, dtype):
        return False
    return rounded_to is None or torch.finfo(rounded_to).max >= torch.finfo(dtype).max


def _are_finite(gradients: Sequence[torch.Tensor], rounded_to: torch.dtype | None) -> torch.Tensor:
    """bool [n], of gradients of one dtype, once they are rounded: if not all are, the largest is not."""
    own = gradients[0].dtype
    dtype = rounded_to or (own if own in WEIGHT_DTYPES else torch.float32)
    if gradients[0].is_cuda:
        return torch.stack(torch._foreach_norm(gradients, float("inf"))).to(dtype).isfinite()
    # On the CPU a maximum of magnitudes takes eight times as long. Both ends are NaN where an element is.
    ends = [end for gradient in gradients for end in torch.aminmax(gradient)]
    return torch.stack(ends).to(dtype).view(-1, 2).isfinite().all(dim=1)


def from_word(word: float, count: int) -> int | None:
    """The position that a word stands for, of `count`: the larger the word, the earlier it is, so that a
    maximum over ranks is the first.
    """
    return count - int(word) if word else None
