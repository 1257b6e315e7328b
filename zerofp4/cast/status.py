"""StepStatus: how a rank learns what kept a step or a gather from taking place."""

import ctypes

import torch

from zerofp4 import ops
from zerofp4.distributed import OwnError

PEER_MESSAGE = "another rank could not take part in the cast; no rank changed a weight"

_MESSAGES = {
    ops.PEER_ERROR: PEER_MESSAGE,
    ops.PLAN_MISMATCH: "the ranks are running different cast plans; no rank changed a weight",
    ops.GATHER_REFUSED: "rank {rank} could not take part in all_gather(); no rank changed a weight",
    ops.GATHER_WITHOUT_STEP: "all_gather() came after a step that did not take place; no rank "
    "changed a weight",
}

_retired: list[tuple[torch.cuda.Event, torch.Tensor]] = []
"""Pinned words of plans that are gone, with the end of what was queued to write them: torch does not know
that kernels write to them, and would give the memory to others.
"""


def _release_finished() -> None:
    _retired[:] = [(event, word) for event, word in _retired if not event.query()]


class StepStatus:
    """The word, int32 [1] on the CPU, pinned for a GPU, that a step or a gather leaves when the ranks did not
    agree, and that only take() clears; and the end of the last one.
    """

    def __init__(self, device: torch.device):
        self._device = device
        on_gpu = device.type == "cuda"
        self.word = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        # A plain read of the memory: every step looks at it.
        self._value = ctypes.c_int32.from_address(self.word.data_ptr())
        self._done = torch.cuda.Event() if on_gpu else None
        self._handle: int | None = None
        self._stream: torch.cuda.Stream | None = None
        if on_gpu:
            _release_finished()

    def __del__(self) -> None:
        if getattr(self, "_done", None) is not None:
            _retired.append((self._done, self.word))

    def queued(self) -> None:
        """A whole step, or gather, is on the device's current stream, which is not being captured; on the CPU
        it has been done, and what take() returns is raised.
        """
        if self._done is None:
            self.wait()
            return
        handle = ops.current_stream(self._device.index)
        if handle != self._handle:  # making a Stream takes the host longer than recording the event
            self._handle, self._stream = handle, torch.cuda.current_stream(self._device)
        self._done.record(self._stream)

    def take(self) -> RuntimeError | None:
        """What kept the ranks from writing in a step or gather that is done, once. Waits for nothing."""
        status = self._value.value
        if status == 0:
            return None
        self._value.value = 0
        rank, kind = divmod(status, 1 << ops.STATUS_RANK_SHIFT)
        return RuntimeError(_MESSAGES[kind].format(rank=rank))

    def wait(self) -> None:
        """Wait for the last one and raise what take() returns; nothing while a CUDA graph is captured."""
        if ops.is_capturing(self._device):
            return
        if self._done is not None:
            self._done.synchronize()
        OwnError(self.take()).raise_if_any()
