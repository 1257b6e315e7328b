"""Gradients that begin to travel one bucket after the other: on which stream they are copied."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from zerofp4.engine import EarlyReducer, FlatGradients, exchange, flat, make_wire


@pytest.mark.parametrize(
    ("wire", "expected"),
    [(None, ["copy", "aside", "send"]), (torch.float32, ["aside", "copy", "send"])],
    ids=["they stay", "memory in turns"],
)
def test_where_they_are_copied(monkeypatch, wire, expected):
    """Where they stay a backward pass may write again, after zero_grad(), as soon as its stream is there: a
    copy on another stream, which waits for other ranks, would come after it.
    """
    for module in (flat, exchange):
        monkeypatch.setattr(module, "rank_and_size", lambda group: (0, 2))
    log = []

    @contextlib.contextmanager
    def aside(self):
        log.append("aside")
        yield

    def start_exchange(*_):
        log.append("send")
        return []

    monkeypatch.setattr(EarlyReducer, "_aside", aside)
    monkeypatch.setattr(exchange, "start_exchange", start_exchange)
    monkeypatch.setattr(FlatGradients, "take", lambda self, gradients: log.append("copy"))
    parameter = torch.zeros(700, dtype=torch.bfloat16, requires_grad=True)
    buffer = flat.DenseBuffer([0], [parameter], None)
    buffer.allocate()
    reducer = EarlyReducer([buffer], None, make_wire(wire, None, [parameter]))
    log.clear()  # of the build
    reducer.start(0, {0: torch.ones(700, dtype=torch.bfloat16)})
    assert log == expected


def test_ranks_are_connected_when_it_is_built(monkeypatch):
    """By a message from each to every other: the first waits for the other rank, and no backward pass may."""
    for module in (flat, exchange):
        monkeypatch.setattr(module, "rank_and_size", lambda group: (1, 3))
    calls, waited = [], []

    def start_exchange(arrivals, sent, *_):
        calls.append([[[m.numel() for m in messages] for messages in side] for side in (arrivals, sent)])
        return [SimpleNamespace(wait=lambda: waited.append(1))]

    monkeypatch.setattr(exchange, "start_exchange", start_exchange)
    parameters = [torch.zeros(700, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    buffers = [flat.DenseBuffer([i], [p], None) for i, p in enumerate(parameters)]
    for buffer in buffers:
        buffer.allocate()
    EarlyReducer(buffers, None, make_wire(None, None, parameters))
    assert calls == [[[[1]] * 3] * 2] and waited == [1]
