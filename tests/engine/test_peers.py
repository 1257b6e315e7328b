"""Ranks that share memory: the order of their copies, and codes that leave while others are made."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
from cases.streams import Event, Stream
from helpers import assert_bytes_equal

import zerofp4
from zerofp4.engine import buckets
from zerofp4.engine.peers import Peers, PushExchange, find_halfway, halves


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
    peers.device = torch.device("cuda", 0)
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


def parts_of(*names, cut=32):
    """What a stream has done once these have left, of whose slice the first part ends at `cut`."""
    return {f"{name} {part}" for name in names for part in (f"0:{cut}", f"{cut}:64")}


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
    first, second = sorted(parts_of(FIRST, cut=count or 32))
    for part in (first, second):
        assert {"barrier 0", "update", "cast"} <= before[part]
    assert ("rest" in before[first]) == (count == 0) and "rest" in before[second]
    assert {first, second} <= before["barrier 1"]


def test_gradients_leave_behind_codes_and_what_was_sent_before(queued):
    """In any order; those of a round are where the last one's were read."""
    peers, before, current = queued
    peers.open()
    gather = peers.start_gather(FIRST)
    for name in ("early", "late"):
        current.done.add(f"backward of {name}")
        sent = peers.start_copies(peers._copies_of(name, 0, 32), peers._copies_of(name, 32, 64))
    for part in parts_of("early"):
        assert {*parts_of(FIRST), "barrier 1", "backward of early"} <= before[part]
        assert "backward of late" not in before[part]
    for part in parts_of("late"):
        assert {*parts_of("early"), "backward of late"} <= before[part]
    gather.wait(current)
    assert "barrier 1" in current.done and not parts_of("early") & current.done
    sent.wait(current)
    assert parts_of("early", "late") <= current.done


def test_an_update_waits_until_gradients_have_left_and_not_for_codes(queued):
    peers, _, current = queued
    sent = peers.start_copies(peers._copies_of("early", 0, 32), peers._copies_of("early", 32, 64))
    peers.start_gather(FIRST)
    exchange = PushExchange.__new__(PushExchange)
    exchange.memory = SimpleNamespace(flat=SimpleNamespace(data_ptr=lambda: 64))
    exchange._left = {64: SimpleNamespace(wait=lambda: sent.wait(current))}
    exchange._peers = SimpleNamespace(arrive=lambda: current.done.add("arrival"))
    exchange.finish()
    assert {"arrival", *parts_of("early")} <= current.done and not parts_of(FIRST) & current.done


def test_halves():
    target, source = torch.zeros(600), torch.arange(600.0)
    for copies in halves([(target, source)]):
        for there, own in copies:
            assert own.data_ptr() % 64 == source.data_ptr() % 64
            there.copy_(own)
    assert target.equal(source)


# Codes that leave while others are made


LISTS = {
    "large": [(400, 512), (320, 640)],
    "tiles cut off": [(78, 300), (402, 514), (334, 260)],
    "long rows": [(2, 40000), (800, 512)],
    "a stack": [(5, 72, 512), (96, 512)],
    "small ones": [(16, 16), (640, 384), (2, 8), (48, 640), (0, 32), (300, 512)],
}
POISON = 0xA5


def keep(codes, found):
    found += [each.clone() for each in codes]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("what", LISTS)
def test_codes_that_leave_are_there(device, monkeypatch, what, ranks):
    """Of every rank: those before halfway, whichever row of whichever weight it owns in part that is; and
    where there is enough to do, not all the others.
    """
    parted = 0
    for rank in range(ranks):
        monkeypatch.setattr(buckets, "rank_and_size", lambda group, rank=rank: (rank, ranks))
        weights = [zerofp4.empty(shape, dtype=torch.float32, device=device) for shape in LISTS[what]]
        bucket = buckets.Bucket(range(len(weights)), [buckets.Trained(weight, "") for weight in weights])
        halfway = find_halfway(bucket)
        if halfway is None:
            assert what == "long rows" and rank == 0  # whose middle is in its first row of tiles
            continue
        position, row, sent = halfway
        assert 0.2 < 2 * sent / bucket.slice_numel <= 0.5
        for weight in weights:
            weight.rowwise_data.fill_(POISON)
        masters = [torch.randn(s.numel, device=device) if s.numel else None for s in bucket.shards]
        starts = [s.start if s.numel else None for s in bucket.shards]
        plan, found = zerofp4.CastPlan(weights, masters, starts), []
        plan.start_step()
        codes = [weight.rowwise_data for weight in weights]
        plan.finish_step((position, row, functools.partial(keep, codes, found)))
        plan.post()
        for i, (weight, half) in enumerate(zip(weights, found, strict=True)):
            shard, before = bucket.shards[i], bucket.offsets[i] - bucket.begin
            last = max(shard.start, min(shard.start + shard.numel, 2 * sent - before))
            done = slice(shard.start // 2, last // 2)
            assert_bytes_equal(half.view(-1)[done], weight.rowwise_data.view(-1)[done], f"{rank}: {i}")
        parted += any(not torch.equal(x.rowwise_data, half) for x, half in zip(weights, found, strict=True))
    assert parted >= min(ranks, 2)
