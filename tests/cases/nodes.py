"""Nodes of autograd: what they give, and how they are run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch
from helpers import assert_bytes_equal
from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):
    """Does nothing, but C++ leaves products to Python."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def assert_named_equal(found: dict, expected: dict) -> None:
    """Tensors by name, None among them, have the same bytes."""
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert (tensor is None) == (expected[key] is None), key
        if tensor is not None:
            assert_bytes_equal(tensor.detach(), expected[key].detach(), key)


def run_in_threads(function: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """What three threads return that take turns as often as Python lets them."""
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(function())) for _ in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(found) == 3
    return found


def gradients_of(layer: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """By name, those of the input and of all parameters."""
    return {"x": x.grad, **{name: parameter.grad for name, parameter in layer.named_parameters()}}


def assert_each_same(made, expected, what: str) -> None:
    """Results of an operator and of its implementation in Python."""
    assert len(made) == len(expected)
    for i, (mine, other) in enumerate(zip(made, expected, strict=True)):
        assert mine.dtype == other.dtype and mine.stride() == other.stride(), f"{what}: result {i}"
        assert_bytes_equal(_raw(mine), _raw(other), f"{what}: result {i}")


def count_calls(run: Callable, *names: str) -> int:
    """How often run() calls these operators of torch on the CPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        run()
    return sum(event.name in names for event in found.events())


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
