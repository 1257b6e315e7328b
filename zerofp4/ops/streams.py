"""Memory that is kept between calls, and the streams of a GPU that use it."""

from collections.abc import Sequence

import torch

from zerofp4.ops.device import current_stream, is_capturing


class Filled:
    """When kept memory was filled. What fills it is queued on one stream, and a later call may be on another,
    which would read it before: whoever keeps such memory calls note() once it is filled, and wait() before
    each use.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self.stream: int | None = None
        """Of the last note() or wait(): what is queued there finds the memory filled."""

    def note(self) -> None:
        """What fills it is queued on the current stream."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))
            self.stream = current_stream(self._device.index)

    def wait(self) -> None:
        """Let the current stream wait for that. Not while a CUDA graph is captured, which nothing outside can
        be waited for in: torch.cuda.graph has waited for everything.
        """
        if self._event is None:
            return
        stream = current_stream(self._device.index)
        if stream != self.stream and not is_capturing(self._device):
            torch.cuda.current_stream(self._device).wait_event(self._event)
        self.stream = stream


class StreamUse:
    """Tells torch's allocator on which streams a plan uses memory of its own: once freed, it must not be
    given to others before what is queued there has run.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._last: int | None = None

    def forget(self) -> None:
        """There is memory that was not told of."""
        self._last = None

    def note(self, tensors: Sequence[torch.Tensor]) -> bool:
        """What is queued next on the current stream uses `tensors`. O(1) while the stream stays the same;
        returns whether it is another, or forget() was called.
        """
        if self._device.type == "cpu":
            return False
        stream = current_stream(self._device.index)
        if stream == self._last:
            return False
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream(self._device))
        self._last = stream
        return True
