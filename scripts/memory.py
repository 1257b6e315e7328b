"""How much memory a run of scripts/train.py takes, from beginning to end: what grows is a leak."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from zerofp4.distributed import Stage

PARTS = 10
STATM = Path("/proc/self/statm")
MEGABYTES = 1e6


class Memory:
    """The most memory in each tenth of a run's steps, on the rank that had most: `device`, what torch
    allocated on a GPU, and `host`, what the process had in memory, where Linux says it.

    shared: bytes on the GPU that other ranks can access, all the time, which torch does not count.
    """

    def __init__(self, device: torch.device, steps: int, shared: int = 0):
        self.device, self.steps, self._shared = device, steps, shared
        self.peaks: dict[str, list[float]] = {}
        if device.type == "cuda":
            self.peaks["device"] = []
            torch.cuda.reset_peak_memory_stats(device)
        if STATM.exists():
            self.peaks["host"] = []
        self._host = 0

    def note(self, step: int) -> None:
        """A step is done, counted from 1."""
        if "host" in self.peaks:
            self._host = max(self._host, int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        if step * PARTS // self.steps == (step - 1) * PARTS // self.steps:
            return
        if "host" in self.peaks:
            self.peaks["host"].append(self._host / MEGABYTES)
            self._host = 0
        if "device" in self.peaks:
            held = torch.cuda.max_memory_allocated(self.device) + self._shared
            self.peaks["device"].append(held / MEGABYTES)
            torch.cuda.reset_peak_memory_stats(self.device)

    def of_all_ranks(self) -> dict[str, list[float]]:
        """Megabytes by kind and part. Collective."""
        found = {}
        for kind, peaks in self.peaks.items():
            if not peaks:  # a run that had nothing left to do
                continue
            most = torch.tensor(peaks, dtype=torch.float64, device=self.device)
            with Stage("comparing memory", dist.group.WORLD):
                dist.all_reduce(most, dist.ReduceOp.MAX)
            found[kind] = [round(peak, 1) for peak in most.tolist()]
        return found


def describe(peaks: dict[str, list[float]]) -> str:
    """The second part, by when everything has its place, beside the last."""
    shown = [f"{kind} {parts[:2][-1]:,.1f} and {parts[-1]:,.1f} MB" for kind, parts in peaks.items()]
    when = "in the second and the last tenth of the steps"
    return f"most memory of a rank {when}: {', '.join(shown) or 'no steps'}"
