"""Flat memory for the gradients of a bucket. p.grad can alias it, so that nothing is packed before it is
sent.
"""

import functools
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zerofp4.engine.buckets import Wire
from zerofp4.engine.flat import FlatBuffer
from zerofp4.engine.peers import Peers
from zerofp4.storage import any_dispatches, dispatches
from zerofp4.tensors import GradientPlace

Gradients = Sequence[torch.Tensor | None] | Mapping[int, torch.Tensor | None]
"""p.grad by the position of a parameter among all trainable ones; a mapping has those of one bucket."""

_dtype, _grad = operator.attrgetter("dtype"), operator.attrgetter("grad")


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
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int | None]:
        with torch._C.DisableTorchFunctionSubclass():
            return [None if gradient is None else gradient._version for gradient in self._gradients]

    def written(self) -> bool:
        """Whether some of them have been written to."""
        return self._versions_now() != self._versions

    def changed(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether these are other gradients, or the same ones with other values."""
        return not all(map(operator.is_, gradients, self._gradients)) or self.written()

    def first_changed(self, gradients: Sequence[torch.Tensor | None]) -> int | None:
        """The position of one that changed()."""
        pairs = zip(gradients, self._gradients, self._versions_now(), self._versions, strict=True)
        changes = (k for k, (now, then, *v) in enumerate(pairs) if now is not then or v[0] != v[1])
        return next(changes, None)


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


def add_gradient_hooks(
    owner: Any, parameters: Sequence[torch.Tensor], method: Callable[[Any, int, torch.Tensor], None]
) -> weakref.finalize:
    """Call method(owner, position, parameter) whenever a backward pass has accumulated p.grad. The parameters
    do not keep the owner alive: the hooks end with it, or when what this returns is called.
    """
    me = weakref.ref(owner)

    def hook(position: int, parameter: torch.Tensor) -> None:
        alive = me()
        if alive is not None:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                method(alive, position, parameter)

    with torch._C.DisableTorchFunctionSubclass():
        handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(hook, position))
            for position, parameter in enumerate(parameters)
        ]
    ends = weakref.finalize(owner, _remove, handles)
    ends.atexit = False
    return ends


def _remove(handles: Sequence[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


class GradientMemory:
    """This rank's own gradients of one bucket, in the layout of the bucket: one row for each rank's slice.

    bucket: whose gradients.
    flat: [world_size, slice_numel] of any floating dtype; zeros if it is aliased.
    aliased_storages: the addresses of all such memory of one optimizer, to which that of `flat` is added.
        Then p.grad becomes a view of `flat` in each backward pass, and later passes add to it there. The
        matrix product of a quantized weight writes its gradient there directly (GradientPlace); a hook moves
        any other gradient there. A gradient with a graph of its own, and one that a user assigned, stays
        where it is until take() copies it. None: nothing aliases `flat`, and others may write to it between
        two calls of take().
    """

    def __init__(self, bucket: FlatBuffer, flat: torch.Tensor, aliased_storages: set[int] | None = None):
        self.flat, self._bucket, self._storages = flat, bucket, aliased_storages
        self.aliased = aliased_storages is not None
        self.views = bucket.whole_views(flat.view(-1))
        self._addresses = [view.data_ptr() for view in self.views]
        self._gaps: list[torch.Tensor] = []
        """What lies before, between and behind the parameters, where others write too; it travels as zeros.
        """
        if self.aliased:
            aliased_storages.add(_storage_address(flat))
            with torch._C.DisableTorchFunctionSubclass():
                self._places = list(map(GradientPlace, bucket.parameters, self.views))
            add_gradient_hooks(self, bucket.parameters, GradientMemory._move)
        else:
            ends = [0, *(o + p.numel() for o, p in zip(bucket.offsets, bucket.parameters, strict=True))]
            pairs = zip(ends, [*bucket.offsets, flat.numel()], strict=True)
            self._gaps = [flat.view(-1)[end:begin] for end, begin in pairs if end < begin]

    def check(self, gradients: Gradients, names: Sequence[str]) -> None:
        """Raise RuntimeError for a gradient that aliases the memory of another parameter's gradient.

        gradients: of all trainable parameters, or a mapping that has those of this bucket.
        names: of all trainable parameters.
        """
        mine = [gradients[i] for i in self._bucket.indices]
        for k in self._elsewhere(mine) if self.aliased else ():
            if self._is_aliased(mine[k]):
                name = names[self._bucket.indices[k]]
                raise RuntimeError(
                    f"the gradient of {name} lies in memory that gradients are sent from, but not where its "
                    "own does: p.grad must not be exchanged, shared or transposed; assign a clone()"
                )

    def take(self, gradients: Gradients) -> None:
        """Copy gradients into `flat`, rounded to its dtype, unless they lie there. None counts as zeros.

        gradients: as of check().
        """
        mine = [gradients[i] for i in self._bucket.indices]
        missing = [view for view, gradient in zip(self.views, mine, strict=True) if gradient is None]
        away = self._elsewhere(mine)
        if self._gaps or missing:
            torch._foreach_zero_(self._gaps + missing)
        if away:
            torch._foreach_copy_([self.views[k] for k in away], [mine[k] for k in away])

    def _elsewhere(self, mine: Sequence[torch.Tensor | None]) -> list[int]:
        """The positions of gradients that do not lie in their views. Usually there are none, which loops in C
        find out.
        """
        here, away = [k for k, gradient in enumerate(mine) if gradient is not None], []
        addresses = map(torch.Tensor.data_ptr, [mine[k] for k in here])
        if list(addresses) != [self._addresses[k] for k in here]:
            away = [k for k in here if mine[k].data_ptr() != self._addresses[k]]
            here = [k for k in here if mine[k].data_ptr() == self._addresses[k]]
        if not are_sendable([mine[k] for k in here], [self.flat.dtype] * len(here)):
            away += [k for k in here if not is_sendable(mine[k], self.flat.dtype)]
        return away

    def _is_aliased(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient lies in such memory of any bucket, in whichever parameter's part."""
        return not dispatches(gradient) and _storage_address(gradient) in self._storages

    def _move(self, k: int, parameter: torch.Tensor) -> None:
        """After a backward pass has accumulated p.grad: make it a view of `flat`."""
        view, place, gradient = self.views[k], self._places[k], parameter.grad
        if gradient is None or gradient.requires_grad or not is_sendable(gradient, view.dtype):
            return
        if gradient.data_ptr() != view.data_ptr():
            # place.is_awaited(): another pass, inside of which this one ran, has begun to write to the view.
            if place.is_awaited() or place.is_kept(gradient) or self._is_aliased(gradient):
                return
            view.copy_(gradient)
            # Another object each time, with a version counter of its own: it is another gradient.
            parameter.grad = gradient = view.data
        place.note(gradient)


def _storage_address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# What transports share


def in_turns(
    layouts: Sequence[tuple[tuple[int, ...], torch.dtype] | None], device: torch.device, count: int = 2
) -> list[torch.Tensor | None]:
    """Contiguous tensors of these shapes and dtypes, of which only `count` neighbours are used at a time, so
    that each shares memory with the one `count` before it. None for None.
    """
    sizes = [math.prod(layout[0]) * layout[1].itemsize for layout in layouts if layout is not None]
    memory = torch.empty(min(count, len(sizes)), max(sizes, default=0), dtype=torch.uint8, device=device)
    turns = itertools.cycle(memory)
    return [
        None if layout is None else next(turns).view(layout[1])[: math.prod(layout[0])].view(layout[0])
        for layout in layouts
    ]


def private_memory(
    buckets: Sequence[FlatBuffer], wire: Wire, device: torch.device, count: int = 2, aliased: bool = True
) -> list[GradientMemory]:
    """By bucket, memory for this rank's own gradients. p.grad aliases it where gradients travel as autograd
    makes them; other gradients are copied to memory that buckets use in turns.

    count: how many buckets are on their way at once.
    aliased: whether p.grad may alias the memory.
    """
    stays = [aliased and wire.keeps(bucket.parameters) for bucket in buckets]
    layouts = [((b.world_size, b.slice_numel), wire.dtype_of(b.parameters)) for b in buckets]
    copied = [None if keeps else layout for keeps, layout in zip(stays, layouts, strict=True)]
    turns, storages, found = in_turns(copied, device, count), set(), []
    for bucket, (shape, dtype), turn in zip(buckets, layouts, turns, strict=True):
        flat = torch.zeros(shape, dtype=dtype, device=device) if turn is None else turn
        found.append(GradientMemory(bucket, flat, storages if turn is None else None))
    return found


def shared_memory(buckets: Sequence[FlatBuffer], wire: Wire, peers: Peers) -> list[GradientMemory]:
    """By bucket, memory for this rank's own gradients that the other ranks read. Collective."""
    storages, found = set(), []
    for bucket in buckets:
        flat = peers.zeros((bucket.world_size, bucket.slice_numel), wire.dtype_of(bucket.parameters))
        found.append(GradientMemory(bucket, flat, storages if wire.keeps(bucket.parameters) else None))
    return found


def rows_sent(buckets: Sequence[FlatBuffer], dtypes: Sequence[torch.dtype]) -> list[int]:
    """By bucket, the bytes of a row for each other rank."""
    pairs = zip(buckets, dtypes, strict=True)
    return [(bucket.world_size - 1) * bucket.slice_numel * dtype.itemsize for bucket, dtype in pairs]
