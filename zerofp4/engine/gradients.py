"""Gradients in flat memory: p.grad are views of it, so that nothing is packed before it travels."""

import functools
import weakref
from collections.abc import Sequence

import torch

from zerofp4.engine.flat import FlatBuffer
from zerofp4.engine.places import GradientPlaces, are_sendable, is_same_memory, is_sendable
from zerofp4.tensors import GradientPlace


class FlatGradients:
    """The gradients of all parameters of a buffer, this rank's alone, in its layout.

    flat: [world_size, slice_numel], of any floating dtype. Others may write to it between two calls of
    take().
    """

    def __init__(self, buffer: FlatBuffer, flat: torch.Tensor):
        self.flat, self._buffer = flat, buffer
        views = buffer.whole_views(flat.view(-1))
        self._views = [view.view(p.shape) for view, p in zip(views, buffer.parameters, strict=True)]
        self._addresses = [view.data_ptr() for view in self._views]
        self._dtypes = [flat.dtype] * len(views)
        self._gaps = _between(flat.view(-1), buffer.offsets, [view.numel() for view in views])

    def own_views(self, rank: int) -> dict[int, torch.Tensor]:
        """By the position of the parameter, what lies in this rank's slice of it, 1D."""
        views = zip(self._buffer.indices, self._buffer.own_views(self.flat[rank]), strict=True)
        return {i: view for i, view in views if view is not None}

    def check(self, gradients: Sequence[torch.Tensor | None], names: Sequence[str]) -> None:
        """Raises where take() must not be called now; nobody else writes to this memory at any time."""

    def take(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Of all trainable parameters: those of this buffer are in `flat` afterwards, rounded to its dtype,
        None as zeros. None of them may lie in the place of another (GradientPlaces).
        """
        mine = [gradients[index] for index in self._buffer.indices]
        if not self._gaps and self._are_here(mine):
            return
        zeros, destinations, sources = list(self._gaps), [], []
        for view, gradient in zip(self._views, mine, strict=True):
            if gradient is None:
                zeros.append(view)
            elif not is_same_memory(view, gradient):
                destinations.append(view)
                sources.append(gradient)
        if zeros:
            torch._foreach_zero_(zeros)
        if sources:
            torch._foreach_copy_(destinations, sources)

    def _are_here(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether there is nothing to do."""
        return (
            all(gradient is not None for gradient in gradients)
            and list(map(torch.Tensor.data_ptr, gradients)) == self._addresses
            and are_sendable(gradients, self._dtypes)
        )


class GradientViews(FlatGradients):
    """Memory in which gradients stay: p.grad is a view of it after a backward pass, to which later passes add
    where it is. A product of a quantized weight, or of a layer, writes its gradient there (GradientPlace);
    what else a backward pass leaves in p.grad is moved there.

    Only a plain gradient is moved: one that has a graph of its own, and what a user assigns, stay as they are
    and are copied by take(). Whoever keeps a p.grad past the next backward pass clones it, since its memory
    is written to again.

    flat: zeros, as of FlatGradients. The parameters hold no reference to it, whose end is that of this object
    and its views. places: of the parameters of all buffers that are reduced together.
    """

    def __init__(self, buffer: FlatBuffer, flat: torch.Tensor, places: GradientPlaces):
        super().__init__(buffer, flat)
        self._gaps = []  # nobody else writes there
        me = weakref.ref(self)
        with torch._C.DisableTorchFunctionSubclass():
            self._places = list(map(GradientPlace, buffer.parameters, self._views))
            handles = [
                parameter.register_post_accumulate_grad_hook(
                    functools.partial(_move, me, view, places, place)
                )
                for parameter, view, place in zip(buffer.parameters, self._views, self._places, strict=True)
            ]
        weakref.finalize(self, _remove, handles, self._places).atexit = False
        places.add(buffer.indices, self._views)

    def check(self, gradients: Sequence[torch.Tensor | None], names: Sequence[str]) -> None:
        """Raises RuntimeError inside of a backward pass where take() would write over part of a gradient."""
        if torch._C._current_graph_task_id() == -1:
            return
        for i, view, place in zip(self._buffer.indices, self._views, self._places, strict=True):
            gradient = gradients[i]
            if place.is_awaited() and (gradient is None or not is_same_memory(view, gradient)):
                raise RuntimeError(
                    f"a backward pass has made part of the gradient of {names[i]}: gradients are reduced "
                    "before or after it, not in between"
                )


def _between(flat: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> list[torch.Tensor]:
    """What lies in `flat` before, between and behind stretches of it."""
    ends = [0, *(offset + size for offset, size in zip(offsets, sizes, strict=True))]
    return [flat[end:begin] for end, begin in zip(ends, [*offsets, flat.numel()], strict=True) if end < begin]


def _move(
    owner: "weakref.ref[GradientViews]",
    view: torch.Tensor,
    places: GradientPlaces,
    place: GradientPlace,
    parameter: torch.Tensor,
) -> None:
    """What a backward pass left in the gradient of a parameter to its place, unless another pass, inside of
    which that one ran, has begun to write there.
    """
    with torch._C.DisableTorchFunctionSubclass():
        gradient = parameter.grad
        if owner() is None or gradient is None or gradient.requires_grad:
            return
        if is_same_memory(view, gradient):
            place.note(gradient)
            return
        if not is_sendable(gradient, view.dtype):
            return
        # What lies in other places stays: what belongs here may be another's, who would lose it.
        if not places.hold(gradient) and not place.is_awaited() and not place.is_kept(gradient):
            with torch.no_grad():
                view.copy_(gradient)
            # Another object each time, with a version of its own: it is another gradient.
            parameter.grad = view.data
            place.note(parameter.grad)


def _remove(handles: Sequence[torch.utils.hooks.RemovableHandle], places: Sequence[GradientPlace]) -> None:
    for handle, place in zip(handles, places, strict=True):
        handle.remove()
        place.close()
