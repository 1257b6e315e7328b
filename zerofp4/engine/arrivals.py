"""Weights whose gather goes on when a step has ended, and who waits for it.

Every rank begins with its gathers in the step, in the order of the buckets; whoever reads only waits, and
begins nothing that others have to take part in. So ranks may read whatever they like, whenever they like.

On a GPU a stream of its own waits for the gather and transposes what came: a reader's stream waits for an
event behind that, and the host for nothing. On the CPU the first reader waits for the gather and transposes.
"""

import threading
from collections.abc import Callable
from typing import Protocol

import torch

from zerofp4.distributed import Pending, in_phase
from zerofp4.engine.flat import PackedBuffer
from zerofp4.engine.peers import PeerGather
from zerofp4.ops import current_stream, is_capturing
from zerofp4.storage import Gate

Gather = Pending | PeerGather
Complete = Callable[[], None]


class Arrival(Protocol):
    """Of the codes of a bucket."""

    def wait(self) -> None:
        """What the calling thread reads, or queues on the current stream, finds the codes."""

    def synchronize(self) -> None:
        """The same, and the host waits for the device."""


class HostArrival:
    """One that the first reader completes, of whatever thread; the others wait for it meanwhile."""

    def __init__(self, gate: Gate, gather: Gather, complete: Complete):
        self._gate, self._lock = gate, threading.Lock()
        self._rest: tuple[Gather, Complete] | None = (gather, complete)

    def wait(self) -> None:
        """Raises what the gather raises, to one reader: a rank has gone, and nothing more will come."""
        with self._lock:
            if self._rest is None:
                return
            (gather, complete), self._rest = self._rest, None
            try:
                in_phase("weights", gather.wait)()
                in_phase("transpose", complete)()
            finally:
                self._gate.open()

    synchronize = wait


class StreamArrival:
    """One that a stream completes. event: recorded there, behind all."""

    def __init__(self, gate: Gate, device: torch.device, event: torch.cuda.Event):
        self._gate, self._device, self._event = gate, device, event
        self._streams: set[int] = set()
        """Those that wait for it: asked at every read until it is known to be over, and faster than that."""

    def wait(self) -> None:
        """Raises RuntimeError while a CUDA graph is captured, which can wait for nothing outside of it."""
        stream = current_stream(self._device.index)
        if stream in self._streams:
            return
        if is_capturing(self._device):
            raise RuntimeError(
                "a CUDA graph is captured that reads NVFP4 weights, which are on their way since the last "
                "step (overlap='forward'): call check() of the optimizer before the capture, and before each "
                "replay behind a step"
            )
        if self._event.query():
            self._gate.open()
            return
        self._event.wait(torch.cuda.current_stream(self._device))
        self._streams.add(stream)

    def synchronize(self) -> None:
        self._event.synchronize()


class Arrivals:
    """What is on its way into the NVFP4 weights of some buffers.

    add() after a gather has begun, settle() before anybody writes to the weights again.
    """

    def __init__(self, device: torch.device):
        self._device = device
        # The next forward pass waits for what is done there.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._pending: list[tuple[Gate, Arrival]] = []

    def watch(self, buffer: PackedBuffer) -> None:
        """Its weights, as they are bound now, are written to on a stream that the allocator does not know."""
        if self._stream is None:
            return
        buffer.weights.record_stream(self._stream)  # torch ignores it for codes, whose storage is their own
        for weight in buffer.parameters:
            for _, place in weight.record.places():
                place.record_stream(self._stream)

    def add(self, buffer: PackedBuffer, gather: Gather, complete: Complete) -> None:
        """complete: derives from the codes of all ranks what else the weights have."""
        if self._stream is None:
            self._close(buffer.gate, HostArrival(buffer.gate, gather, complete))
            return
        event = torch.cuda.Event()
        try:
            with torch.cuda.stream(self._stream):  # behind the current stream, as the gather is
                in_phase("weights", gather.wait)()
                in_phase("transpose", complete)()
        finally:
            event.record(self._stream)
            # Behind the record: a reader in another thread takes an event without one for one that is over.
            self._close(buffer.gate, StreamArrival(buffer.gate, self._device, event))

    def _close(self, gate: Gate, arrival: Arrival) -> None:
        self._pending.append((gate, arrival))
        gate.close(arrival.wait)

    def settle(self) -> None:
        """Have everything here for what is queued next on the current stream. Raises the first error of a
        gather, once all are over.
        """
        self._end(lambda arrival: arrival.wait())

    def synchronize(self) -> None:
        """The same, and the host waits for the device."""
        self._end(lambda arrival: arrival.synchronize())

    def _end(self, wait: Callable[[Arrival], None]) -> None:
        pending, self._pending = self._pending, []
        errors = []
        for gate, arrival in pending:
            try:
                wait(arrival)
            except Exception as error:
                errors.append(error)
            gate.open()
        if errors:
            del errors[1:]  # see OwnError
            raise errors.pop()
