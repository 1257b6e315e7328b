"""What a step of scripts/train.py takes its time for, by the clock and phase by phase under torch.profiler,
and the bytes that a rank sends. scripts/bench.py reads its profiles with the same functions.
"""

import contextlib
import json
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zerofp4.distributed import PHASES, PREFIX
from zerofp4.optim import ZeroFP4Optimizer

CLOCKED = {
    "passes": "forward and backward",
    "clip_grad_norm_": "clip_grad_norm_, with the reduction of gradients",
    "step": "step",
}
"""By name in the summary, what people read."""

WARM_UP = 3
"""Steps of a process that load kernels, open connections and let memory grow."""

STEP = "Optimizer.step#ZeroFP4Optimizer.step"
"""What torch calls step() in a trace."""
OTHER = "other"
NAMES = {**PHASES, OTHER: "rest of step()"}
RANGES = {PREFIX + phase: phase for phase in PHASES} | {STEP: OTHER}
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")


# By the clock


class Phases:
    """Milliseconds of each part of a step, in the mean of all steps but the first, which loads kernels and
    opens connections, and those that are left out. On a GPU by its own clock, so that nothing waits for it.
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._marks: list[float | torch.cuda.Event] = []
        self._totals = dict.fromkeys(CLOCKED, 0.0)
        self._steps = -1  # the first does not count

    def mark(self) -> None:
        """A step begins, or one of its parts ends, in their order."""
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def count(self, left_out: bool = False) -> dict[str, float]:
        """A step is done, on the device too. Returns the milliseconds of its parts."""
        marks, self._marks = self._marks, []
        found = {
            name: begin.elapsed_time(end) if self._on_gpu else (end - begin) * 1e3
            for name, begin, end in zip(CLOCKED, marks[:-1], marks[1:], strict=True)
        }
        if not left_out:
            self._steps += 1
            for name, milliseconds in found.items() if self._steps else ():
                self._totals[name] += milliseconds
        return found

    def of_step(self) -> dict[str, float]:
        """Empty where no step counts."""
        return {name: total / self._steps for name, total in self._totals.items()} if self._steps > 0 else {}


def described(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a ZeroFP4Optimizer says of itself. Of others bytes_sent is empty and shared_bytes 0."""
    describe = getattr(optimizer, "describe", None)
    return {"bytes_sent": {}, "shared_bytes": 0} if describe is None else describe()


def describe(milliseconds: dict[str, float], sent: dict[str, int]) -> str:
    """sent: bytes by this rank in a step, or read there by others."""
    times = ", ".join(f"{CLOCKED[name]} {value:,.1f} ms" for name, value in milliseconds.items())
    text = f"a step of rank 0: {times or 'there was one only'}"
    if any(sent.values()):
        shares = ", ".join(f"{nbytes:,} bytes of {what}" for what, nbytes in sent.items())
        text += f"; others get from it {shares}"
    return text


# Under a profiler


class StepProfile:
    """Profiles some steps of a run behind its first ones, on every rank, and has nothing to do with others.

    optimizer: any; only a ZeroFP4Optimizer has phases. done: steps of an earlier process. steps: the last
    one. most: how many are profiled, if the run has twice as many behind the warm-up.

    A context manager, whose end is also that of a profile that was begun.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, device: torch.device, done: int, steps: int, most: int
    ):
        self._optimizer, self._on_gpu = optimizer, device.type == "cuda"
        first = done + WARM_UP + 1
        count = max(0, min(most, (steps - first + 1) // 2))
        self._why_none = f"there are fewer than 2 steps behind the first {WARM_UP}"
        if not isinstance(optimizer, ZeroFP4Optimizer):
            count, self._why_none = 0, "they are those of fully_shard, and not told apart"
        elif most == 0:
            self._why_none = "--profile-steps is 0"
        elif count:
            self._why_none = "the run has ended before they were known"
        self._steps = range(first, first + count)
        self._profile: torch.profiler.profile | None = None
        self._seconds = self._optimizer_ms = 0.0
        self._found: dict[str, float] = {}

    def __enter__(self) -> "StepProfile":
        return self

    def __exit__(self, *error: object) -> None:
        if self._profile is not None:
            with contextlib.suppress(RuntimeError):  # the run has ended, by an error of its own
                self._optimizer.check()
            self._profile.stop()
            self._profile = None

    def begin(self, step: int) -> bool:
        """Whether it is one of those."""
        if self._steps and step == self._steps[0]:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._on_gpu:
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._optimizer.check()  # gathers of the step before it are not of this one
            self._profile = torch.profiler.profile(activities=activities, acc_events=True)
            self._profile.start()
        return step in self._steps

    def end(self, step: int, seconds: float, milliseconds: Mapping[str, float]) -> None:
        """Of one of those, once the device is done; milliseconds: of clip_grad_norm_ and step()."""
        self._seconds += seconds
        self._optimizer_ms += milliseconds["clip_grad_norm_"] + milliseconds["step"]
        if step == self._steps[-1]:
            # Gathers that run into the next forward pass, too; and with gloo torch crashes where one begins
            # under a profiler and ends behind it.
            self._optimizer.check()
            if self._on_gpu:
                torch.cuda.synchronize()
            profile, self._profile = self._profile, None
            profile.stop()
            self._found = by_phase(read_trace(profile), self._on_gpu)
            if not self._found:
                self._why_none = "the profiler has seen no work of the GPU"

    def of_step(self) -> dict[str, Any]:
        """why_none: alone, where there are no phases. steps: how many were profiled. busy: "gpu",
        milliseconds that its streams worked for a phase, added up, or "host", those that the host was in it.
        step_milliseconds, optimizer_milliseconds: by the clock, of all of a step, and of clip_grad_norm_ and
        step(). phases: by name, milliseconds, and the bytes that this rank sends as describe() counts them,
        which leaves out votes and norms, a few words each.
        """
        if not self._found:
            return {"why_none": self._why_none}
        count, sent = len(self._steps), self._optimizer.describe()["bytes_sent"]
        return {
            "steps": count,
            "busy": "gpu" if self._on_gpu else "host",
            "step_milliseconds": self._seconds * 1e3 / count,
            "optimizer_milliseconds": self._optimizer_ms / count,
            "phases": {
                phase: {"milliseconds": self._found[phase] / count, "sent_bytes": sent.get(phase, 0)}
                for phase in NAMES
                if phase in self._found
            },
        }


# A trace


class Range(NamedTuple):
    """Of time, in microseconds."""

    begin: float
    end: float
    phase: str


def read_trace(profile: torch.profiler.profile) -> list[dict]:
    """The events of a Chrome trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def by_phase(events: Sequence[dict], on_gpu: bool) -> dict[str, float]:
    """Milliseconds of each phase that there was. On a GPU those of all that was launched in it, on whatever
    stream; else those that the host was in it and in no other within it. Nothing where a GPU was not seen at
    work.
    """
    pieces = host_pieces(events)
    found = dict.fromkeys((phase for phase in NAMES if any(p.phase == phase for p in pieces)), 0.0)
    if on_gpu and not any(event.get("cat") in GPU_WORK for event in events):
        return {}
    for piece in work_of(events) if on_gpu else pieces:
        found[piece.phase] += (piece.end - piece.begin) / 1e3
    return found


def work_of(events: Sequence[dict]) -> Iterator[Range]:
    """What a GPU did, on whatever stream, with the phase in which it was launched, for what was in one."""
    work = defaultdict(list)
    for event in events:
        if event.get("cat") in GPU_WORK:
            work[event["args"].get("correlation")].append((event["ts"], event["ts"] + event.get("dur", 0)))
    launches = [event for event in events if event.get("cat") in LAUNCHES]
    launches = sorted((e["ts"], e["args"].get("correlation")) for e in launches)
    # Threads take turns: a backward pass launches while the thread that began it waits.
    here = iter(host_pieces(events))
    piece = next(here, None)
    for moment, correlation in launches:
        while piece is not None and piece.end <= moment:
            piece = next(here, None)
        if piece is not None and piece.begin <= moment:
            yield from (Range(*times, piece.phase) for times in work.pop(correlation, ()))


def host_pieces(events: Sequence[dict]) -> list[Range]:
    """Where the host was when, of all threads, by the innermost range."""
    threads: dict[Any, list[Range]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"] in RANGES:
            begin = event["ts"]
            threads[event["tid"]].append(Range(begin, begin + event["dur"], RANGES[event["name"]]))
    return sorted(piece for ranges in threads.values() for piece in innermost(ranges))


def innermost(ranges: Sequence[Range]) -> list[Range]:
    """Ranges of one thread, each within another or beside it, cut where another is within them: no two of
    what is left overlap.
    """
    pieces: list[Range] = []
    open_ones: list[Range] = []
    now = 0.0

    def close_until(moment: float) -> None:
        nonlocal now
        while open_ones and open_ones[-1].end <= moment:
            last = open_ones.pop()
            pieces.append(Range(now, last.end, last.phase))
            now = last.end

    for one in sorted(ranges, key=lambda one: (one.begin, -one.end)):
        close_until(one.begin)
        if open_ones:
            pieces.append(Range(now, one.begin, open_ones[-1].phase))
        open_ones.append(one)
        now = one.begin
    close_until(math.inf)
    return [piece for piece in pieces if piece.end > piece.begin]


# What people read

HEADER = "phase", "ms", "bytes sent"
WIDTH_OF_LOGS = 100
BUSY = {
    "gpu": "what the GPU's streams are busy for it, added up (phases overlap)",
    "host": "what the host is in it",
}


def show(found: Mapping[str, Any]) -> None:
    """Print what of_step() says: a table of rich where that is installed, else plain columns."""
    if "why_none" in found:
        print(f"  no phases of a step: {found['why_none']}")
        return
    steps = "1 step" if found["steps"] == 1 else f"{found['steps']} steps"
    own, whole = found["optimizer_milliseconds"], found["step_milliseconds"]
    print(f"  phases of a step of rank 0, in {steps} under a profiler: {BUSY[found['busy']]};")
    print(
        f"  by the clock clip_grad_norm_ and step() took {own:,.1f} ms, and with both passes {whole:,.1f} ms"
    )
    rows = [
        (NAMES[phase], f"{row['milliseconds']:,.3f}", f"{row['sent_bytes']:,}")
        for phase, row in found["phases"].items()
    ]
    try:
        _print_rich(rows)
    except ImportError:
        first, *others = (max(map(len, column)) for column in zip(HEADER, *rows, strict=True))
        for name, *figures in (HEADER, *rows):
            print("  " + "  ".join([name.ljust(first), *map(str.rjust, figures, others)]))


def _print_rich(rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table()
    for name, side in zip(HEADER, ("left", "right", "right"), strict=True):
        shown.add_column(name, justify=side, no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_OF_LOGS).print(shown)
