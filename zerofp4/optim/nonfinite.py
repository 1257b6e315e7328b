"""Gradients that hold a NaN or Inf, found before an update, in one pass over them."""

from collections.abc import Sequence

import torch

from zerofp4.ops import is_capturing
from zerofp4.optim.flat import FlatBuffer

POLICIES = ("skip_step", "raise")
"""What on_nonfinite may be."""


class NonfiniteGradients:
    """What is known of the gradients that were reduced last, and what follows from it.

    policy: one of POLICIES. names: what messages call the parameters. buffers: where gradients are reduced
    to. first: the position of the first parameter whose gradient holds a NaN or Inf on any rank, None if none
    does.
    """

    def __init__(self, policy: str, names: Sequence[str], buffers: Sequence[FlatBuffer]):
        self._policy, self._names, self._buffers = policy, names, buffers
        self._alone = buffers[0].world_size == 1
        self.first: int | None = None

    @property
    def first_name(self) -> str | None:
        return None if self.first is None else self._names[self.first]

    def word(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """What this rank votes. None in a world of one, which looks at what was packed instead."""
        return None if self._alone else first_nonfinite(gradients)

    def look_at_reduced(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """In a world of one these are the rank's own gradients. Waits for the device: in a step that a CUDA
        graph captures nothing is looked at.
        """
        if not self._alone or is_capturing(self._buffers[0].device):
            return
        if not all_finite(self._buffers):
            self.first = from_word(first_nonfinite(gradients).item(), len(gradients))

    def raise_if_asked(self) -> None:
        """Raises FloatingPointError if there are some and the policy is to raise."""
        if self.first is None or self._policy != "raise":
            return
        error = FloatingPointError(
            f"the gradient of {self.first_name} holds a NaN or Inf on some rank, and on_nonfinite is "
            "'raise'; no rank takes this step"
        )
        error.all_ranks_raise = True
        raise error


def check_policy(on_nonfinite: str) -> None:
    if on_nonfinite not in POLICIES:
        raise ValueError(f"on_nonfinite must be one of {POLICIES}, got {on_nonfinite!r}")


def first_nonfinite(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """float64 [] on the gradients' device: the word of the first gradient with a NaN or Inf, for from_word();
    0 where there is none. None without gradients. Waits for nothing.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, gradient in enumerate(gradients):
        if gradient is not None and gradient.numel():
            by_dtype.setdefault(gradient.dtype, []).append(i)
    found = []
    for indices in by_dtype.values():
        finite = _are_finite([gradients[i] for i in indices])
        words = torch.tensor([len(gradients) - i for i in indices], dtype=torch.float64, device=finite.device)
        found.append(words.masked_fill_(finite, 0.0).max())
    return torch.stack(found).max() if found else None


def from_word(word: float, count: int) -> int | None:
    """The position that a word stands for, of `count`: the larger the word, the earlier it is, so that a
    maximum over ranks is the first.
    """
    return count - int(word) if word else None


def all_finite(buffers: Sequence[FlatBuffer]) -> bool:
    """Whether the gradients of flat buffers hold no NaN or Inf. Waits for the device."""
    gradients = [buffer.gradients for buffer in buffers if buffer.slice_numel]
    ends = [end for flat in gradients for end in torch.aminmax(flat)]
    return not ends or bool(torch.stack(ends).isfinite().all())


def _are_finite(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """bool [n], of gradients of one dtype."""
    if gradients[0].is_cuda:
        return torch.stack(torch._foreach_norm(gradients, float("inf"))).isfinite()
    # On the CPU a maximum of magnitudes takes eight times as long. Both ends are NaN where an element is.
    ends = [end for gradient in gradients for end in torch.aminmax(gradient)]
    return torch.stack(ends).view(-1, 2).isfinite().all(dim=1)
