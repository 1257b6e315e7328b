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
    peers._halves_of = lambda whole: tuple(
        [(copy(copy_=lambda own, non_blocking, half=half: queue(f"{whole} {half}")), None)] for half in "ab"
    )
    return peers, before, current


def test_nothing_is_written_before_all_ranks_are_there(queued):
    peers, before, current = queued
    current.done.add("update")
    peers.open()
    current.done.add("cast")
    peers.start_gather("first")
    for half in ("first a", "first b"):
        assert {"barrier 0", "update", "cast"} <= before[half]
    assert {"first a", "first b"} <= before["barrier 1"]


def test_an_update_waits_until_codes_have_left_and_not_for_other_ranks(queued):
    peers, _, current = queued
    peers.open()
    gather = peers.start_gather("first")
    peers.wait_until_sent()
    assert {"first a", "first b"} <= current.done and "barrier 1" not in current.done
    gather._done.wait(current)
    assert "barrier 1" in current.done
