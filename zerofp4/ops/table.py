"""Descriptors of a native plan in the memory of a GPU."""

import torch

from zerofp4.ops.device import current_stream, is_capturing
from zerofp4.ops.streams import Filled


class DescriptorTable:
    """The copy of a native plan's descriptors on the GPU; none on the CPU, or where they travel in a kernel's
    arguments.

    Loads go into the same memory until a CUDA graph reads it (`hold`): then that stays as it is, and the next
    load goes elsewhere. So does one on another stream than the last use, which may not have run yet.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.memory: list[torch.Tensor] = []
        """The table in use, last, after those that graphs read."""
        self._held = False
        self._contents = b""
        self._filled = Filled(device)

    def hold(self) -> None:
        """What is in use now is what a CUDA graph, being captured, reads in every replay."""
        self._held = True

    def load(self, plan, needed: bool) -> None:
        """Give a native plan the table, with its descriptors in it: queued on the current stream. Nothing
        happens where it is not needed, as that of one descriptor often is not.

        Only the first call waits for the copy. A table that has these contents is not copied to again. Raises
        RuntimeError for a copy while a CUDA graph is captured.
        """
        if self._device.type == "cpu" or not needed:
            return
        contents = plan.descriptor_bytes()
        if contents != self._contents:
            self._copy(contents)
        plan.set_device_descriptors(self.memory[-1].data_ptr())

    def _copy(self, contents: bytes) -> None:
        if is_capturing(self._device):
            # A replay would read the staging memory again, long after it went back to the allocator.
            raise RuntimeError(
                "while a CUDA graph is captured a plan cannot take addresses, and it is new or storage has "
                "moved: make the same call once before the capture, with the same storage"
            )
        first = not self.memory
        fits = not first and self.memory[-1].numel() == len(contents)
        if not fits or self._held or self._filled.stream != current_stream(self._device.index):
            kept = self.memory if self._held else self.memory[:-1]
            self.memory = [*kept, torch.empty(len(contents), dtype=torch.uint8, device=self._device)]
            self._held = False
        # torch does not reuse pinned memory before the copies from it are done.
        staging = torch.frombuffer(bytearray(contents), dtype=torch.uint8).pin_memory()
        self.memory[-1].copy_(staging, non_blocking=not first)
        self._filled.note()
        self._contents = contents

    def wait(self) -> None:
        """Let the current stream wait for the load."""
        if self.memory:
            self._filled.wait()
