"""Whether the storage that a plan took the addresses of is still where it was."""

import itertools
from collections.abc import Sequence

import torch

from zerofp4 import storage
from zerofp4.storage import NVFP4Storage
from zerofp4.tensors import NVFP4Tensor

WINDOW = 256
"""Addresses that a glance compares at most: the price of a step must not grow with the list."""


class WeightAddresses:
    """Notices weights that got another record or other codes since this was built."""

    def __init__(self, names: Sequence[str], weights: Sequence[NVFP4Tensor], records: Sequence[NVFP4Storage]):
        self._weights = list(zip(names, weights, records, strict=True))
        self._codes = [record.rowwise_data for record in records]
        self._pointers = _pointers(self._codes)
        self._rebindings = storage.rebindings()

    def glance(self) -> RuntimeError | None:
        """An error for the first weight that was rebound. O(1) while nothing in the process is rebound."""
        return None if self._rebindings == storage.rebindings() else self.find_moved()

    def find_moved(self) -> RuntimeError | None:
        """An error for the first weight that was rebound, or whose codes were moved behind its back."""
        rebindings = storage.rebindings()
        if self._rebindings != rebindings or _pointers(self._codes) != self._pointers:
            for (name, weight, record), pointer in zip(self._weights, self._pointers, strict=True):
                if weight.record is not record or record.rowwise_data.data_ptr() != pointer:
                    return _moved(f"{name}: rowwise_data")
        self._rebindings = rebindings
        return None


class ShardAddresses:
    """Notices masters and shard buffers (by what messages call them) whose storage was exchanged.

    Keeps aliases: a plan that has not noticed yet reads and writes memory that nobody else is given.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self._names, self._tensors = list(tensors), list(tensors.values())
        self._aliases = [tensor.detach() for tensor in self._tensors]
        self._pointers = _pointers(self._tensors)
        starts = range(0, len(self._tensors), WINDOW) or (0,)
        self._windows = itertools.cycle(
            [(self._tensors[i : i + WINDOW], self._pointers[i : i + WINDOW]) for i in starts]
        )

    def glance(self) -> RuntimeError | None:
        """An error if one of the next WINDOW tensors has moved: all are looked at in turn."""
        tensors, pointers = next(self._windows)
        return None if _pointers(tensors) == pointers else self.find_moved()

    def find_moved(self) -> RuntimeError | None:
        """An error for the first of all tensors that has moved."""
        now = _pointers(self._tensors)
        if now == self._pointers:
            return None
        return _moved(self._names[next(i for i, p in enumerate(now) if p != self._pointers[i])])


def _pointers(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


def _moved(what: str) -> RuntimeError:
    return RuntimeError(f"{what} has moved since the plan was built; call refresh() to take its new address")
