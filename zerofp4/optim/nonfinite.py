"""Gradients that hold a NaN or Inf, found before an update, in one pass over them."""

from collections.abc import Sequence

import torch

from zerofp4.distributed import raised_by_all
from zerofp4.engine import are_sendable, is_sendable
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.ops import find_nonfinite, is_capturing
from zerofp4.optim.build import Slots
from zerofp4.optim.inner import InnerOptimizers

POLICIES = ("skip_step", "raise")
"""What on_nonfinite may be."""

BEGINNING = 16
"""So many gradients are handed to a GPU first, which reads them while the host looks at the others."""


class NonfiniteGradients:
    """What is known of the gradients that were reduced last, and what follows from it.

    policy: one of POLICIES. slots: the places of the parameters among those of all ranks. world_size: of all
    ranks that step together. device: where gradients are. inners: the optimizers of the masters. wire: what
    gradients are rounded to on their way, None for their own dtype: one that this rounds to infinity is
    infinite, in a world of any size.

    found: float32 [] on the device, 1 where the gradients of any rank hold a NaN or Inf. An update reads it
    there. In a world of one the host does not know it, and what it counts and names is read when somebody
    asks; several ranks have heard it in their vote.
    """

    def __init__(
        self,
        policy: str,
        slots: Slots,
        world_size: int,
        device: torch.device,
        inners: InnerOptimizers,
        wire: torch.dtype | None,
    ):
        self._policy, self._inners, self._wire = policy, inners, wire
        self._slots, self._alone, self._device = slots, world_size == 1, device
        self._words = [len(slots.labels) - slot for slot in slots.own]
        self.found = torch.zeros((), dtype=torch.float32, device=device)
        self._skipped = torch.zeros((), dtype=torch.float64, device=device)
        self._first: int | None = None
        self._heard = torch.zeros((), dtype=torch.float64, device=device)
        """The word that all ranks heard last. Made here: what a CUDA graph makes holds nothing before its
        first replay.
        """
        self._is_on_device = False
        """Whether the host may not know it: in a world of one, and once a CUDA graph may write it."""

    @property
    def skipped(self) -> int:
        """How many steps were skipped. Waits for the device."""
        return int(self._skipped.item())

    @property
    def first_name(self) -> str | None:
        """What messages call the first parameter whose gradient held a NaN or Inf; None if none did. Waits
        for the device in a world of one, and where steps of several ranks were captured.
        """
        if self._is_on_device:
            self._first = from_word(self._heard.item(), len(self._slots.labels))
        return None if self._first is None else self._slots.labels[self._first]

    def word(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """What this rank votes, None where there is nothing to look at. Waits for nothing: a world of one
        that is captured in a CUDA graph does not look where the optimizer of the masters cannot be told on
        the device.
        """
        if self._alone and is_capturing(self._device) and not self._inners.heed_found_inf():
            return None
        return first_nonfinite(gradients, self._wire, self._words)

    def hear(self, first: int | None) -> None:
        """Of a vote: the slot of the first parameter whose gradient holds a NaN or Inf on any rank."""
        # It is what the last call wrote, unless a CUDA graph writes it.
        is_zero = self._first is None and not self._is_on_device
        self._first = first
        if first is not None or not is_zero:  # else nothing is queued in front of an update
            self.found.fill_(first is not None)
            self._heard.fill_(0 if first is None else len(self._slots.labels) - first)

    def hear_on_device(self, word: torch.Tensor | None) -> None:
        """As hear(), in a world of one, and of several ranks in a CUDA graph: the word of that parameter, []
        on the device; None is that of no parameter.
        """
        self._is_on_device = True
        if word is None:
            self._heard.zero_()
        else:
            self._heard.copy_(word)
        self.found.copy_(self._heard != 0)

    def raise_if_asked(self) -> None:
        """Raises FloatingPointError if there are some and the policy is to raise. Then it waits for the
        device in a world of one, and leaves it to the update where a CUDA graph is captured.
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

    def for_update(self) -> torch.Tensor | None:
        """What the optimizer of the masters is to read on the device; None where the host knows that there is
        nothing to find.
        """
        return self.found if self._alone and self._inners.heed_found_inf() else None

    def must_leave_out_update(self) -> bool:
        """Whether the host has to leave out the update of the masters. Waits for the device where their
        optimizer cannot be told there.
        """
        if not self._alone:
            return self._first is not None
        if self._inners.heed_found_inf() or is_capturing(self._device):
            return False
        return bool(self.found.item())

    def count(self) -> None:
        """A step ends, skipped or not."""
        self._skipped.add_(self.found)


def check_policy(on_nonfinite: str) -> None:
    if on_nonfinite not in POLICIES:
        raise ValueError(f"on_nonfinite must be one of {POLICIES}, got {on_nonfinite!r}")


def first_nonfinite(
    gradients: Sequence[torch.Tensor | None],
    rounded_to: torch.dtype | None = None,
    words: Sequence[int] | None = None,
) -> torch.Tensor | None:
    """int32 [] on the gradients' device: the word of the first gradient with a NaN or Inf, for from_word(),
    once it is rounded to a dtype, None for its own; 0 where there is none. None without gradients. Waits for
    nothing.

    words: of each gradient, the larger the earlier; None is for their own order.
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
            found = _look_at(some, rounded_to, found)
    return found


def _look_at(
    present: Sequence[tuple[int, torch.Tensor]], rounded_to: torch.dtype | None, found: torch.Tensor
) -> torch.Tensor:
    """The largest of `found`, which may be raised, and the words of gradients with a NaN or Inf."""
    tensors, plain = [g for _, g in present], present
    dtypes = [g.dtype for g in tensors]
    if rounded_to is not None or not set(dtypes) <= set(WEIGHT_DTYPES) or not are_sendable(tensors, dtypes):
        plain = [pair for pair in present if _holds_what_it_becomes(pair[1], rounded_to)]
    find_nonfinite([g for _, g in plain], [word for word, _ in plain], found)
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
