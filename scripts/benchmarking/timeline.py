"""A picture of what a GPU does when in a step: a lane for each of its streams, a color for each phase."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

PHASES = {
    "gradients travel": ("SendRecv", "#d98c3f"),
    "votes and amaxes travel": ("AllReduce", "#c8352b"),
    "codes travel": ("AllGather", "#7b4fa3"),
    "copies to peers and within": ("Memcpy", "#a98bc9"),
    "barriers": ("barrier_kernel", "#444444"),
    "NaN scan": ("nonfinite", "#b9bec6"),
    "mean": ("average", "#3f9d8f"),
    "update": ("adamw", "#1f5fa8"),
    "amax": ("amax", "#8db8e2"),
    "scale": ("fused_scale", "#c9b037"),
    "cast": ("partial_cast", "#4f9d4f"),
    "transpose": ("transpose", "#94c794"),
}
"""By phase, a word in the names of its kernels, of which the first that fits counts, and a color."""
OTHER = "other", "#e3e3e3"
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


class Span(NamedTuple):
    """Something that a GPU did: begin and ms in milliseconds from the first one on."""

    name: str
    stream: int
    begin: float
    ms: float

    @property
    def phase(self) -> str:
        return next((phase for phase, (word, _) in PHASES.items() if word in self.name), OTHER[0])


def record(run: Callable[[], object]) -> list[Span]:
    """What the GPU did for one call of run(), which has been called before. What the host does is not
    recorded: that would take it as long again, and the GPU would be seen to wait for it. For the same reason
    the profiler begins in a call before that one, in which it slows the host.
    """
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, schedule=schedule) as profile:
        for _ in range(2):
            run()
            torch.cuda.synchronize()
            profile.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return spans(json.loads(path.read_text())["traceEvents"])


def spans(events: Sequence[dict]) -> list[Span]:
    """Of the events of a Chrome trace, in microseconds, those of the GPU, by the time they began."""
    work = sorted((e for e in events if e.get("cat") in GPU_WORK), key=lambda e: e["ts"])
    first = work[0]["ts"] if work else 0
    return [
        Span(e["name"], e["args"]["stream"], (e["ts"] - first) / 1e3, e.get("dur", 0) / 1e3) for e in work
    ]


def draw(found: Sequence[Span], path: Path, title: str) -> Path | None:
    """None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    streams = list(dict.fromkeys(span.stream for span in found))
    figure, axes = pyplot.subplots(figsize=(14, 0.9 * len(streams) + 1.8), dpi=130, layout="constrained")
    for phase, color in [*((phase, color) for phase, (_, color) in PHASES.items()), OTHER]:
        own = [span for span in found if span.phase == phase]
        if not own:
            continue
        for lane, stream in enumerate(streams):
            bars = [(span.begin, span.ms) for span in own if span.stream == stream]
            axes.broken_barh(bars, (lane - 0.38, 0.76), facecolors=color)
        total = sum(span.ms for span in own)
        axes.broken_barh([], (0, 0), facecolors=color, label=f"{phase}, {total:.1f} ms in {len(own)}")
    axes.set_yticks(range(len(streams)), [f"stream {stream}" for stream in streams])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_xlim(0, max((span.begin + span.ms for span in found), default=1))
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)
    pyplot.close(figure)
    return path
