"""What all tests use: the assertions that bytes or values are equal, and whether CUDA can be tested here."""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch

import zerofp4
from zerofp4.testing import assert_bytes_equal


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


@contextmanager
def nothing_waits() -> Iterator[None]:
    """What waits for a GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of it, after it ran on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def collect_garbage() -> None:
    """gc.collect(), which alone returns at once while another thread is inside a collection."""
    by: list[int] = []

    def note(phase: str, info: dict) -> None:
        by.append(threading.get_ident())

    gc.callbacks.append(note)
    while threading.get_ident() not in by:
        time.sleep(0.001)  # so that the other thread goes on
        by.clear()
        gc.collect()
    gc.callbacks.remove(note)


def without_nan_payloads(tensor: torch.Tensor) -> torch.Tensor:
    """With the same NaN everywhere: IEEE 754 leaves its sign and payload to the hardware."""
    return torch.where(tensor.isnan(), torch.nan, tensor)


def assert_values_equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Bytes, except that a NaN equals any other."""
    assert_bytes_equal(without_nan_payloads(actual), without_nan_payloads(expected), what)


def assert_all_equal(
    actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], what: str = "result"
) -> None:
    """assert_bytes_equal of as many as there are."""
    for i, (mine, other) in enumerate(zip(actual, expected, strict=True)):
        assert_bytes_equal(mine, other, f"{what} {i}")


@functools.cache
def why_no_cuda() -> str | None:
    """Why nothing can be tested with CUDA here, or None when it can."""
    if not torch.cuda.is_available():
        return "no GPU: torch.cuda.is_available() is false"
    if not zerofp4.build_info()["cuda"]["compiled"]:
        return "zerofp4 was built without CUDA"
    return None


needs_gpu = pytest.mark.skipif(why_no_cuda() is not None, reason=str(why_no_cuda()))


def at_an_odd_address(x: torch.Tensor) -> torch.Tensor:
    """A copy, one byte from where it would be aligned, as in a file that was mapped, or from a library that
    hands over its GPU memory.
    """
    if x.is_cuda:
        return _at_an_odd_gpu_address(x)
    memory = bytearray(1 + x.numel() * x.element_size())
    moved = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=1).view(x.shape)
    moved.copy_(x)
    assert moved.data_ptr() % 2 == 1
    return moved


def freed(x: torch.Tensor) -> torch.Tensor:
    """In place, as FSDP frees what it has gathered."""
    x.untyped_storage().resize_(0)
    return x


class _Handed:
    """GPU memory, as other libraries hand it over."""

    def __init__(self, x: torch.Tensor):
        self.memory = torch.empty(1 + x.nbytes, dtype=torch.uint8, device=x.device)
        self.memory[1:].copy_(x.reshape(-1).view(torch.uint8))  # torch's kernels could not load more there
        self.__cuda_array_interface__ = {
            "shape": tuple(x.shape),
            "typestr": f"<i{x.itemsize}",
            "data": (self.memory.data_ptr() + 1, False),
            "version": 3,
        }


def _at_an_odd_gpu_address(x: torch.Tensor) -> torch.Tensor:
    moved = torch.as_tensor(_Handed(x), device=x.device).view(x.dtype)
    assert moved.data_ptr() % 2 == 1
    return moved
