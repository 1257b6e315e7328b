"""What all tests use: the assertions that bytes or values are equal, and whether CUDA can be tested here."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """What torch allocates meanwhile holds NaN, or the largest integer: memory that was just freed may hold
    what a kernel should have written.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.zeros(1).new_empty(1).isnan().item()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def first_difference(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """None when dtype, shape and every byte agree, else a phrase that names the first element that differs.

    Bytes are compared, not values: -0.0 differs from 0.0, and a NaN equals itself.
    """
    if actual.dtype != expected.dtype:
        return f"dtype {actual.dtype}, expected {expected.dtype}"
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    found, wanted = _element_bytes(actual), _element_bytes(expected)
    wrong = (found != wanted).any(dim=1).nonzero().flatten()
    if not len(wrong):
        return None
    first = int(wrong[0])
    where = [int(index) for index in torch.unravel_index(wrong[0], actual.shape)]
    shown = [_show(tensor, raw, first) for tensor, raw in ((actual, found), (expected, wanted))]
    return (
        f"{len(wrong)} of {len(found)} elements differ, the first at {where}: {shown[0]}, expected {shown[1]}"
    )


def assert_bytes_equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    difference = first_difference(actual, expected)
    assert difference is None, f"{what}: {difference}"


def without_nan_payloads(tensor: torch.Tensor) -> torch.Tensor:
    """With the same NaN everywhere: IEEE 754 leaves its sign and payload to the hardware."""
    return torch.where(tensor.isnan(), torch.nan, tensor)


def assert_values_equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Bytes, except that a NaN equals any other."""
    assert_bytes_equal(without_nan_payloads(actual), without_nan_payloads(expected), what)


def _element_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [numel, itemsize], on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(-1, tensor.element_size())


def _show(tensor: torch.Tensor, raw: torch.Tensor, index: int) -> str:
    """The bytes of an element as one hexadecimal number and, unless it is a plain byte, its value."""
    text = "0x" + bytes(raw[index].flip(0).tolist()).hex()
    if tensor.dtype == torch.uint8:
        return text
    value = tensor.detach().cpu().contiguous().reshape(-1)[index]
    return f"{text} ({value.to(torch.float64).item() if tensor.is_floating_point() else value.item()})"


@functools.cache
def why_no_cuda() -> str | None:
    """Why nothing can be tested with CUDA here, or None when it can."""
    if not torch.cuda.is_available():
        return "no GPU: torch.cuda.is_available() is false"
    import zerofp4  # here, not above: whether the extension is built matters only with a GPU

    if not zerofp4.build_info()["cuda"]["compiled"]:
        return "zerofp4 was built without CUDA"
    return None


needs_gpu = pytest.mark.skipif(why_no_cuda() is not None, reason=str(why_no_cuda()))
