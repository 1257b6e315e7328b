"""Flat memory for the gradients of a bucket. p.grad can alias it, so that nothing is packed before it is
sent.
"""

import functools
import operator
import weakref
from collections.abc import Sequence

import torch

from zerofp4.engine.flat import FlatBuffer
from zerofp4.storage import any_dispatches, dispatches
from zerofp4.tensors import GradientPlace

_dtype, _grad, _version = map(operator.attrgetter, ("dtype", "grad", "_version"))


def attributes(get: operator.attrgetter, tensors: Sequence[torch.Tensor]) -> list:
    """An attribute of every tensor, without __torch_function__ of quantized ones, which costs ten times as
    much.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(get, tensors))


def gradients_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    return attributes(_grad, parameters)


class GradientSnapshot:
    """Which gradients were sent or averaged, so that later changes to them are noticed."""

    def __init__(self, gradients: Sequence[torch.Tensor | None]):
        self._gradients = list(gradients)
        self._present = [gradient for gradient in gradients if gradient is not None]
        self._versions = attributes(_version, self._present)

    def written(self) -> bool:
        """Whether some of them have been written to."""
        return attributes(_version, self._present) != self._versions

    def changed(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether these are other gradients, or the same ones with other values."""
        return not all(map(operator.is_, gradients, self._gradients)) or self.written()

    def first_changed(self, gradients: Sequence[torch.Tensor | None]) -> int | None:
        """The position of one that changed()."""
        if not self.changed(gradients):
            return None
        seen = iter(self._versions)
        before = [(g, None if g is None else next(seen)) for g in self._gradients]
        return next(
            i
            for i, (now, (g, version)) in enumerate(zip(gradients, before, strict=True))
            if now is not g or (g is not None and g._version != version)
        )


def is_sendable(gradient: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the memory of a gradient holds its elements in order and in this dtype."""
    return are_sendable([gradient], [dtype])


def are_sendable(gradients: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> bool:
    """is_sendable() of all. Every step asks this of hundreds of tensors, so the loops run in C."""
    return (
        list(map(_dtype, gradients)) == dtypes
        and not any_dispatches(gradients)
        and all(map(torch.Tensor.is_contiguous, gradients))
        and not any(map(torch.Tensor.is_neg, gradients))
        and not any(map(torch.Tensor._is_zerotensor, gradients))
    )


def in_order(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient itself if it is sendable in this dtype, else a contiguous copy."""
    if is_sendable(gradient, dtype):
        return gradient
    return torch.empty(gradient.shape, dtype=dtype, device=gradient.device).copy_(gradient)


def _is_same_memory(view: torch.Tensor, gradient: torch.Tensor) -> bool:
    return gradient.data_ptr() == view.data_ptr() and is_sendable(gradient, view.dtype)


def _storage_address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class GradientMemory:
    """This rank's own gradients of one bucket, in the layout of the bucket: one row for each rank's slice.

    bucket: whose gradients.
    flat: [world_size, slice_numel] of any floating dtype; zeros if it is aliased.
    aliased_storages: the addresses of all such memory of one optimizer, to which that of `flat` is added.
    Then p.grad becomes a view of `flat` in each backward pass, and later passes add to it there. The matrix
    product of a quantized weight writes its gradient there directly (GradientPlace); any other gradient is
    moved there by a hook. A gradient with a graph of its own, and one that a user assigned, stays where it is
    until take() copies it. None: nothing aliases `flat`, and others may write to it between two calls of
    take().
    """

    def __init__(self, bucket: FlatBuffer, flat: torch.Tensor, aliased_storages: set[int] | None = None):
        self.flat, self._bucket = flat, bucket
        self.aliased, self._storages = aliased_storages is not None, aliased_storages
        views = bucket.whole_views(flat.view(-1))
        self.views = [view.view(p.shape) for view, p in zip(views, bucket.parameters, strict=True)]
        self._addresses = [view.data_ptr() for view in self.views]
        self._dtypes = [flat.dtype] * len(views)
        self._places: list[GradientPlace] = []
        # Padding between parameters stays zero where nobody else writes.
        self._gaps = [] if self.aliased else _gaps(flat.view(-1), bucket)
        if self.aliased:
            self._storages.add(_storage_address(flat))
            self._add_hooks()

    def _add_hooks(self) -> None:
        me = weakref.ref(self)  # the parameters must not keep this memory alive
        with torch._C.DisableTorchFunctionSubclass():
            self._places = list(map(GradientPlace, self._bucket.parameters, self.views))
            handles = [
                parameter.register_post_accumulate_grad_hook(functools.partial(_move_hook, me, k))
                for k, parameter in enumerate(self._bucket.parameters)
            ]
        weakref.finalize(self, _remove, handles, self._places).atexit = False

    def own_views(self, rank: int) -> list[torch.Tensor | None]:
        """By parameter of the bucket, 1D, what this rank owns of its gradient; None where it owns nothing."""
        return self._bucket.own_views(self.flat[rank])

    def _is_aliased(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient lies in such memory of any bucket, in whichever parameter's part."""
        return not dispatches(gradient) and _storage_address(gradient) in self._storages

    def check(self, gradients: Sequence[torch.Tensor | None], names: Sequence[str]) -> None:
        """Raise RuntimeError for a gradient that take() must not move: one that aliases the memory of another
        parameter's gradient, or one that a backward pass has not finished.

        gradients, names: of all trainable parameters.
        """
        if not self.aliased or self._are_here([gradients[i] for i in self._bucket.indices]):
            return
        in_backward = torch._C._current_graph_task_id() != -1
        for k, i in enumerate(self._bucket.indices):
            gradient = gradients[i]
            at_home = gradient is not None and _is_same_memory(self.views[k], gradient)
            if gradient is not None and not at_home and self._is_aliased(gradient):
                raise RuntimeError(
                    f"the gradient of {names[i]} lies in memory that gradients are sent from, but not where "
                    "its own does: p.grad must not be exchanged, shared or transposed; assign a clone()"
                )
            if in_backward and not at_home and self._places[k].is_awaited():
                raise RuntimeError(
                    f"a backward pass has made part of the gradient of {names[i]}: gradients are reduced "
                    "before or after it, not in between"
                )

    def take(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Copy gradients into `flat`, rounded to its dtype, unless they lie there. None counts as zeros.

        gradients: of all trainable parameters, or a mapping that has those of this bucket.
        """
        mine = [gradients[index] for index in self._bucket.indices]
        if not self._gaps and self._are_here(mine):
            return
        zeros, destinations, sources = list(self._gaps), [], []
        for view, address, gradient in zip(self.views, self._addresses, mine, strict=True):
            if gradient is None:
                zeros.append(view)
            elif gradient.data_ptr() != address or not is_sendable(gradient, view.dtype):
                destinations.append(view)
                sources.append(gradient)
        if zeros:
            torch._foreach_zero_(zeros)
        if sources:
            torch._foreach_copy_(destinations, sources)

    def _are_here(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        return (
            all(gradient is not None for gradient in gradients)
            and list(map(torch.Tensor.data_ptr, gradients)) == self._addresses
            and are_sendable(gradients, self._dtypes)
        )

    def _move(self, k: int, parameter: torch.Tensor) -> None:
        """After a backward pass has accumulated p.grad: make it a view of `flat`."""
        view, place, gradient = self.views[k], self._places[k], parameter.grad
        if gradient is None or gradient.requires_grad:
            return
        if _is_same_memory(view, gradient):
            place.note(gradient)
            return
        # place.is_awaited(): another pass, inside of which this one ran, has begun to write to the view.
        if not is_sendable(gradient, view.dtype) or place.is_awaited() or place.is_kept(gradient):
            return
        if self._is_aliased(gradient):  # in another parameter's part: check() raises
            return
        with torch.no_grad():
            view.copy_(gradient)
        # Another object each time, with a version counter of its own: it is another gradient.
        parameter.grad = view.data
        place.note(parameter.grad)


def _gaps(flat: torch.Tensor, bucket: FlatBuffer) -> list[torch.Tensor]:
    """What lies in `flat` before, between and behind the parameters of the bucket."""
    sizes = [parameter.numel() for parameter in bucket.parameters]
    ends = [0, *(offset + size for offset, size in zip(bucket.offsets, sizes, strict=True))]
    pairs = zip(ends, [*bucket.offsets, flat.numel()], strict=True)
    return [flat[end:begin] for end, begin in pairs if end < begin]


def _move_hook(owner: "weakref.ref[GradientMemory]", k: int, parameter: torch.Tensor) -> None:
    memory = owner()
    if memory is not None:
        with torch._C.DisableTorchFunctionSubclass():
            memory._move(k, parameter)


def _remove(handles: Sequence[torch.utils.hooks.RemovableHandle], places: Sequence[GradientPlace]) -> None:
    for handle, place in zip(handles, places, strict=True):
        handle.remove()
        place.close()
