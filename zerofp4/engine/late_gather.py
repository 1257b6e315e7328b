"""Gathers of NVFP4 weights that go on after the step, while the next forward pass runs.

Every rank begins its gathers in the step. Readers of codes only wait, so ranks may read in any order. On a
GPU a separate stream waits for a gather and transposes the codes; a reader's stream waits for an event after
that, and the host never waits. On the CPU the first reader waits for the gather and transposes.
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
    """The gather of one bucket's codes. Readers of the codes wait for it at the gate."""

    def __init__(self, gate: Gate, gather: Waitable, derive: Callable[[], None], device: torch.device):
        self.gate, self._device, self._lock = gate, device, threading.Lock()
        self._rest: tuple[Waitable, Callable[[], None]] | None = (gather, derive)
        self.event: torch.cuda.Event | None = None  # on a GPU, recorded after the transposes
        self._waiting: set[int] = set()  # streams that wait for the event: faster to ask than the event

    def complete(self) -> None:
        """Wait for the codes of all ranks, and derive columns from them, once."""
        if self._rest is not None:
            (gather, derive), self._rest = self._rest, None
            in_phase("weights", gather.wait)()
            in_phase("transpose", derive)()

    def wait(self) -> None:
        """Make the current stream, or on the CPU this thread, wait for the codes.

        On the CPU one reader raises the gather's error: a rank has gone, and nothing more will come. On a GPU
        raises RuntimeError during the capture of a CUDA graph, which cannot wait for an event outside of it.
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
    """The unfinished gathers of weights. settle() comes before the next write to the weights."""

    def __init__(self, device: torch.device):
        self._device = device
        # Of high priority, since the next forward pass waits for it.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._pending: list[LateGather] = []

    def watch(self, bucket: Bucket) -> None:
        """Tell the allocator that another stream writes the weights of a bucket."""
        if self._stream is None:
            return
        for flat in bucket.gathered:
            flat.record_stream(self._stream)  # torch ignores it for codes, whose storage is their own
        for weight in bucket.parameters:
            for _, place in weight.record.places():
                place.record_stream(self._stream)

    def add(self, bucket: Bucket, gather: Waitable, derive: Callable[[], None]) -> None:
        """A gather has begun. derive: makes the columnwise copies from the codes of all ranks."""
        late = LateGather(bucket.gate, gather, derive, self._device)
        self._pending.append(late)
        try:
            if self._stream is not None:
                with torch.cuda.stream(self._stream):
                    late.complete()
        finally:
            if self._stream is not None:
                late.event = self._stream.record_event()
            # The gate closes last: a reader in another thread must not find an event before its record().
            bucket.gate.close(late.wait)

    def settle(self) -> None:
        """Make the current stream wait for all gathers. Raises the first error of one: a rank has gone, and
        the other gathers are not waited for.
        """
        pending, self._pending = self._pending, []
        try:
            for late in pending:
                late.wait()
        finally:
            for late in pending:
                late.gate.open()

    def synchronize(self) -> None:
        """Make the host wait for all gathers."""
        if self._stream is not None and self._pending:
            self._stream.synchronize()
        self.settle()
