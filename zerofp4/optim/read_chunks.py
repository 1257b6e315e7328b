"""What a load has read is checked and copied to its place while torch reads the next."""

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

LARGE = 2**19
"""Bytes of a chunk from which on another thread has it: for less, telling that thread takes as long."""

MOST_SMALL = 15
"""Chunks of less that may wait for a large one."""


class ReadChunks:
    """The chunks that are read into one state dict. A large one is on its way at a time, so that of the
    buffers that torch reads files into there are two at a time, as without; small ones get there behind it,
    since a GPU takes them in this order, and who reads would wait for it.

    Who reads raises what went wrong with a chunk: at a later one, or at the last. With the last element that
    a load expects it waits for all of them, so that dcp.load() returns, and raises, as if each chunk had been
    there at once; where a file has fewer elements, those who use them wait() first. Copies are the same.
    """

    def __init__(self):
        self._pending: list[Future] = []
        self._missing, self._has_begun = 0, False
        self._lock = threading.Lock()  # a storage reader may have threads

    def expect(self, numel: int) -> None:
        """Elements that a load is to bring, told before any is there; then those of another load."""
        with self._lock:
            self._missing = numel + (0 if self._has_begun else self._missing)
            self._has_begun = False

    def bring(self, chunk: torch.Tensor, arrive: Callable[[], None], nobody_else_writes: bool) -> None:
        """Have a chunk arrive. arrive: reads a tensor and writes to the chunk, or raises. nobody_else_writes:
        to what it reads, also later.
        """
        with self._lock:
            is_large = chunk.nbytes >= LARGE
            if is_large or len(self._pending) > MOST_SMALL:
                self._wait()
            elsewhere = nobody_else_writes and (is_large or bool(self._pending))
            if elsewhere:
                self._pending.append(_thread(os.getpid()).submit(_as_here(chunk.device, arrive)))
        if not elsewhere:
            arrive()
        with self._lock:
            self._missing, self._has_begun = self._missing - chunk.numel(), True
            if self._missing <= 0:
                self._wait()

    def wait(self) -> None:
        """Raises what went wrong with the first of the chunks that were on their way."""
        with self._lock:
            self._wait()

    def abandon(self) -> None:
        """Nobody will use what was read: its memory is needed, and nothing is on its way there any more."""
        with contextlib.suppress(Exception):
            self.wait()

    def _wait(self) -> None:
        errors = list(filter(None, (one.exception() for one in self._pending)))
        self._pending = []
        if errors:
            del errors[1:]  # see OwnError
            raise errors.pop()

    def __deepcopy__(self, memo: dict) -> "ReadChunks":
        return self


@functools.cache
def _thread(process: int) -> ThreadPoolExecutor:
    """Of this process; one that was forked has no threads of its parent's."""
    return ThreadPoolExecutor(1, "zerofp4-load")


def _as_here(device: torch.device, call: Callable[[], None]) -> Callable[[], None]:
    """The call, with what a thread has for itself as it is here: on a GPU in the order of the current stream,
    behind whoever had the memory before.
    """
    inference, stream = torch.is_inference_mode_enabled(), contextlib.nullcontext()
    if device.type == "cuda":
        stream = torch.cuda.stream(torch.cuda.current_stream(device))

    def run() -> None:
        with torch.inference_mode(inference), stream:
            call()

    return run
