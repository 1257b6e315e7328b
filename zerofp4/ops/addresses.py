"""Where tensors lie, and whether their storage has moved: whoever holds addresses asks here."""

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

import zerofp4._C as _C
from zerofp4.storage import may_be_freed, rebindings, record_of, weight_record

_exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
_reader = None if _exchange is None else _C.TensorReader(_exchange)
"""None where torch hands out no such function: there the same is asked by more loops."""

_FACTS = (
    torch.Tensor.numel,
    torch.Tensor.dim,
    torch.Tensor.is_contiguous,
    operator.attrgetter("dtype"),
    operator.attrgetter("device"),
    lambda tensor: tensor.data_ptr() % tensor.itemsize == 0,
)


def pointers(tensors: list[torch.Tensor]) -> bytes | list[int]:
    """The addresses of plain tensors, to be compared with others of this function."""
    return list(map(torch.Tensor.data_ptr, tensors)) if _reader is None else _reader.addresses(tensors)


def first_moved(before: bytes | list[int], now: bytes | list[int]) -> int:
    """The first tensor of which two unequal results of pointers() for equally many tensors differ."""
    pairs = zip(*(memoryview(p).cast("q") if isinstance(p, bytes) else p for p in (before, now)), strict=True)
    return next(i for i, (a, b) in enumerate(pairs) if a != b)


class TensorFacts(NamedTuple):
    """What is compared of plain tensors and Nones.

    addresses: bytes of int64, -1 for None; or those of the tensors in a list.
    kinds: length, dimensions, dtype, device, and whether a tensor is contiguous, and at a multiple of the
        size of its elements.
    """

    addresses: bytes | list[int]
    kinds: bytes | list


def tensor_facts(tensors: list[torch.Tensor | None]) -> TensorFacts:
    if _reader is not None:
        return TensorFacts(*_reader.facts(tensors))
    present = [tensor for tensor in tensors if tensor is not None]
    kinds = [[tensor is None for tensor in tensors], *(list(map(fact, present)) for fact in _FACTS)]
    return TensorFacts(list(map(torch.Tensor.data_ptr, present)), kinds)


_PLAIN = {torch.Tensor, type(None)}


def plain_kinds(tensors: list[torch.Tensor | None]) -> bytes | list | None:
    """TensorFacts.kinds, if each tensor is plain and dense, lies where no freed storage can, and has no lazy
    sign; else None.

    Who checked tensors need not check others of equal kinds.
    """
    if not set(map(type, tensors)) <= _PLAIN:
        return None
    try:
        addresses, kinds = tensor_facts(tensors)
    except (RuntimeError, BufferError):  # a layout without addresses
        return None
    if may_be_freed(memoryview(addresses).cast("Q") if isinstance(addresses, bytes) else addresses):
        return None
    is_negated = any(map(torch.Tensor.is_neg, [tensor for tensor in tensors if tensor is not None]))
    return None if is_negated else kinds


class Addresses:
    """The addresses of the buffers of records and of plain tensors, when this was made.

    weights: by what messages call them, quantized tensors or records. tensors: likewise, plain ones.
    hold: keep alive what a GPU may still use; without it whoever asks looks at codes in some other way
    before a step.
    owner: what was built with these addresses, and has a refresh(), in messages.

    On the CPU torch moves storages in place (share_memory_, pickling to another process, resize_), and no
    alias protects what was there: every step looks at the codes of every weight, which move where the rest of
    it does, and at every tensor. On a GPU storage does not move under its tensor; what is exchanged (.data
    assigned, a weight rebound) stays alive here until it is noticed, so that a step need only ask one
    counter. Nobody counts what other libraries do to their tensors: where one is a weight, every step looks
    there too.
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
        """What a step asks before it reads or writes: an error for the first thing that is known to have
        moved.
        """
        if self._on_gpu and not self._adapted and self._rebindings == rebindings():
            return None
        return self.find_moved()

    def find_moved(self) -> RuntimeError | None:
        """An error for the first thing that has moved. Looks at the codes of all weights and at all tensors,
        and at everything where a weight was rebound.
        """
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
            return self._moved(_first_other(self._names, names))
        now = pointers(tensors)
        if now != self._pointers:
            return self._moved(names[first_moved(self._pointers, now)])
        self._take(names, tensors)
        return None

    def _present(self) -> tuple[list[str], list[torch.Tensor]]:
        """Everything; what each step looks at comes first."""
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


def _first_other(before: list[str], now: list[str]) -> str:
    """The first buffer that one of two lists has, and the other has not."""
    return next(name for name in (*before, *now) if name not in before or name not in now)
