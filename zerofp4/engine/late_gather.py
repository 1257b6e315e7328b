"""Gathers of NVFP4 weights that go on when the step has ended, while the next forward pass runs.

Every rank begins its gathers in the step. Whoever reads codes only waits, so ranks may read in any order. On
a GPU a stream of its own waits for a gather and transposes what came; a reader's stream waits for an event
behind that, and the host for nothing. On the CPU the first reader waits for the gather and transposes.
"""

import threading
from collections.abc import Callable

import torch

from zerofp4.distributed import in_phase
from zerofp4.engine.buckets import Bucket
from zerofp4.engine.exchange import Waitable
from zerofp4.ops import current_stream, is_capturing
from zerofp4.storage import Gate


class LateGather:
    """The gather of one bucket's codes, behind the gate that readers of these codes pass."""

    def __init__(self, gate: Gate, gather: Waitable, derive: Callable[[], None], device: torch.device):
        self.gate, self._device, self._lock = gate, device, threading.Lock()
        self._rest: tuple[Waitable, Callable[[], None]] | None = (gather, derive)
        self.event: torch.cuda.Event | None = None
        """On a GPU, recorded behind everything."""
        self._waiting: set[int] = set()
        """Streams that wait for the event already: asked at every read, and faster than the event."""

    def complete(self) -> None:
        """Wait for the codes of all ranks, and derive the rest from them, once."""
        if self._rest is not None:
            (gather, derive), self._rest = self._rest, None
            in_phase("weights", gather.wait)()
            in_phase("transpose", derive)()

    def wait(self) -> None:
        """What the calling thread reads, or queues on the current stream, finds the codes.

        On the CPU the gather's error is raised to one reader: a rank has gone, and nothing more will come. On
        a GPU raises RuntimeError while a CUDA graph is captured, which cannot wait for what is outside of it.
        """
        if self.event is None:
            with self._lock:
                try:
                    self.complete()
                finally:
                    self.gate.open()
            return
        stream = current_stream(self._device.index)
        if stream in self._waiting:
            return
        if is_capturing(self._device):
            raise RuntimeError(
                "a CUDA graph is captured that reads NVFP4 weights, which are on their way since the last "
                "step (overlap='forward'): call check() of the optimizer before the capture, and before each "
                "replay behind a step"
            )
        if self.event.query():
            self.gate.open()
            return
        self.event.wait(torch.cuda.current_stream(self._device))
        self._waiting.add(stream)


class LateGathers:
    """The gathers that are on their way into the weights of some buckets: add() after one has begun, settle()
    before anybody writes to the weights again.
    """

    def __init__(self, device: torch.device):
        self._device = device
        # The next forward pass waits for what is done there.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._pending: list[LateGather] = []

    def watch(self, bucket: Bucket) -> None:
        """Tell the allocator that the weights of a bucket are written on another stream."""
        if self._stream is None:
            return
        for flat in bucket.gathered:
            flat.record_stream(self._stream)  # torch ignores it for codes, whose storage is their own
        for weight in bucket.parameters:
            for _, place in weight.record.places():
                place.record_stream(self._stream)

    def add(self, bucket: Bucket, gather: Waitable, derive: Callable[[], None]) -> None:
        """derive: derives from the codes of all ranks what else the weights of the bucket have."""
        late = LateGather(bucket.gate, gather, derive, self._device)
        self._pending.append(late)
        try:
            if self._stream is not None:
                with torch.cuda.stream(self._stream):
                    late.complete()
        finally:
            if self._stream is not None:
                event = torch.cuda.Event()
                event.record(self._stream)
                late.event = event
            # Not before: a reader in another thread finds no event that is not recorded.
            bucket.gate.close(late.wait)

    def settle(self) -> None:
        """What is queued next on the current stream finds all codes. Raises the first error of a gather: a
        rank has gone then, and the other gathers are not waited for.
        """
        pending, self._pending = self._pending, []
        try:
            for late in pending:
                late.wait()
        finally:
            for late in pending:
                late.gate.open()

    def synchronize(self) -> None:
        """The same, and the host waits for the device."""
        if self._stream is not None and self._pending:
            self._stream.synchronize()
        self.settle()
