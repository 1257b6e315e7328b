"""The places of gradients: whose memory p.grad of a parameter lies in."""

import operator
from collections.abc import Sequence

import torch

from zerofp4.storage import dispatches

_dtype = operator.attrgetter("dtype")


def is_sendable(gradient: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether its memory holds its elements one after the other, as they travel."""
    return are_sendable([gradient], [dtype])


def are_sendable(gradients: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> bool:
    """Of every one. A step asks for hundreds: attribute by attribute, in loops in C."""
    return (
        list(map(_dtype, gradients)) == dtypes
        and not any(map(dispatches, gradients))
        and all(map(torch.Tensor.is_contiguous, gradients))
        and not any(map(torch.Tensor.is_neg, gradients))
        and not any(map(torch.Tensor._is_zerotensor, gradients))
    )


def is_same_memory(view: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether a gradient is where it travels from, as it travels."""
    return gradient.data_ptr() == view.data_ptr() and is_sendable(gradient, view.dtype)


def storage_address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class GradientPlaces:
    """Of all trainable parameters, the flat memory in which p.grad of each stays between two steps.

    A user may assign to a parameter what lies there for another: exchange two p.grad, share one, or turn one.
    A gradient that is moved to its place would then be written over one that has not left it yet. Two rules
    keep them all, whatever the order and the buckets: a backward pass moves nothing out of such memory
    (GradientViews), and a step clones what lies in the place of another before the ranks vote on it, so that
    a clone for which there is no memory is an error on every rank.
    """

    def __init__(self):
        self._views: dict[int, torch.Tensor] = {}
        self._of_storages: list[torch.Tensor] = []
        self._homes: dict[int, tuple[int, torch.dtype]] = {}
        self._addresses: list[int | None] = []
        self._storages: set[int] = set()

    def add(self, indices: Sequence[int], views: Sequence[torch.Tensor]) -> None:
        """views: the places of the gradients of parameters, whose positions among all are `indices`."""
        self._views |= dict(zip(indices, views, strict=True))
        self._of_storages.append(views[0])
        self._take_addresses()

    def _take_addresses(self) -> None:
        self._homes = {index: (view.data_ptr(), view.dtype) for index, view in self._views.items()}
        self._storages = {storage_address(view) for view in self._of_storages}
        self._addresses = [self._homes.get(i, (None,))[0] for i in range(max(self._homes, default=-1) + 1)]

    def hold(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient lies in this memory, in its own place or in that of another."""
        return not dispatches(gradient) and storage_address(gradient) in self._storages

    def keep_apart(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """p.grad of all trainable parameters, with clones where they lay in the place of another: these are
        p.grad from then on.
        """
        # It may have moved since, in place: share_memory_() of a p.grad takes all of it along.
        if any(storage_address(view) not in self._storages for view in self._of_storages):
            self._take_addresses()
        if not self._storages or self._are_at_home(gradients):
            return gradients
        kept = list(gradients)
        for i, gradient in enumerate(gradients):
            if gradient is not None and self.hold(gradient) and not self._is_at_home(i, gradient):
                kept[i] = gradient.detach().clone()
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, gradient, own in zip(parameters, gradients, kept, strict=True):
                if own is not gradient:
                    parameter.grad = own
        return kept

    def _are_at_home(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """What a step finds after a plain backward pass: in loops in C."""
        there = [gradient for gradient in gradients if gradient is not None]
        homes = self._addresses
        if len(there) < len(gradients):
            homes = [home for home, g in zip(homes, gradients, strict=False) if g is not None]
        return list(map(torch.Tensor.data_ptr, there)) == homes and all(
            map(torch.Tensor.is_contiguous, there)
        )

    def _is_at_home(self, i: int, gradient: torch.Tensor) -> bool:
        address, dtype = self._homes.get(i, (None, None))
        return gradient.data_ptr() == address and is_sendable(gradient, dtype)
