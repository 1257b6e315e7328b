"""What a step asks of hundreds of tensors at once. Each question is a loop in C where there is one: those of
zerofp4._autograd, or of a reader of DLPack, which can only look at where tensors lie.
"""

import array
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

import zerofp4._C as _C
from zerofp4.ops.autograd import native_extension
from zerofp4.storage import address_of, any_dispatches

_native: Any = native_extension()
"""zerofp4._autograd; None where it is not used, or not built yet: what it returns is compared with what it
returned before.
"""
_exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
_reader = None if _exchange is None else _C.TensorReader(_exchange)
"""None where torch hands out no such function."""

_grad, _version = map(operator.attrgetter, ("grad", "_version"))


def _attributes(get: operator.attrgetter, tensors: Sequence[torch.Tensor]) -> list:
    """An attribute of every tensor, without __torch_function__ of quantized ones, which costs ten times as
    much.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(get, tensors))


def gradients_of(tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    return _attributes(_grad, tensors) if _native is None else _native.gradients(tensors)


def versions_of(tensors: list[torch.Tensor]) -> list[int]:
    """autograd's counts of the writes to each."""
    return _attributes(_version, tensors) if _native is None else _native.versions(tensors)


def increment_versions(tensors: list[torch.Tensor]) -> None:
    """As after any write in place, a backward pass that needs the old values fails."""
    if _native is None:
        torch.autograd.graph.increment_version(tensors)
    else:
        _native.increment_versions(tensors)


# Where they lie


def pointers(tensors: list[torch.Tensor]) -> bytes:
    """The addresses of plain tensors, int64."""
    reader = _native or _reader
    if reader is not None:
        return reader.addresses(tensors)
    return packed(map(torch.Tensor.data_ptr, tensors))


def packed(addresses: Iterable[int]) -> bytes:
    """Numbers as pointers() returns them."""
    return array.array("q", addresses).tobytes()


def numbers(addresses: bytes) -> list[int]:
    """What pointers() returned, as numbers."""
    return memoryview(addresses).cast("q").tolist()


def first_moved(before: bytes, now: bytes) -> int:
    """The first tensor of which two unequal results of pointers() for equally many tensors differ."""
    pairs = zip(numbers(before), numbers(now), strict=True)
    return next(i for i, (a, b) in enumerate(pairs) if a != b)


def pointers_of(name: str, tensors: Sequence[torch.Tensor]) -> bytes:
    """pointers() of tensors whose elements a kernel reads. Raises RuntimeError, as storage.address_of(), for
    one whose storage was freed in place; errors call it name[i].
    """
    addresses = pointers(list(tensors))
    if 0 in numbers(addresses):
        for i, tensor in enumerate(tensors):
            address_of(f"{name}[{i}]", tensor)
    return addresses


def addresses_of(name: str, tensors: Sequence[torch.Tensor]) -> list[int]:
    """pointers_of() as numbers."""
    return numbers(pointers_of(name, tensors))


_FACTS = (
    torch.Tensor.numel,
    torch.Tensor.dim,
    torch.Tensor.is_contiguous,
    operator.attrgetter("dtype"),
    operator.attrgetter("device"),
    lambda tensor: tensor.data_ptr() % tensor.itemsize == 0,
)


class TensorFacts(NamedTuple):
    """What is compared of plain tensors and Nones.

    addresses: int64, -1 for None.
    kinds: length, dimensions, dtype, device, and whether a tensor is contiguous, and at a multiple of the
        size of its elements.
    """

    addresses: bytes
    kinds: bytes | list


def tensor_facts(tensors: list[torch.Tensor | None]) -> TensorFacts:
    reader = _native or _reader
    if reader is not None:
        return TensorFacts(*reader.facts(tensors))
    present = [tensor for tensor in tensors if tensor is not None]
    kinds = [[tensor is None for tensor in tensors], *(list(map(fact, present)) for fact in _FACTS)]
    return TensorFacts(packed(-1 if t is None else t.data_ptr() for t in tensors), kinds)


def plain_facts(tensors: list[torch.Tensor | None]) -> TensorFacts | None:
    """tensor_facts(), if each tensor is plain and dense, has memory and no lazy sign; else None.

    Who checked tensors need not check others of equal kinds.
    """
    if _native is not None:
        facts = _native.plain_facts(tensors)
        return None if facts is None else TensorFacts(*facts)
    present = [tensor for tensor in tensors if tensor is not None]
    if any_dispatches(present):
        return None
    try:
        facts = tensor_facts(tensors)
    except (RuntimeError, BufferError):  # a layout without addresses
        return None
    if 0 in numbers(facts.addresses):
        return None
    return None if any(map(torch.Tensor.is_neg, present)) else facts


def state_facts(
    tensors: list[torch.Tensor], state: dict[torch.Tensor, Any], keys: list[tuple[str, ...]]
) -> TensorFacts | None:
    """plain_facts() of the tensors, and of what `state` has of each under its keys, one after another: Nones
    where it has nothing of a tensor. None where a key is missing, and without zerofp4._autograd: whoever asks
    then looks in Python.
    """
    facts = None if _native is None else _native.state_facts(tensors, state, keys)
    return None if facts is None else TensorFacts(*facts)
