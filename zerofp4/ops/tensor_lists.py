"""Questions about hundreds of tensors at once, in C++. Versions notices writes, Addresses moved storage."""

import array
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

import zerofp4._autograd as _native
from zerofp4.storage import address_of, rebindings, record_of, weight_record

_Tensors = list[torch.Tensor]

gradients_of: Callable[[_Tensors], list[torch.Tensor | None]] = _native.gradients

versions_of: Callable[[_Tensors], list[int]] = _native.versions
"""autograd's counts of the writes to each."""

increment_versions: Callable[[_Tensors], None] = torch.autograd.graph.increment_version
"""A backward pass that needs the old values fails, as after any write in place."""

pointers: Callable[[_Tensors], bytes] = _native.addresses
"""Where tensors lie, int64."""


def packed(addresses: Iterable[int]) -> bytes:
    return array.array("q", addresses).tobytes()


def numbers(addresses: bytes) -> list[int]:
    """The result of pointers() as numbers."""
    return memoryview(addresses).cast("q").tolist()


def first_moved(before: bytes, now: bytes) -> int:
    """The first tensor for which two unequal results of pointers() differ."""
    pairs = zip(numbers(before), numbers(now), strict=True)
    return next(i for i, (a, b) in enumerate(pairs) if a != b)


def pointers_of(name: str, tensors: Sequence[torch.Tensor]) -> bytes:
    """pointers() for a kernel. Raises RuntimeError, with name[i], for storage that was freed in place."""
    addresses = pointers(list(tensors))
    if 0 in numbers(addresses):
        for i, tensor in enumerate(tensors):
            address_of(f"{name}[{i}]", tensor)
    return addresses


def addresses_of(name: str, tensors: Sequence[torch.Tensor]) -> list[int]:
    """pointers_of() as numbers."""
    return numbers(pointers_of(name, tensors))


class TensorFacts(NamedTuple):
    """What is compared of plain tensors and Nones. addresses: int64, -1 for None. kinds: length, dimensions,
    dtype, device, contiguity, and alignment to elements.
    """

    addresses: bytes
    kinds: bytes


def tensor_facts(tensors: list[torch.Tensor | None]) -> TensorFacts:
    return TensorFacts(*_native.facts(tensors))


def plain_facts(tensors: list[torch.Tensor | None]) -> TensorFacts | None:
    """tensor_facts(), or None unless all are plain, dense, and have memory and no lazy sign."""
    facts = _native.plain_facts(tensors)
    return None if facts is None else TensorFacts(*facts)


def state_facts(
    tensors: list[torch.Tensor], state: dict[torch.Tensor, Any], keys: list[tuple[str, ...]]
) -> TensorFacts | None:
    """plain_facts() of the tensors and of their entries in `state` under these keys; None if one lacks."""
    facts = _native.state_facts(tensors, state, keys)
    return None if facts is None else TensorFacts(*facts)


class Versions:
    """autograd's counts of writes in place to tensors (or Nones), but not through .data, as last taken."""

    def __init__(self, tensors: Iterable[torch.Tensor | None]):
        self._given = list(tensors)
        self._tensors = [tensor for tensor in self._given if tensor is not None]
        self._versions = versions_of(self._tensors)

    def take(self, indices: Sequence[int] | None = None) -> None:
        """Take the present counts, of all or of `indices`, of which none is missing."""
        if indices is None:
            self._versions = versions_of(self._tensors)
            return
        for i, version in zip(indices, versions_of([self._tensors[i] for i in indices]), strict=True):
            self._versions[i] = version

    def written(self, indices: Sequence[int] | None = None) -> list[int]:
        """Which of these tensors, or of all, were written to since."""
        tensors, before = self._tensors, self._versions
        if indices is not None:
            tensors, before = ([each[i] for i in indices] for each in (tensors, before))
        now = versions_of(tensors)
        if now == before:  # as in nearly every step: hundreds are compared in C
            return []
        return list(itertools.compress(indices or range(len(now)), map(operator.ne, before, now)))

    def changed(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Whether these are other tensors, or were written to since."""
        return not all(map(operator.is_, tensors, self._given)) or bool(self.written())


class Addresses:
    """The addresses of the buffers of records and of plain tensors, when this was made.

    weights: quantized tensors or records, by name in messages. tensors: plain ones, likewise.
    hold: keep alive what a GPU may still use.
    owner: what has a refresh(), in messages.

    CPU storage can move in place (share_memory_, pickling to another process, resize_), so each step compares
    the address of every weight's codes and of every tensor. On a GPU the counter rebindings() tells of
    rebound weights, and old storage is kept alive until then. Tensors of other libraries are not counted, so
    their addresses are compared each step.
    """

    def __init__(
        self,
        weights: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        *,
        hold: bool = True,
        owner: str = "plan",
    ):
        self._owner = owner
        self._weights = list(weights.items())
        self._records = [weight_record(weight) for weight in weights.values()]
        self._adapted = [weight for weight in weights.values() if record_of(weight) is None]
        self._plain = dict(tensors)
        self._take(*self._present())
        self._on_gpu = any(tensor.is_cuda for tensor in self._tensors)
        self._aliases = [tensor.detach() for tensor in self._tensors] if hold and self._on_gpu else []

    def glance(self) -> RuntimeError | None:
        """Before a step reads or writes: an error for the first thing known to have moved."""
        if self._on_gpu and not self._adapted and self._rebindings == rebindings():
            return None
        return self.find_moved()

    def find_moved(self) -> RuntimeError | None:
        """An error for the first thing that has moved. Compares all buffers if a weight was rebound."""
        for weight in self._adapted:
            weight_record(weight)  # which counts what has changed
        if self._rebindings == rebindings():
            before, now = self._watched_pointers, pointers(self._watched)
            return None if now == before else self._moved(self._names[first_moved(before, now)])
        for (name, weight), record in zip(self._weights, self._records, strict=True):
            if weight_record(weight) is not record:
                return self._moved(f"{name}: rowwise_data")
        names, tensors = self._present()
        if names != self._names:
            return self._moved(min({*self._names} ^ {*names}, key=[*self._names, *names].index))
        now = pointers(tensors)
        if now != self._pointers:
            return self._moved(names[first_moved(self._pointers, now)])
        self._take(names, tensors)
        return None

    def _present(self) -> tuple[list[str], list[torch.Tensor]]:
        """Everything; what each step compares comes first."""
        codes, others = [], []
        for (name, _), record in zip(self._weights, self._records, strict=True):
            first, *rest = ((f"{name}: {field}", buffer) for field, buffer in record.places())
            codes.append(first)
            others += rest
        pairs = [*codes, *self._plain.items(), *others]
        return [name for name, _ in pairs], [tensor for _, tensor in pairs]

    def _take(self, names: list[str], tensors: list[torch.Tensor]) -> None:
        self._names, self._tensors = names, tensors
        self._watched = tensors[: len(self._records) + len(self._plain)]
        self._pointers, self._watched_pointers = pointers(tensors), pointers(self._watched)
        self._rebindings = rebindings()

    def _moved(self, what: str) -> RuntimeError:
        self._rebindings = -1  # the next glance finds it again
        return RuntimeError(
            f"{what} has moved since the {self._owner} was built; call refresh() to take its new address"
        )
