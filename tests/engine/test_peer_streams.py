"""What is queued behind what where ranks share memory: streams that only remember it, in place of a GPU's."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from zerofp4.engine.peers import Peers, halves


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
    gather.wait(current)
    assert "barrier 1" in current.done


def start_copies(peers, name):
    return peers.start_copies(peers._copies_of(name, 0, 32), peers._copies_of(name, 32, 64))


def parts_of(*names):
    return {f"{name} {part}" for name in names for part in ("0:32", "32:64")}


def test_gradients_leave_behind_codes_and_what_was_sent_before(queued):
    """In any order, those of a round are where the last one's were read."""
    peers, before, current = queued
    peers.open()
    peers.start_gather(FIRST)
    for name in ("early", "late"):
        current.done.add(f"backward of {name}")
        sent = start_copies(peers, name)
    for part in parts_of("early"):
        assert {*parts_of(FIRST), "barrier 1", "backward of early"} <= before[part]
        assert "backward of late" not in before[part]
    for part in parts_of("late"):
        assert {*parts_of("early"), "backward of late"} <= before[part]
    assert not parts_of("early") & current.done
    sent.wait(current)
    assert parts_of("early", "late") <= current.done


def test_other_ranks_are_told_once_all_gradients_have_left(queued):
    peers, _, current = queued
    start_copies(peers, "gradients")
    peers.wait_until_sent()
    assert parts_of("gradients") <= current.done


def test_halves():
    target, source = torch.zeros(600), torch.arange(600.0)
    for copies in halves([(target, source)]):
        for there, own in copies:
            assert own.data_ptr() % 64 == source.data_ptr() % 64
            there.copy_(own)
    assert target.equal(source)
