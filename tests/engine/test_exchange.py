"""Gradients on their way, in one process."""

from __future__ import annotations

import pytest
import torch

from zerofp4.distributed import OwnError
from zerofp4.engine import GradientReducer, Sharding, build_buffers, exchange, flat, make_wire
from zerofp4.engine.stretches import Flight


def reducer_of(parameters, **wire):
    wire = make_wire(wire.get("gradient_wire"), wire.get("bucket_mb"))
    shardings = [Sharding(None)] * len(parameters)
    buffers = build_buffers(parameters, list(range(len(parameters))), shardings, wire)
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
    reducer._flight += [Flight(None, [Message(waited)] * 2, OwnError()) for _ in range(2)]
    gradient = torch.randn(300, device=device)
    reducer.reduce([gradient])
    assert len(waited) == 4
    assert reducer.buffers[0].gradients[:300].equal(gradient.bfloat16().float())


def test_a_ranks_own_error_is_the_first_that_is_no_interrupt():
    error = OwnError()
    with error:
        raise ValueError("first")
    with error:
        raise TypeError("second")
    with pytest.raises(KeyboardInterrupt), error:
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="first"):
        error.raise_if_any()
    assert not error


def test_a_bucket_that_is_full_travels_at_once(device, monkeypatch):
    """Whatever lies between its parameters: else its gradients could not be added up in the update."""
    monkeypatch.setattr(flat, "rank_and_size", lambda group: (1, 3))
    monkeypatch.setattr(exchange, "rank_and_size", lambda group: (1, 3))
    options = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
    parameters = [torch.zeros(n, **options) for n in (4096, 100, 3000, 5000)]
    nbytes = sum(p.nbytes for p in parameters)
    for bucket_mb, at_once in ((nbytes / 2**20, True), ((nbytes - 1) / 2**20, False)):
        wire = make_wire(None, bucket_mb)
        buffer = flat.DenseBuffer(range(4), parameters, None)
        buffer.allocate()
        assert GradientReducer([buffer], None, wire).can_bring(0) == at_once
