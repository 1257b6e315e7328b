"""Gathers of NVFP4 weights that go on when the step has ended, while the next forward pass runs.

Every rank begins its gathers in the step, in the order of the buckets. Whoever reads codes only waits, and
begins
nothing that other ranks take part in: so ranks may read whatever they like, whenever they like.

On a GPU a stream of its own waits for a gather and transposes what came; a reader's stream waits for an event
behind that, and the host for nothing. On the CPU the first reader waits for the gather and transposes.
"""

import threading
from collections.abc import Callable
from typing import Protocol

import torch

from zerofp4.distributed import in_phase
from zerofp4.engine.flat import PackedBuffer
from zerofp4.engine.transport import Waitable
from zerofp4.ops import current_stream, is_capturing
from zerofp4.storage import Gate

Derive = Callable[[], None]
"""Derives from the codes of all ranks what else the weights of a bucket have."""


class LateGather(Protocol):
    """The gather of one bucket's codes, behind the gate that readers of these codes pass."""

    def wait(self) -> None:
        """What the calling thread reads, or queues on the current stream, finds the codes."""

    def synchronize(self) -> None:
        """The same, and the host waits for the device."""


class HostGather:
    """A gather that the first reader, of whatever thread, completes on the host; other readers wait
    meanwhile.
    """

    def __init__(self, gate: Gate, gather: Waitable, derive: Derive):
        self._gate, self._lock = gate, threading.Lock()
        self._rest: tuple[Waitable, Derive] | None = (gather, derive)

    def wait(self) -> None:
        """Raises the gather's error to one reader: a rank has gone, and nothing more will come."""
        with self._lock:
            if self._rest is None:
                return
            (gather, derive), self._rest = self._rest, None
            try:
                in_phase("weights", gather.wait)()
                in_phase("transpose", derive)()
            finally:
                self._gate.open()

    synchronize = wait


class StreamGather:
    """A gather that a stream completes. event: recorded on that stream, behind everything."""

    def __init__(self, gate: Gate, device: torch.device, event: torch.cuda.Event):
        self._gate, self._device, self._event = gate, device, event
        self._streams: set[int] = set()
        """Streams that wait for the event already: asked at every read, and faster than the event."""

    def wait(self) -> None:
        """Raises RuntimeError while a CUDA graph is captured, which cannot wait for what is outside of it."""
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


class LateGathers:
    """The gathers that are on their way into the weights of some buckets.

    add() after a gather has begun; settle() before anybody writes to the weights again.
    """

    def __init__(self, device: torch.device):
        self._device = device
        # The next forward pass waits for what is done there.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._pending: list[tuple[Gate, LateGather]] = []

    def watch(self, bucket: PackedBuffer) -> None:
        """Tell the allocator that the weights of a bucket, as they are bound now, are written on another
        stream.
        """
        if self._stream is None:
            return
        bucket.weights.record_stream(self._stream)  # torch ignores it for codes, whose storage is their own
        for weight in bucket.parameters:
            for _, place in weight.record.places():
                place.record_stream(self._stream)

    def add(self, bucket: PackedBuffer, gather: Waitable, derive: Derive) -> None:
        if self._stream is None:
            self._close(bucket.gate, HostGather(bucket.gate, gather, derive))
            return
        event = torch.cuda.Event()
        try:
            with torch.cuda.stream(self._stream):  # behind the current stream, as the gather is
                in_phase("weights", gather.wait)()
                in_phase("transpose", derive)()
        finally:
            event.record(self._stream)
            # Behind the record: a reader in another thread takes an event without one for one that is over.
            self._close(bucket.gate, StreamGather(bucket.gate, self._device, event))

    def _close(self, gate: Gate, gather: LateGather) -> None:
        self._pending.append((gate, gather))
        gate.close(gather.wait)

    def settle(self) -> None:
        """What is queued next on the current stream finds all codes. Raises the first error of a gather, once
        all are over.
        """
        self._end(lambda gather: gather.wait())

    def synchronize(self) -> None:
        """The same, and the host waits for the device."""
        self._end(lambda gather: gather.synchronize())

    def _end(self, wait: Callable[[LateGather], None]) -> None:
        pending, self._pending = self._pending, []
        errors = []
        for gate, gather in pending:
            try:
                wait(gather)
            except Exception as error:
                errors.append(error)
            gate.open()
        if errors:
            del errors[1:]  # see OwnError
            raise errors.pop()
