"""Gradients on their way, in one process."""

from __future__ import annotations

import pytest
import torch

from zerofp4.engine import Failures, GradientReducer, build_buffers, make_wire
from zerofp4.engine.exchange import Flight


def reducer_of(parameters, **wire):
    wire = make_wire(wire.get("gradient_wire"), wire.get("bucket_mb"))
    buffers = build_buffers(parameters, list(range(len(parameters))), None, wire)
    for buffer in buffers:
        buffer.allocate()
    return buffers, GradientReducer(buffers, None, wire)


class Message:
    def __init__(self, waited):
        self.wait = lambda: waited.append(1)


def test_messages_of_a_step_that_was_left_are_waited_for(device):
    """They would arrive where those of the next one do."""
    parameters = [torch.zeros(300, device=device)]
    _, reducer = reducer_of(parameters, gradient_wire=torch.bfloat16)
    waited = []
    reducer._flight += [Flight(None, [Message(waited)] * 2, Failures()) for _ in range(2)]
    gradient = torch.randn(300, device=device)
    reducer.reduce([gradient])
    assert len(waited) == 4
    assert reducer.buffers[0].gradients[:300].equal(gradient.bfloat16().float())


def test_failures_keep_errors_but_not_interrupts():
    failures = Failures()
    with failures:
        raise ValueError("first")
    with failures:
        raise TypeError("second")
    with pytest.raises(KeyboardInterrupt), failures:
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="first"):
        failures.raise_first()
