"""What scripts/train.py shows and leaves behind: progress, metrics as JSON lines, a picture of the losses."""

import collections
import contextlib
import json
import os
import sys
from pathlib import Path

from memory import describe as describe_memory
from phases import describe as describe_phases
from text import Text

from zerofp4.launch.process_group import World

KINDS = {"nvfp4": "NVFP4 weights", "bf16": "BF16 weights", "fp32": "FP32 weights"}


def progress_display():
    """A rich progress bar when standard output is a terminal and rich is installed, else None."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
    except ImportError:
        return None
    status = "{task.fields[status]}"
    return Progress("{task.description}", BarColumn(), MofNCompleteColumn(), status, TimeRemainingColumn())


class Recorder:
    """Writes <out>/metrics-<kind>.jsonl, a line per step as it happens, and shows how far the run is.

    A context manager. On other ranks than 0 (`active` False) it does nothing.
    """

    def __init__(self, out: Path, kind: str, steps: int, active: bool, done: int = 0):
        """done: steps of an earlier run that this one goes on with, whose rows stay."""
        self.kind = kind
        self.steps = steps
        earlier = keep_rows(metrics_file(out, kind), done) if active and done else []
        self.rows = collections.deque(earlier, max(1, steps // 20))  # the last ones: no run grows by its rows
        self.active = active
        self.print_every = max(1, steps // 10)
        self.validation = ""
        self.display = progress_display() if active else None
        self.file = metrics_file(out, kind).open("a" if done else "w") if active else None

    def __enter__(self) -> "Recorder":
        self.exit_stack = contextlib.ExitStack()
        if self.file is not None:
            self.exit_stack.enter_context(self.file)
        if self.display is not None:
            self.exit_stack.enter_context(self.display)
            self.task = self.display.add_task(KINDS[self.kind], total=self.steps, status="")
        return self

    def __exit__(self, *error) -> None:
        self.exit_stack.close()

    def record(self, row: dict) -> None:
        self.rows.append(row)
        if not self.active:
            return
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        if "validation_loss" in row:
            self.validation = f"  validation {row['validation_loss']:.3f}"
        status = f"loss {row['loss']:.3f}{self.validation}  {row['tokens_per_second']:,.0f} bytes/s"
        if self.display is not None:
            self.display.update(self.task, completed=row["step"], status=status)
        elif row["step"] % self.print_every == 0 or row["step"] in (1, self.steps):
            print(f"{self.kind:>5}  step {row['step']:>5}/{self.steps}  {status}", flush=True)


def metrics_file(out: Path, kind: str) -> Path:
    return out / f"metrics-{kind}.jsonl"


def read_metrics(path: Path) -> list[dict]:
    """The rows of a metrics file, without a last line that a killed run left incomplete."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def keep_rows(path: Path, steps: int) -> list[dict]:
    """The rows of the first steps, from which all later ones are taken away, at once."""
    rows = [row for row in read_metrics(path) if row["step"] <= steps] if path.exists() else []
    scratch = path.with_suffix(".tmp")
    scratch.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(scratch, path)
    return rows


def smoothing_window(steps: int) -> int:
    """How many steps a running mean takes in: about a twenty-fifth of the run, odd."""
    return 2 * (steps // 50) + 1


def smoothed(values: list[float]) -> list[float]:
    """The running mean around each place, over fewer values near the ends, where it would be one-sided."""
    half = smoothing_window(len(values)) // 2
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    means = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        means.append((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1))
    return means


def draw_losses(axes, kind: str, rows: list[dict], color: str, width: float) -> None:
    """Every step's loss, faint; its running mean; what was measured on held-out text."""
    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    window = smoothing_window(len(rows))
    axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
    label = f"{KINDS[kind]}, training" + (f" (mean of {window} steps)" if window > 1 else "")
    axes.plot(steps, smoothed(losses), color=color, linewidth=width, label=label)
    held_out = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    if held_out:
        label = f"{KINDS[kind]}, validation ({held_out[-1][1]:.3f} at the end)"
        style = {"marker": "o", "markersize": 2 + 2 * width, "linestyle": "", "markeredgecolor": "black"}
        axes.plot(*zip(*held_out, strict=True), color=color, label=label, **style)


def draw(out: Path, title: str) -> Path | None:
    """Draw <out>/loss.png from every metrics file in `out`; None where matplotlib is not installed.

    With both kinds of weights, whose curves nearly coincide, a second panel shows the difference.
    """
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = {kind: metrics_file(out, kind) for kind in KINDS}
    rows = {kind: read_metrics(path) for kind, path in paths.items() if path.exists()}
    both = len(rows) == 2 and "nvfp4" in rows and all(rows.values())
    figure, axes = pyplot.subplots(
        2 if both else 1,
        sharex=True,
        squeeze=False,
        figsize=(9, 7 if both else 5.5),
        dpi=120,
        height_ratios=[3, 1][: 1 + both],
    )
    losses = axes[0, 0]
    for kind in reversed(KINDS):  # the thin line of NVFP4 over the other one
        if rows.get(kind):
            color, width = ("tab:blue", 1.5) if kind == "nvfp4" else ("tab:orange", 3.5)
            draw_losses(losses, kind, rows[kind], color, width)
    losses.set(title=title, ylabel="loss (nats per byte)")
    losses.legend()
    if both:
        (other,) = rows.keys() - {"nvfp4"}
        pairs = list(zip(rows["nvfp4"], rows[other], strict=False))
        gap = smoothed([nvfp4["loss"] - plain["loss"] for nvfp4, plain in pairs])
        axes[1, 0].axhline(0, color="black", linewidth=0.8)
        axes[1, 0].plot([nvfp4["step"] for nvfp4, _ in pairs], gap, color="tab:blue", linewidth=1.5)
        axes[1, 0].set(ylabel=f"NVFP4 - {other.upper()},\ntraining (mean)")
    for panel in axes.flat:
        panel.grid(alpha=0.3)
    axes[-1, 0].set(xlabel="step")
    figure.tight_layout()
    path = out / "loss.png"
    figure.savefig(path)
    pyplot.close(figure)
    return path


def write_summary(out: Path, summary: dict) -> Path:
    """Write <out>/summary.json, whole or not at all."""
    path = out / "summary.json"
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(summary, indent=2) + "\n")
    os.replace(scratch, path)
    return path


def ranks(world: World) -> str:
    return "1 rank" if world.world_size == 1 else f"{world.world_size} ranks"


def describe(kind: str, result: dict, text: Text, world: World) -> str:
    weights, gathered = result["verified"], result["gathered_bytes_per_step"]
    total, plain, name = gathered["nvfp4"] + gathered["high_precision"], gathered["bf16_equivalent"], "bf16"
    if result["dtype"] == "float32":
        plain, name = 2 * plain, "fp32"
    traffic = f"{total:,} bytes" if total else "nothing, there is one rank"
    if total and gathered["nvfp4"]:
        traffic += f", {gathered['nvfp4']:,} of them NVFP4 codes; with {name} weights {plain:,}"
        traffic += f", {plain / total:.2f} times as many"
    nvfp4, others = weights["nvfp4_weights"], weights["other_weights"]
    unit = "bytes" if text.vocabulary == Text.vocabulary else "tokens"
    rate = f"{result['tokens_per_second']:,.0f} {unit}/s"
    return (
        f"{KINDS[kind]}: loss {result['loss']:.4f}, validation {result['validation_loss']:.4f} after "
        f"{result['steps']} steps in {result['seconds']:.1f} s, the first in "
        f"{result['first_step_seconds']:.1f} s and the others at {rate}\n"
        f"  verified: the same bytes on {ranks(world)}; {nvfp4} NVFP4 weights equal the quantized and "
        f"{others} others the rounded FP32 masters\n"
        f"  all-gathered per step: {traffic}\n"
        f"  {describe_phases(result['milliseconds_per_step'], result['sent_bytes_per_step'])}\n"
        f"  {describe_memory(result['peak_memory_mb'])}"
    )
