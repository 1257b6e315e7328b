"""What a run shows and leaves behind: progress, metrics as JSON lines, a picture of the losses, a summary."""

import importlib.util
import json
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import profile, schedule

from zerofp4.distributed import PHASES, PREFIX
from zerofp4.inspect.table import print_table
from zerofp4.launch import World

KINDS = {"nvfp4": "NVFP4 weights", "bf16": "BF16 weights", "fp32": "FP32 weights"}
WARM_UP = 3
"""Steps of a process that load kernels, open connections and let memory grow."""


# While it runs


class Recorder:
    """Writes <out>/metrics-<kind>.jsonl, one line per step, and shows how far the run is.

    On other ranks than 0 (`active` False) it only keeps the last rows. done: steps of an earlier process,
    whose rows stay.
    """

    def __init__(self, out: Path, kind: str, steps: int, active: bool, done: int = 0):
        self.kind, self.steps, self.done, self.active = kind, steps, done, active
        self.path, self.validation = metrics_file(out, kind), ""
        earlier = [row for row in read_metrics(self.path) if row["step"] <= done] if active else []
        self.rows = deque(earlier, max(1, steps // 20))
        if active:
            self.path.write_text("".join(json.dumps(row) + "\n" for row in earlier))

    def remaining(self) -> Iterable[int]:
        """The numbers of the steps; on a terminal, where rich is installed, with its progress bar."""
        numbers = range(self.done + 1, self.steps + 1)
        if not self.active or not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
            return numbers
        from rich.progress import track

        return track(numbers, KINDS[self.kind])

    def record(self, row: dict) -> None:
        self.rows.append(row)
        if not self.active:
            return
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if "validation_loss" in row:
            self.validation = f"  validation {row['validation_loss']:.3f}"
        if row["step"] % max(1, self.steps // 10) == 0 or row["step"] in (1, self.steps):
            status = f"loss {row['loss']:.3f}{self.validation}  {row['tokens_per_second']:,.0f} bytes/s"
            print(f"{self.kind:>5}  step {row['step']:>5}/{self.steps}  {status}", flush=True)


def metrics_file(out: Path, kind: str) -> Path:
    return out / f"metrics-{kind}.jsonl"


def read_metrics(path: Path) -> list[dict]:
    """The rows of a metrics file, without a last line that a killed run left incomplete."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def profile_steps(count: int) -> profile:
    """A profiler of `count` steps after the first ones; its step() is called after each step."""
    return profile(schedule=schedule(wait=WARM_UP - 1, warmup=1, active=count, repeat=1), acc_events=True)


def phases_of(profiler: profile, count: int, sent: dict[str, int], device: torch.device) -> dict[str, dict]:
    """By phase the milliseconds of a step, on a GPU of what was launched in the phase and else of the host,
    and the bytes that this rank sends, of which `sent` is describe()'s account.
    """
    busy, on_gpu = {}, device.type == "cuda"
    for row in profiler.key_averages():
        if row.key.startswith(PREFIX) and (row.device_type == DeviceType.CUDA) == on_gpu:
            microseconds = row.device_time_total if on_gpu else row.cpu_time_total
            busy[row.key.removeprefix(PREFIX)] = microseconds / 1e3 / count
    return {p: {"milliseconds": busy[p], "sent_bytes": sent.get(p, 0)} for p in PHASES if p in busy}


def show_phases(phases: dict[str, dict]) -> None:
    print("  phases of a step of rank 0, under a profiler:")
    rows = [("phase", "ms", "bytes sent")]
    for phase, row in phases.items():
        rows.append((phase, f"{row['milliseconds']:,.3f}", f"{row['sent_bytes']:,}"))
    print_table(rows, "<>>")


# Afterwards


def draw(out: Path, title: str) -> Path | None:
    """Draw <out>/loss.png from every metrics file in `out`; None if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")
    panel = figure.subplots()
    for kind in reversed(KINDS):  # NVFP4 last: its thin line is on top
        if rows := read_metrics(metrics_file(out, kind)):
            draw_losses(panel, kind, rows)
    panel.set(title=title, xlabel="step", ylabel="loss (nats per byte)")
    panel.grid(alpha=0.3)
    panel.legend()
    figure.savefig(out / "loss.png")
    return out / "loss.png"


def draw_losses(panel, kind: str, rows: list[dict]) -> None:
    """The losses of a run, their running mean, and those that validate."""
    color, width = ("tab:blue", 1.5) if kind == "nvfp4" else ("tab:orange", 3.5)
    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    panel.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
    half = len(rows) // 50
    window = 2 * half + 1
    means = np.convolve(losses, np.full(window, 1 / window), "valid")
    middle, label = steps[half : len(rows) - half], f"{KINDS[kind]}, mean of {window} steps"
    panel.plot(middle, means, color=color, linewidth=width, label=label)
    held_out = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    if held_out:
        style = {"marker": "o", "markersize": 2 + 2 * width, "linestyle": "", "markeredgecolor": "black"}
        label = f"{KINDS[kind]}, validation ({held_out[-1][1]:.3f} at the end)"
        panel.plot(*zip(*held_out, strict=True), color=color, label=label, **style)


def ranks(world: World) -> str:
    return "1 rank" if world.world_size == 1 else f"{world.world_size} ranks"


def describe(kind: str, result: dict, world: World) -> str:
    """What the summary says about one kind of weights, for people."""
    weights, gathered = result["verified"], result["gathered_bytes_per_step"]
    total, plain, name = gathered["nvfp4"] + gathered["high_precision"], gathered["bf16_equivalent"], "bf16"
    if result["dtype"] == "float32":
        plain, name = 2 * plain, "fp32"
    traffic = f"{total:,} bytes" if total else "nothing, there is one rank"
    if total and gathered["nvfp4"]:
        traffic += f", {gathered['nvfp4']:,} of them NVFP4 codes; with {name} weights {plain:,}"
        traffic += f", {plain / total:.2f} times as many"
    return (
        f"{KINDS[kind]}: loss {result['loss']:.4f}, validation {result['validation_loss']:.4f} after "
        f"{result['steps']} steps in {result['seconds']:.1f} s, {result['tokens_per_second']:,.0f} bytes/s\n"
        f"  verified: the same bytes on {ranks(world)}; {weights['nvfp4_weights']} NVFP4 weights equal the "
        f"quantized and {weights['other_weights']} others the rounded FP32 masters\n"
        f"  all-gathered per step: {traffic}"
    )
