"""The pictures of docs/ and README.md. They need matplotlib, that of memory transformers, too."""

import json
from pathlib import Path
from typing import Any

from benchmarks import losses, output, pages
from benchmarks.arms import ARMS
from benchmarks.session import RESULTS
from benchmarks.workloads import ROOT

IMAGES = ROOT / "docs" / "images"
MEMORY = IMAGES / "memory.png"
OURS = "#1f5fa8"
INCHES_PER_BAR = 0.26


def new_picture(rows: int, cols: int, figsize: tuple[float, float], **options) -> tuple[Any, Any]:
    """The figure, and its axes [rows, cols]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize, dpi=130, layout="constrained")
    axes = figure.subplots(rows, cols, squeeze=False, **{"sharex": True} | options)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_summary() -> Path:
    """The chart of docs/performance.md: ours over what others take."""
    rows = output.headlines([result for _, result in output.load(RESULTS)])
    figure, axes = new_picture(1, 1, figsize=(8, INCHES_PER_BAR * len(rows) + 1))
    panel = axes[0, 0]
    bars = panel.barh([what for what, *_ in rows], [ratio for *_, ratio in rows], color=OURS)
    panel.bar_label(bars, fmt="%.2f", padding=4, fontsize=8.5)
    panel.axvline(1, color="black", linewidth=0.8, linestyle=":")
    panel.set_xlabel("time or memory, over that of the other way")
    panel.invert_yaxis()
    figure.savefig(output.SUMMARY_CHART)
    return output.SUMMARY_CHART


# Losses

SHOWN_ARMS = ("w16x16", "w1x16-46", "ends-until-90-w1x16-46", "compact", "full")


def draw_losses() -> Path:
    """By preset and number of tokens, how far the losses of arms are above bf16's in a run: means over seeds,
    and bands of their 95% intervals.
    """
    folders = losses.results()
    figure, axes = new_picture(len(folders), 1, figsize=(8, 3.6 * len(folders)), sharex=False)
    for panel, arms in zip(axes.flat, folders.values(), strict=True):
        top = 0.1
        for arm in filter(arms.__contains__, SHOWN_ARMS):
            tokens, means, halves = zip(*losses.gaps_over_tokens(arms, arm), strict=True)
            top = max(top, *means)
            (line,) = panel.plot(tokens, means, label=f"{ARMS[arm].words} ({len(arms[arm])})")
            low, high = ([m + sign * h for m, h in zip(means, halves, strict=True)] for sign in (-1, 1))
            panel.fill_between(tokens, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        panel.axhline(0, color="black", linewidth=0.8, linestyle=":")
        panel.set_title(losses.title(arms), fontsize=9)
        panel.set_ylabel("% above bf16's loss")
        panel.set_ylim(-0.25 * top, 1.25 * top)
        panel.legend(fontsize=7, frameon=False, title="arm (runs)", title_fontsize=7)
    axes[-1, 0].set_xlabel("millions of tokens")
    figure.savefig(losses.PICTURE)
    return losses.PICTURE


# Links

LINES = {"reshard": "4 bits, ours", "reshard_float8": "8 bits, torchao (eager)"}
"""By the case of the benchmark, what its line is called."""


def points_of_links() -> dict[str, list[tuple[float, float]]]:
    """By case GB/s of the link, and tokens a second over those of bf16, in the order of the links."""
    found: dict[str, list[tuple[float, float]]] = {case: [] for case in LINES}
    for path in [*RESULTS.glob("fsdp2_*_ranks_cuda.json"), *(RESULTS / "slow_links").glob("*.json")]:
        rows = {row["name"].rpartition("/")[0]: row for row in json.loads(path.read_text())["rows"]}
        for case, line in found.items():
            pair = [rows.get(f"{name}/tokens") for name in (case, "reshard_bf16")]
            if None not in pair:  # else a run of other cases, or without torchao
                tokens, bf16 = (row["tokens_per_second"] for row in pair)
                line.append((rows["link"]["gigabytes_per_second"], tokens / bf16))
    return {case: sorted(line) for case, line in found.items()}


def draw_links() -> Path:
    """Tokens a second with gathers in 4 and 8 bits over those in bf16, by the link, for docs/fsdp2.md.

    Points are runs of `python -m benchmarks fsdp2` that reshard. Those in benchmarks/results/slow_links were
    made with NCCL's faster ways turned off.
    """
    figure, axes = new_picture(1, 1, figsize=(7, 3.2))
    panel = axes[0, 0]
    points = points_of_links()
    for (case, line), color in zip(points.items(), (OURS, "#b9bec6"), strict=True):
        panel.plot(*zip(*line, strict=True), marker="o", color=color, label=LINES[case])
        where = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "fontsize": 9}
        for place in line:
            panel.annotate(f"{place[1]:.2f}", place, **where)
    panel.axhline(1, color="black", linewidth=0.8, linestyle=":")
    panel.set_xscale("log")
    panel.minorticks_off()
    links = [gbps for gbps, _ in points["reshard"]]
    panel.set_xticks(links, [f"{gbps:.0f}" for gbps in links])
    panel.set_xlabel("GB/s that a GPU receives in an all-gather")
    panel.set_ylabel("tokens a second, over bf16")
    panel.margins(y=0.2)
    panel.legend(frameon=False, fontsize=9)
    figure.savefig(IMAGES / "links.png")
    return IMAGES / "links.png"


# Memory

RANKS = (1, 8)
COLORS = {
    "weights": "#1f5fa8",
    "gradients": "#b9bec6",
    "masters": "#8db8e2",
    "moments": "#d7e6f5",
    "activations, buffers": "#f0d9a8",
}
NAMES = {
    "bf16 weights": "bf16, FP32 state",
    "NVFP4": "NVFP4, FP32 state",
    'NVFP4, state="compact"': "NVFP4, compact state",
    pages.EARLY: "the same, updates in the backward pass",
    pages.OFFLOADED: "NVFP4, the rest in host memory",
}
"""By way of zerofp4.inspect.memory, what its bar is called."""


def kept(way: str, ranks: int = 1) -> dict[str, float]:
    """Bytes per parameter, by use, on a GPU: masters and moments are sharded over the ranks."""
    run = pages.runs()[0]
    parts = pages.kept(run, way)
    return {part: size / ranks if part in ("masters", "moments") else size for part, size in parts.items()}


def flash(gradients: float) -> dict[str, float]:
    """Of FlashAdamW: the weights are 16 of the masters' 24 bits."""
    return {"weights": 2.0, "gradients": gradients, "masters": 1.0, "moments": 2.0}


def bars(ranks: int) -> dict[str, dict[str, float]]:
    """With several ranks those ways alone whose gradients are whole."""
    if ranks > 1:
        alone = (pages.EARLY, pages.OFFLOADED)
        return {name: kept(way, ranks) for way, name in NAMES.items() if way not in alone}
    (plain, *ours), (whole, released) = NAMES.items(), pages.FLASH
    found = {plain[1]: kept(plain[0])}
    found |= {f"{whole} (its paper)": flash(2.0), f"{released} (its paper)": flash(0.0)}
    found |= {name: kept(way) for way, name in ours}
    more = {"activations, buffers": pages.beyond(pages.runs()[0])}
    return {name: parts | more for name, parts in found.items()}


def draw_memory() -> Path:
    """The bytes per parameter that a GPU keeps to train Llama-3-8B, by what they are, for README.md.

    Ours are predicted from shapes (zerofp4/inspect/memory.py), FlashAdamW's are those of its paper, and
    activations are what the peak of a run has above what is kept: that run's, in every bar of one GPU.
    """
    panels = {ranks: bars(ranks) for ranks in RANKS}
    heights = {"height_ratios": [len(each) for each in panels.values()]}
    figure, axes = new_picture(len(RANKS), 1, figsize=(9, 4.7), gridspec_kw=heights)
    for panel, (ranks, found) in zip(axes.flat, panels.items(), strict=True):
        for name, parts in found.items():
            left = 0.0
            for part, size in parts.items():
                panel.barh(name, size, left=left, color=COLORS[part], label=part)
                left += size
            panel.annotate(f"{left:.1f}", (left, name), (4, -3), textcoords="offset points", fontsize=9)
        title = "one GPU" if ranks == 1 else f"each of {ranks} GPUs, without activations"
        panel.set_title(f"Llama-3-8B, {title}", loc="left", fontsize=10)
        panel.set_xlim(0, 19)
        panel.invert_yaxis()
    axes[-1, 0].set_xlabel("bytes per parameter")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    options = {"loc": "outside lower center", "frameon": False, "fontsize": 9, "ncols": len(COLORS)}
    figure.legend(handles[: len(COLORS)], labels[: len(COLORS)], **options)
    figure.savefig(MEMORY)
    return MEMORY
