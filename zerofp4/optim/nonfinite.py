"""Gradients that hold a NaN or Inf, found before an update, in one pass over them."""

from collections.abc import Sequence

import torch

from zerofp4.engine import FlatBuffer, are_sendable, is_sendable
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.ops import find_nonfinite, is_capturing
from zerofp4.optim.announcement import Slots
from zerofp4.optim.inner_optimizers import InnerOptimizers
from zerofp4.optim.sharded import ShardedParameters

POLICIES = ("skip_step", "raise")
"""What on_nonfinite may be."""

PACKED, REMEMBERED = 1.0, 2.0
"""What `found` may be in a world of one, where there are some: they are where they were packed, or the host
knows which is the first. It is on the device since a CUDA graph that is replayed writes it.
"""


BEGINNING = 16
"""So many gradients are handed to a GPU first, which reads them while the host looks at the others."""


class NonfiniteGradients:
    """What is known of the gradients that were reduced last, and what follows from it.

    policy: one of POLICIES. shards: the parameters, and where their gradients are reduced to. slots: their
    places among those of all ranks. world_size: of all ranks that step together. inners: the optimizers of
    the masters. wire: what gradients are rounded to on their way, None for their own dtype: one
    that this rounds to infinity is infinite, in a world of any size.

    found: float32 [] on the device, not 0 where the gradients of any rank hold a NaN or Inf. An update reads
    it there. In a world of one the host does not know it, and what it counts and names is read when somebody
    asks, or wants to write to where the gradients were packed; several ranks have heard it in their vote.
    """

    def __init__(
        self,
        policy: str,
        shards: ShardedParameters,
        slots: Slots,
        world_size: int,
        inners: InnerOptimizers,
        wire: torch.dtype | None,
    ):
        self._policy, self._shards, self._inners, self._wire = policy, shards, inners, wire
        self._slots, self._alone, self._device = slots, world_size == 1, shards.buffers[0].device
        self._words = [len(slots.labels) - slot for slot in slots.own]
        self.found = torch.zeros((), dtype=torch.float32, device=self._device)
        self._skipped = torch.zeros((), dtype=torch.float64, device=self._device)
        self._first: int | None = None
        self._heard: torch.Tensor | None = None
        """float64 []: the word that all ranks heard last, once a CUDA graph may write it."""

    @property
    def skipped(self) -> int:
        """How many steps were skipped. Waits for the device."""
        return int(self._skipped.item())

    @property
    def first_name(self) -> str | None:
        """What messages call the first parameter whose gradient held a NaN or Inf; None if none did. Waits
        for the device in a world of one, and where steps of several ranks were captured.
        """
        if self._heard is not None:
            self._first = from_word(self._heard.item(), len(self._slots.labels))
        found = self.found.item() if self._alone else REMEMBERED
        first = self._look() if found == PACKED else self._first if found else None
        return None if first is None else self._slots.labels[first]

    def remember(self) -> None:
        """Before others write to where gradients were packed. In a world of one it waits for the device."""
        if self._alone and self.found.item() == PACKED:
            self._first = self._look()
            self.found.fill_(REMEMBERED)

    def _look(self) -> int | None:
        """They are still where they were packed: a step that writes there looks at them."""
        return from_word(first_nonfinite(self._shards.gradients).item(), len(self._words))

    def word(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """What this rank votes. None in a world of one, which looks at what was packed instead."""
        return None if self._alone else first_nonfinite(gradients, self._wire, self._words)

    def hear(self, first: int | None) -> None:
        """Of a vote: the slot of the first parameter whose gradient holds a NaN or Inf on any rank."""
        if not self._alone:
            # It is what the last call wrote, unless a CUDA graph writes it.
            is_zero = self._heard is None and self._first is None
            self._first = first
            if first is not None or not is_zero:  # else nothing is queued in front of an update
                self.found.fill_(first is not None)
            if self._heard is not None:
                self._heard.fill_(0 if first is None else len(self._slots.labels) - first)

    def hear_on_device(self, word: torch.Tensor) -> None:
        """As hear(), of several ranks in a CUDA graph: the word of that parameter, [] on the device."""
        if self._heard is None:
            self._heard = torch.zeros((), dtype=torch.float64, device=self._device)
        self._heard.copy_(word)
        self.found.copy_(word != 0)

    def look_at_packed(self) -> None:
        """In a world of one these are the rank's own gradients. Waits for nothing: where a CUDA graph is
        captured and the optimizer of the masters cannot be told on the device, nothing is looked for.
        """
        if not self._alone:
            return
        if is_capturing(self._device) and not self._inners.heed_found_inf():
            self.found.zero_()
        else:
            self.found.copy_(are_nonfinite(self._shards.buffers))

    def raise_if_asked(self) -> None:
        """Raises FloatingPointError if there are some and the policy is to raise. Then it waits for the
        device in a world of one, and leaves it to the update where a CUDA graph is captured.
        """
        if self._policy != "raise" or is_capturing(self._device):
            return
        name = self.first_name
        if name is None:
            return
        error = FloatingPointError(
            f"the gradient of {name} holds a NaN or Inf on some rank, and on_nonfinite is 'raise'; no rank "
            "takes this step"
        )
        error.all_ranks_raise = True
        raise error

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
        words = torch.tensor([word for word, _ in pairs], dtype=torch.int32, device=finite.device)
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
    dtype = rounded_to or gradients[0].dtype
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


def are_nonfinite(buffers: Sequence[FlatBuffer]) -> torch.Tensor:
    """bool [] on the device: whether the gradients of flat buffers hold a NaN or Inf. Waits for nothing."""
    gradients = [buffer.gradients for buffer in buffers if buffer.slice_numel]
    ends = [end for flat in gradients for end in torch.aminmax(flat)]
    if not ends:
        return torch.zeros((), dtype=torch.bool, device=buffers[0].device)
    return torch.stack(ends).isfinite().all().logical_not_()
