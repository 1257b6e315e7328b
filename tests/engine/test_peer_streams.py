"""What is queued behind what where ranks share memory: streams that only remember it, in place of a GPU's."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from zerofp4.engine.peers import Peers


class Stream:
    """done: all that is done once the stream is here."""

    def __init__(self):
        self.done: set[str] = set()

    def wait_stream(self, other):
        self.done |= other.done


class Event:
    done: frozenset[str] = frozenset()

    def record(self, stream):
        self.done = frozenset(stream.done)

    def wait(self, stream):
        stream.done |= self.done


@pytest.fixture
def queued(monkeypatch):
    """Peers with such streams; by name of a copy or barrier what was done before it; the current stream."""
    current, on, before = Stream(), [], {}

    @contextlib.contextmanager
    def within(stream):
        on.append(stream)
        yield
        on.pop()

    def queue(name):
        before[name] = set(on[-1].done)
        on[-1].done.add(name)

    cuda = SimpleNamespace(current_stream=lambda _: current, stream=within, Event=Event)
    monkeypatch.setattr("zerofp4.engine.peers.torch", SimpleNamespace(cuda=cuda))
    peers = Peers.__new__(Peers)
    peers.device, peers._sent = torch.device("cuda", 0), Event()
    peers._stream, peers._other_stream = Stream(), Stream()
    count = iter(range(10))
    peers._gathers = SimpleNamespace(run=lambda: queue(f"barrier {next(count)}"))
    copy = SimpleNamespace
    peers.size = 2
    peers._copies_of = lambda whole, first, last: [
        (copy(copy_=lambda own, non_blocking: queue(f"{whole} {first}:{last}")), None)
    ]
    return peers, before, current


FIRST = SimpleNamespace(numel=lambda: 128)
"""Two ranks' slices of 64 elements."""


def _text(of):
    return f"{FIRST} {of}"


@pytest.mark.parametrize("count", [0, 48])
def test_nothing_is_written_before_all_ranks_are_there(queued, count):
    peers, before, current = queued
    current.done.add("update")
    peers.open()
    current.done.add("cast")
    if count:
        peers.start_sending(FIRST, count)
    current.done.add("rest")
    peers.start_gather(FIRST, count)
    parts = [_text(of) for of in (("0:48", "48:64") if count else ("0:32", "32:64"))]
    for part in parts:
        assert {"barrier 0", "update", "cast"} <= before[part]
    assert ("rest" in before[parts[0]]) == (count == 0) and "rest" in before[parts[1]]
    assert set(parts) <= before["barrier 1"]


def test_an_update_waits_until_codes_have_left_and_not_for_other_ranks(queued):
    peers, _, current = queued
    peers.open()
    gather = peers.start_gather(FIRST)
    peers.wait_until_sent()
    assert {_text("0:32"), _text("32:64")} <= current.done and "barrier 1" not in current.done
    gather._done.wait(current)
    assert "barrier 1" in current.done
