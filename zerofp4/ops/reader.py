"""What is asked of a list of tensors before a call: where they are and how they lie, in one loop in C."""

import operator

import torch

import zerofp4._C as _C

_exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
_reader = None if _exchange is None else _C.TensorReader(_exchange)
"""None where torch hands out no such function: there the same is asked by more loops."""

_FACTS = (
    torch.Tensor.data_ptr,
    torch.Tensor.numel,
    torch.Tensor.dim,
    torch.Tensor.is_contiguous,
    operator.attrgetter("dtype"),
    operator.attrgetter("device"),
)


def pointers(tensors: list[torch.Tensor]) -> bytes | list[int]:
    """The addresses of plain tensors, to be compared with others of this function."""
    return list(map(torch.Tensor.data_ptr, tensors)) if _reader is None else _reader.addresses(tensors)


def first_moved(before: bytes | list[int], now: bytes | list[int]) -> int:
    """The first tensor of which two unequal results of pointers() for equally many tensors differ."""
    pairs = zip(*(memoryview(p).cast("q") if isinstance(p, bytes) else p for p in (before, now)), strict=True)
    return next(i for i, (a, b) in enumerate(pairs) if a != b)


def tensor_facts(tensors: list[torch.Tensor | None]) -> bytes | list:
    """Of plain tensors and Nones, to be compared: address, length, dimensions, dtype, device, and whether
    they are contiguous.
    """
    if _reader is not None:
        return _reader.facts(tensors)
    present = [tensor for tensor in tensors if tensor is not None]
    return [[tensor is None for tensor in tensors], *(list(map(fact, present)) for fact in _FACTS)]
