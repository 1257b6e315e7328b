"""What a step of scripts/train.py takes its time for, and the bytes that a rank sends in it."""

import time

import torch

PHASES = {
    "passes": "forward and backward",
    "clip_grad_norm_": "clip_grad_norm_, with the reduction of gradients",
    "step": "step",
}
"""By name in the summary, what people read."""


class Phases:
    """Milliseconds of each phase, in the mean of all steps but the first, which loads kernels and opens
    connections, and those that are left out. On a GPU by its own clock, so that nothing waits for it.
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._marks: list[float | torch.cuda.Event] = []
        self._totals = dict.fromkeys(PHASES, 0.0)
        self._steps = -1  # the first does not count

    def mark(self) -> None:
        """A step begins, or one of its phases ends, in their order."""
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def count(self, left_out: bool = False) -> dict[str, float]:
        """A step is done, on the device too. Returns the milliseconds of its phases."""
        marks, self._marks = self._marks, []
        found = {
            name: begin.elapsed_time(end) if self._on_gpu else (end - begin) * 1e3
            for name, begin, end in zip(PHASES, marks[:-1], marks[1:], strict=True)
        }
        if not left_out:
            self._steps += 1
            for name, milliseconds in found.items() if self._steps else ():
                self._totals[name] += milliseconds
        return found

    def of_step(self) -> dict[str, float]:
        """Empty where no step counts."""
        return {name: total / self._steps for name, total in self._totals.items()} if self._steps > 0 else {}


def bytes_sent(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """By this rank in a step of a ZeroFP4Optimizer, or read there by others; empty for optimizers that do not
    say it.
    """
    describe = getattr(optimizer, "describe", None)
    return {} if describe is None else describe()["bytes_sent"]


def shared_bytes(optimizer: torch.optim.Optimizer) -> int:
    """On this rank's GPU, which other ranks can access."""
    describe = getattr(optimizer, "describe", None)
    return 0 if describe is None else describe()["shared_bytes"]


def describe(milliseconds: dict[str, float], sent: dict[str, int]) -> str:
    times = ", ".join(f"{PHASES[name]} {value:,.1f} ms" for name, value in milliseconds.items())
    text = f"a step of rank 0: {times or 'there was one only'}"
    if any(sent.values()):
        shares = ", ".join(f"{nbytes:,} bytes of {what}" for what, nbytes in sent.items())
        text += f"; others get from it {shares}"
    return text
