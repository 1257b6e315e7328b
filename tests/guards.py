"""Memory with guards around it, for what is written by address: an overrun that stays inside of what torch's
allocator holds is seen by no tool that watches allocations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from helpers import assert_bytes_equal

POISONS = (0xA5, 0x5A)
MARGIN = 512
"""Bytes on either side: more than any vector, warp or swizzle atom writes at once."""

_empty, _empty_like, _new_empty = torch.empty, torch.empty_like, torch._C.TensorBase.new_empty


class Guards:
    """Inside of placing() what torch.empty, empty_like and new_empty return is filled with a poison and lies
    in the middle of a larger poisoned buffer, `offset` of its elements from where it would be aligned.

    poison: a byte. check() raises AssertionError where something beside such a tensor was written.
    """

    def __init__(self, poison: int, offset: int):
        self._poison, self._offset = poison, offset
        self._placed: list[tuple[torch.Tensor, int, int]] = []

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy between guards, for what is updated in place."""
        return self._between(tensor).copy_(tensor)

    @contextmanager
    def placing(self) -> Iterator[None]:
        self._replace()
        try:
            yield
        finally:
            _restore()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside of placing(): for tables of the code under test, no outputs, which must be aligned."""
        _restore()
        try:
            yield
        finally:
            self._replace()

    def check(self) -> None:
        around = defaultdict(list)
        for memory, begin, end in self._placed:
            around[memory.device] += (memory[:begin], memory[end:])
        if all((torch.cat(parts) == self._poison).all() for parts in around.values()):
            return
        for memory, begin, end in self._placed:
            for at in (memory != self._poison).nonzero().flatten().tolist():
                if not begin <= at < end:
                    where = (
                        f"{begin - at} bytes before" if at < begin else f"{at - end} bytes past the end of"
                    )
                    raise AssertionError(f"written {where} a tensor of {end - begin} bytes")

    def _replace(self) -> None:
        torch.empty, torch.empty_like = self._wrapped(_empty), self._wrapped(_empty_like)
        torch.Tensor.new_empty = self._wrapped(_new_empty)

    def _wrapped(self, allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: self._between(allocate(*args, **kwargs))

    def _between(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        size = tensor.element_size()
        begin = MARGIN + self._offset * size
        end = begin + tensor.numel() * size
        memory = _empty(end + MARGIN, dtype=torch.uint8, device=tensor.device).fill_(self._poison)
        self._placed.append((memory, begin, end))
        return memory[begin:end].view(tensor.dtype).view(tensor.shape)


def _restore() -> None:
    torch.empty, torch.empty_like = _empty, _empty_like
    del torch.Tensor.new_empty  # which hid that of its base


def check_writes(run: Callable[[Guards], Sequence[tuple[str, torch.Tensor]]], offset: int, what: str) -> None:
    """run(guards) returns (name, tensor) of all that it writes. It is called with two poisons, so that a byte
    that it leaves as it was differs.
    """
    first, second = results = [[], []]
    for poison, outputs in zip(POISONS, results, strict=True):
        guards = Guards(poison, offset)
        with guards.placing():
            outputs += run(guards)
        try:
            guards.check()
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from None
    assert [name for name, _ in first] == [name for name, _ in second]
    if first and not torch.equal(*(torch.cat([bytes_of(t) for _, t in outputs]) for outputs in results)):
        for (name, one), (_, other) in zip(first, second, strict=True):
            assert_bytes_equal(one, other, f"{what}: {name}, by what was there before")


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
