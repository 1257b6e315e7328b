"""Pictures of result files as horizontal bars with targets: percent of the copy ceiling, and comparisons."""

from pathlib import Path

from benchmarking.selection import selected

OURS, STAGE, PEER, TARGET = "#1f5fa8", "#8db8e2", "#b9bec6", "#c8352b"
STAGES = ("begin", "amax", "scale", "cast")
INCHES_PER_BAR = 0.26
GAP, MARGIN = 0.6, 0.6  # between workloads, and from a panel's ends to its outermost bars' middles; in bars


def chart_path(folder: Path, result: dict) -> Path:
    return folder / f"percent_of_copy_{device_type(result)}.png"


def comparison_path(folder: Path, result: dict) -> Path:
    return folder / f"{result['benchmark']}_{device_type(result)}.png"


def device_type(result: dict) -> str:
    return "cuda" if result["threads"] is None else "cpu"


def color(row: dict) -> str:
    if "times_ours" in row:
        return PEER
    return STAGE if row["name"].split("/")[0] in STAGES else OURS


def places(rows: list[dict]) -> list[float]:
    """Where the bars go: one below the other, with a gap between workloads that have several."""
    workloads = [row["name"].partition("/")[2] for row in rows]
    if len(set(workloads)) == len(workloads):
        return list(range(len(rows)))
    found, place = [], 0.0
    for i, workload in enumerate(workloads):
        place += GAP * (i > 0 and workload != workloads[i - 1])
        found.append(place)
        place += 1
    return found


def draw(folder: Path, results: list[dict]) -> list[Path] | None:
    """Draw <folder>/percent_of_copy_<device>.png for each kind of device; None without matplotlib.

    A bar per timed row that `selected` chooses, in one panel per result file.
    """
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    charts: dict[Path, list[dict]] = {}
    for result in results:
        if any("ms" in row for row in result["rows"]):
            charts.setdefault(chart_path(folder, result), []).append(result)
    for path, panels in charts.items():
        draw_device(path, panels)
    return list(charts)


def draw_device(path: Path, results: list[dict]) -> None:
    from matplotlib import pyplot

    timed = [selected([row for row in result["rows"] if "ms" in row]) for result in results]
    heights = [places(rows)[-1] + 2 * MARGIN for rows in timed]
    figure, axes = pyplot.subplots(
        len(results),
        sharex=True,
        squeeze=False,
        figsize=(10, INCHES_PER_BAR * sum(heights) + 0.4 * len(results) + 1),
        height_ratios=heights,
        dpi=130,
        layout="constrained",
    )
    for panel, rows, result in zip(axes.flat, timed, results, strict=True):
        draw_panel(panel, rows)
        ceiling = f"copy {result['copy_gbps']:,.0f} GB/s"
        panel.set_title(f"{result['benchmark']}  ({ceiling})", loc="left", fontsize=10)
    every = [row for rows in timed for row in rows]
    widest = max(row["percent_of_copy"] for row in every)
    axes[0, 0].set_xlim(0, max(100, widest) * 1.36)  # room for what stands right of the bars
    axes[-1, 0].set_xlabel("percent of a device-to-device copy (bytes read and written over time)")
    figure.suptitle(results[0]["device"], fontsize=12)
    figure.legend(handles=legend(every), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path)
    pyplot.close(figure)


def draw_panel(panel, rows: list[dict]) -> None:
    values = [row["percent_of_copy"] for row in rows]
    panel.axvline(100, color="black", linewidth=0.8, linestyle=":", zorder=0)
    panel.barh(places(rows), values, height=0.74, color=[color(row) for row in rows])
    for place, row, value in zip(places(rows), rows, values, strict=True):
        if has_mark(row):
            panel.vlines(row["target"], place - 0.48, place + 0.48, color=TARGET, linewidth=2)
        end = max(value, row["target"]) if has_mark(row) else value
        panel.annotate(
            label(row),
            (end, place),
            (5, 0),
            textcoords="offset points",
            verticalalignment="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    panel.set_yticks(places(rows), [row["name"] for row in rows], fontsize=8.5)
    panel.set_ylim(places(rows)[-1] + MARGIN, -MARGIN)
    panel.tick_params(axis="y", length=0)
    panel.tick_params(axis="x", labelsize=8.5)
    panel.spines[["top", "right", "left"]].set_visible(False)


def has_mark(row: dict) -> bool:
    return row["target"] is not None and row["kind"] == "percent_of_copy"


def label(row: dict) -> str:
    text = f"{row['percent_of_copy']:.0f}%   {duration(row['ms'])}"
    if "times_ours" in row:
        text += f"   {row['times_ours']:.2f} times ours"
    if row["target"] is not None and row["kind"] == "speedup" and "speedup" in row:
        text += f"   {row['speedup']:.2f} times as fast (target {row['target']:g})"
    return text


def duration(ms: float) -> str:
    if ms >= 1000:
        return f"{ms:,.0f} ms"
    return f"{ms:.3g} ms" if ms >= 0.1 else f"{1e3 * ms:.3g} us"


def legend(rows: list[dict]) -> list:
    """What the colors in these rows mean."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    used = {color(row) for row in rows}
    names = {OURS: "ours", STAGE: "a stage of local_step", PEER: "peers"}
    handles = [Patch(color=key, label=name) for key, name in names.items() if key in used]
    if any(map(has_mark, rows)):
        handles.append(Line2D([], [], color=TARGET, linewidth=2, label="target"))
    return handles


def draw_comparison(folder: Path, result: dict) -> Path | None:
    """Of steps of fully_shard, the figures of ours over those of bf16; None of others, and without
    matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        return None
    if not result["benchmark"].startswith("fsdp2_"):
        return None
    rows = [row for row in result["rows"] if "_over_bf16/" in row["name"]]
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(rows) + 1.4), dpi=130, layout="constrained")
    names = [row["name"].rpartition("/")[0].replace("_over_bf16", "").replace("/", ", ") for row in rows]
    bars = axes.barh(names, [row[row["kind"]] for row in rows], color=OURS, height=0.6)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    for place, row in enumerate(rows):
        if row["target"] is not None:
            axes.vlines(row["target"], place - 0.4, place + 0.4, color=TARGET, linewidth=2)
    axes.axvline(1.0, color=PEER, zorder=0)
    axes.invert_yaxis()
    axes.set_xlabel(f"over the same with bf16 weights (a target: red), {result['device']}")
    axes.spines[["top", "right"]].set_visible(False)
    path = comparison_path(folder, result)
    figure.savefig(path)
    pyplot.close(figure)
    return path
