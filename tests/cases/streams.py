"""Streams and events in place of a GPU's, which only remember what is queued after what."""

from __future__ import annotations


class Stream:
    """done: all that is done once the stream is here."""

    def __init__(self, handle: int = 0):
        self.cuda_stream = handle
        self.done: set[str] = set()

    def wait_stream(self, other: Stream) -> None:
        self.done |= other.done

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        Event.arrived = True


class Event:
    """arrived: whether the device has come there. asked: how often somebody looked."""

    arrived, asked = False, 0

    def __init__(self):
        self.done: frozenset[str] = frozenset()

    def record(self, stream: Stream) -> None:
        self.done = frozenset(stream.done)

    def wait(self, stream: Stream) -> None:
        stream.done |= self.done

    def query(self) -> bool:
        Event.asked += 1
        return Event.arrived
