"""Result files as tables and charts: on the terminal, in docs/performance.md and beside the files."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zerofp4_bench.operations import SHOWN
from zerofp4_bench.rules import KINDS
from zerofp4_bench.session import RESULTS, ROOT, device_type
from zerofp4_bench.traffic import (
    HOST_GBPS,
    HOST_GPUS,
    HOST_TARGETS,
    HOST_WAYS,
    OF_HOST,
    PARTS,
    TARGET_GPUS,
    WAYS,
    Cell,
    Growth,
    growth_of,
)
from zerofp4_bench.weights import STAGES

BEGIN, END = "<!-- benchmarks: begin -->\n", "\n<!-- benchmarks: end -->"
MOST_ROWS = 16


def load(folder: Path) -> list[tuple[Path, dict]]:
    """The result files of a folder: a GPU's before a CPU's, in the order in which `all` makes them."""
    results = [(path, json.loads(path.read_text())) for path in folder.glob("*.json")]

    def order(item: tuple[Path, dict]):
        path, result = item
        name = result["benchmark"]
        place = SHOWN.index(name) if name in SHOWN else len(SHOWN)
        return result["threads"] is not None, place, path.name

    return sorted(results, key=order)


def selected(rows: list[dict]) -> list[dict]:
    """What the page and the charts show: rows with a target, peers, ratios, and of the others the first until
    there are MOST_ROWS; in their order.
    """

    def is_first(row: dict) -> bool:
        return row["target"] is not None or bool({"times_ours", "ratio", "speedup"} & row.keys())

    others = [row for row in rows if not is_first(row)]
    left_out = {row["name"] for row in others[max(0, MOST_ROWS - (len(rows) - len(others))) :]}
    return [row for row in rows if row["name"] not in left_out]


def device_name(result: dict) -> str:
    threads = result["threads"]
    return result["device"] + (f", {threads} thread{'s' * (threads > 1)}" if threads else "")


# Tables


class Table(NamedTuple):
    """Cells by row. The last column says how the figures came about, which a terminal has seen before."""

    header: tuple[str, ...]
    alignment: str  # "l" or "r" for each column
    rows: list[tuple[str, ...]]

    def without_rule(self) -> "Table":
        return Table(self.header[:-1], self.alignment[:-1], [row[:-1] for row in self.rows])


def split(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """Those with times, and the others."""
    return [row for row in rows if "ms" in row], [row for row in rows if "ms" not in row]


def tables(rows: list[dict]) -> list[Table]:
    """Of rows of a result file, those tables that are not empty."""
    timed, counted = split(rows)
    times = [
        (
            row["name"],
            f"{row['ms']:.3f}",
            f"{row['gbps']:,.0f}" if row["gbps"] >= 100 else f"{row['gbps']:.1f}",
            f"{row['percent_of_copy']:.1f}",
            note(row),
            row["rule"],
        )
        for row in timed
    ]
    counts = [
        (row["name"], KINDS[row["kind"]].show(row[row["kind"]]), note(row), row["rule"]) for row in counted
    ]
    found = (
        Table(("operation", "ms", "GB/s", "% of copy", "note", "bytes counted"), "lrrrll", times),
        Table(("figure", "value", "note", "what it is"), "lrll", counts),
    )
    return [table for table in found if table.rows]


def note(row: dict) -> str:
    """The target and whether it is met, with the figure where that has no column; a peer's time in ours."""
    if row["target"] is None:
        return f"{row['times_ours']:.2f} times ours" if "times_ours" in row else ""
    kind = KINDS[row["kind"]]
    value = row.get(row["kind"])
    if value is None:
        return f"{kind.bound(row['target'])}: not compared"
    own = f"{kind.show(value)}, " if row["kind"] == "speedup" else ""
    return f"{kind.bound(row['target'])}: {own}{'met' if kind.is_met(value, row['target']) else 'missed'}"


def print_tables(result: dict) -> None:
    ceilings = f"{result['copy_gbps_before']:,.1f} GB/s before, {result['copy_gbps_after']:,.1f} after"
    print(f"\n{result['benchmark']} on {device_name(result)}; copy ceiling {ceilings}")
    for table in tables(result["rows"]):
        print("\n".join(plain_lines(table.without_rule())))


def plain_lines(table: Table) -> list[str]:
    rows = (table.header, *table.rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.rjust if side == "r" else str.ljust for side in table.alignment]
    return [
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)).rstrip()
        for row in rows
    ]


# The page


def markdown(path: Path, result: dict) -> str:
    """The tables of one result file under a line that names it, with the rows that `selected` chooses."""
    shown = [row for rows in split(result["rows"]) for row in selected(rows)]
    left_out = len(result["rows"]) - len(shown)
    head = f"{device_name(result)}, `{path.relative_to(ROOT)}`: copy ceiling {result['copy_gbps']:,.0f} GB/s"
    head += f"; {left_out} more rows are in the file." if left_out else "."
    return "\n\n".join([head, *map(markdown_table, tables(shown))])


def markdown_table(table: Table) -> str:
    rule = "".join("---:|" if alignment == "r" else "---|" for alignment in table.alignment)
    lines = ["| " + " | ".join(row) + " |" for row in (table.header, *table.rows)]
    return "\n".join([lines[0], "|" + rule, *lines[1:]])


def docs_section() -> str:
    """What stands between the benchmark markers: per device its chart, if there is one, then its tables;
    at the end, how steps of several GPUs grow.
    """
    parts, results = [], load(RESULTS)
    grown = growth_of([result for _, result in results])

    def show(words: str, picture: Path) -> None:
        text = f"![{words}]({Path('..', picture.relative_to(ROOT))})"
        if picture.exists() and text not in parts:
            parts.append(text)

    for path, result in results:
        show(f"Percent of the copy ceiling on {result['device']}", chart_path(RESULTS, result))
        parts.append(markdown(path, result))
    if grown is not None:
        show("A step of several GPUs, measured and predicted", RESULTS / GROWTH_CHART)
        parts += [growth_words(grown), markdown_table(growth_table(grown))]
        show("A step of several hosts, predicted", RESULTS / HOSTS_CHART)
        parts += [hosts_words(grown), markdown_table(hosts_table(grown))]
    return "\n\n".join(parts)


def write_docs() -> Path:
    """Put the section between the markers of the page that shows it."""
    path = ROOT / "docs" / "performance.md"
    head, rest = path.read_text().split(BEGIN)
    path.write_text(head + BEGIN + docs_section() + END + rest.split(END)[1])
    return path


def growth_words(growth: Growth) -> str:
    """What the model is, for the page."""
    base = growth.base.ranks
    memory, link = (speed / 1e9 for speed in growth.speeds[:2])
    others = "; ".join(f"{result['benchmark']} on {result['device']}" for result in growth.left_out)
    return (
        "How a step grows with the number of GPUs: milliseconds measured / predicted, and their ratio. The "
        f"model has the bytes of each phase move at {memory:,.0f} GB/s in a GPU's memory (the copy) and at "
        f"{link:,.0f} GB/s to other GPUs of the host (measured), and takes the slower of both; a part takes "
        f"as much longer than the sum of its phases as with {base} GPUs, where the ratio is 1 for that. "
        "The last rows have the longest phase of each step, and what it waits for by the model."
        + (f" Not compared, being of another device or scale: {others}." if others else "")
    )


def growth_table(growth: Growth) -> Table:
    header = ("", *(f"{ranks} GPU{'s' * (ranks > 1)}" for ranks in growth.ranks))
    rows = [
        (f"{way}: {part}", *(shown(growth.cell(way, part, ranks)) for ranks in growth.ranks))
        for part in PARTS
        for way in WAYS
    ]
    rows += [(f"{way}: longest", *(growth.limit(way, ranks) for ranks in growth.ranks)) for way in WAYS]
    return Table(header, "l" * len(header), rows)


def shown(cell: Cell) -> str:
    measured, predicted = ("-" if ms is None else f"{ms:.1f}" for ms in cell)
    return f"{measured} / {predicted}" + ("" if cell.ratio is None else f" = {cell.ratio:.2f}")


def hosts_words(growth: Growth) -> str:
    """What the model is for several hosts, for the page."""
    *others, last = HOST_GBPS
    factors = {way: factor for way in WAYS if (factor := growth.longer(way, "step"))}
    measured = ", ".join(f"{way} {factor:.2f}" for way, factor in factors.items())
    bounds = " and ".join(f"`{way}` {KINDS['ratio'].bound(target)}" for way, target in HOST_TARGETS.items())
    text = (
        "How a step grows with the number of hosts. **All of it is predicted: no step of several hosts was "
        f"measured.** A host has {OF_HOST} GPUs, and each of them can send {', '.join(map(str, others))} or "
        f"{last} GB/s to other hosts. Inside a host bytes move at the speeds above, and a phase takes the "
        "slowest of memory, link and network. A step takes longer than the sum of its phases by the factor "
        f"that was measured on one host: {measured}. `default` of one host has the factor of `peer`; "
        "`reduce_scatter` and `default` of several hosts have that of `collective`. Cells are milliseconds, "
        f"and the ratio to those of `bf16`. Targets at {TARGET_GPUS} GPUs: {bounds}."
    )
    if "peer" in factors:
        scale = factors["peer"] / factors["collective"]
        ratios = {gbps: scale * over_bf16(growth, "default", TARGET_GPUS, gbps)[1] for gbps in HOST_GBPS}
        found = ", ".join(f"{ratio:.2f}x at {gbps} GB/s" for gbps, ratio in ratios.items())
        text += f" With the factor of `peer` the `default` would be at {found} there."
    return text


def over_bf16(growth: Growth, way: str, gpus: int, gbps: float) -> tuple[float | None, float]:
    """Predicted milliseconds, and over those of bf16; NaN where either was not measured on one host."""
    ms, bf16 = (growth.on_hosts(each, gpus, gbps)[0] for each in (way, "bf16"))
    return ms, ms / bf16 if ms and bf16 else math.nan


def hosts_table(growth: Growth) -> Table:
    def cell(way: str, gpus: int, gbps: float) -> str:
        ms, ratio = over_bf16(growth, way, gpus, gbps)
        if ms is None:
            return "-"
        text = f"{ms:.1f}" if way in ("bf16", "fsdp2") else f"{ms:.1f} = {ratio:.2f}x"
        if gpus == TARGET_GPUS and way in HOST_TARGETS:
            text += ", met" if KINDS["ratio"].is_met(ratio, HOST_TARGETS[way]) else ", missed"
        return text

    header = ("", *(f"{gpus:,} GPUs" for gpus in HOST_GPUS))
    rows = [
        (f"{way}: GB to other hosts", *(f"{growth.on_hosts(way, gpus, 1)[1]:.2f}" for gpus in HOST_GPUS))
        for way in HOST_WAYS
    ]
    for gbps in HOST_GBPS:
        for way in HOST_WAYS:
            what = f"{way}: {'its bytes alone' if HOST_WAYS[way] is None else 'step'} at {gbps} GB/s"
            rows.append((what, *(cell(way, gpus, gbps) for gpus in HOST_GPUS)))
    return Table(header, "l" * len(header), rows)


# Charts

OURS, STAGE, PEER, TARGET = "#1f5fa8", "#8db8e2", "#b9bec6", "#c8352b"
INCHES_PER_BAR = 0.26
GROWTH_CHART = "step_growth_cuda.png"
GROWTH_COLORS = {"collective": STAGE, "peer": OURS, "bf16": PEER}
GROWTH_PARTS = ("step", "reduce", "update", "publish")
HOSTS_CHART = "step_growth_hosts_cuda.png"
HOST_LINES = {"default": OURS, "reduce_scatter": "#1b8a5a", "collective": STAGE, "bf16": PEER}


def chart_path(folder: Path, result: dict) -> Path:
    return folder / f"percent_of_copy_{device_type(result)}.png"


def draw(folder: Path) -> list[Path] | None:
    """Draw all charts of a folder's result files; None without matplotlib.

    percent_of_copy_<device>.png for each kind of device, a panel for each file with times, and how a step
    grows with the number of GPUs.
    """
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    results = [result for _, result in load(folder)]
    charts: dict[Path, list[dict]] = {}
    for result in results:
        if any("ms" in row for row in result["rows"]):
            charts.setdefault(chart_path(folder, result), []).append(result)
    for path, panels in charts.items():
        draw_device(path, panels)
    drawn = list(charts)
    grown = growth_of(results)
    if grown is not None:
        drawn += [folder / GROWTH_CHART, folder / HOSTS_CHART]
        draw_growth(drawn[-2], grown)
        draw_hosts(drawn[-1], grown)
    return drawn


def new_picture(rows: int, cols: int, **options) -> tuple[Any, Any]:
    """The figure, and its axes [rows, cols]."""
    from matplotlib import pyplot

    options |= {"sharex": True, "squeeze": False, "dpi": 130, "layout": "constrained"}
    figure, axes = pyplot.subplots(rows, cols, **options)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_picture(figure, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path)
    pyplot.close(figure)


def draw_device(path: Path, results: list[dict]) -> None:
    timed = [selected([row for row in result["rows"] if "ms" in row]) for result in results]
    heights = [len(rows) + 0.5 for rows in timed]
    size = (10, INCHES_PER_BAR * sum(heights) + 0.4 * len(results) + 1)
    figure, axes = new_picture(len(results), 1, figsize=size, height_ratios=heights)
    for panel, rows, result in zip(axes.flat, timed, results, strict=True):
        draw_panel(panel, rows)
        ceiling = f"copy {result['copy_gbps']:,.0f} GB/s"
        panel.set_title(f"{result['benchmark']}  ({ceiling})", loc="left", fontsize=10)
    widest = max(row["percent_of_copy"] for rows in timed for row in rows)
    axes[0, 0].set_xlim(0, max(100, widest) * 1.36)  # room for what stands right of the bars
    axes[-1, 0].set_xlabel("percent of a device-to-device copy (bytes read and written over time)")
    words = "ours blue, its stages light blue, peers gray, targets red"
    figure.suptitle(f"{results[0]['device']}: {words}", fontsize=11)
    save_picture(figure, path)


def draw_panel(panel, rows: list[dict]) -> None:
    values = [row["percent_of_copy"] for row in rows]
    panel.axvline(100, color="black", linewidth=0.8, linestyle=":", zorder=0)
    panel.barh(range(len(rows)), values, height=0.74, color=[color(row) for row in rows])
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        if has_mark(row):
            panel.vlines(row["target"], place - 0.48, place + 0.48, color=TARGET, linewidth=2)
        panel.annotate(
            label(row),
            (max(value, row["target"]) if has_mark(row) else value, place),
            (5, 0),
            textcoords="offset points",
            verticalalignment="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    panel.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8.5)
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0)
    panel.tick_params(axis="x", labelsize=8.5)
    panel.spines["left"].set_visible(False)


def color(row: dict) -> str:
    if "times_ours" in row:
        return PEER
    return STAGE if row["name"].split("/")[0] in STAGES else OURS


def has_mark(row: dict) -> bool:
    return row["target"] is not None and row["kind"] == "percent_of_copy"


def label(row: dict) -> str:
    ms = row["ms"]
    took = f"{ms:,.0f}" if ms >= 1000 else f"{ms:.3g}"
    text = f"{row['percent_of_copy']:.0f}%   {took} ms"
    if "times_ours" in row:
        text += f"   {row['times_ours']:.2f} times ours"
    return text


def draw_growth(path: Path, growth: Growth) -> None:
    """Points of what was measured, on lines of what the model predicts."""
    figure, axes = new_picture(2, 2, figsize=(10, 7.5))
    for panel, part in zip(axes.flat, GROWTH_PARTS, strict=True):
        for way, line in GROWTH_COLORS.items():
            cells = [growth.cell(way, part, ranks) for ranks in growth.ranks]
            measured, predicted = ([ms or math.nan for ms in own] for own in zip(*cells, strict=True))
            panel.plot(predicted, "--", color=line, linewidth=1.5, label=f"{way}, predicted")
            panel.plot(measured, "o", color=line, markersize=7, label=f"{way}, measured")
        finish_panel(panel, part, growth.ranks)
    for panel in axes[1]:
        panel.set_xlabel("GPUs of a host")
    finish_growth(figure, axes, f"A step of several GPUs, {growth.base.result['device']}")
    save_picture(figure, path)


def draw_hosts(path: Path, growth: Growth) -> None:
    figure, axes = new_picture(1, len(HOST_GBPS), figsize=(10, 4.2), sharey=True)
    for panel, gbps in zip(axes.flat, HOST_GBPS, strict=True):
        for way, line in HOST_LINES.items():
            predicted = [growth.on_hosts(way, gpus, gbps)[0] or math.nan for gpus in HOST_GPUS]
            panel.plot(predicted, "--", color=line, linewidth=1.5, marker=".", label=f"{way}, predicted")
        finish_panel(panel, f"step, {gbps} GB/s a GPU between hosts", HOST_GPUS)
        panel.set_xlabel(f"GPUs, {OF_HOST} a host")
    finish_growth(figure, axes, f"A step of several hosts, predicted from {growth.base.result['device']}")
    save_picture(figure, path)


def finish_panel(panel, title: str, gpus: Sequence[int]) -> None:
    panel.set_title(title, loc="left", fontsize=10)
    panel.set_ylim(0)
    panel.set_xticks(range(len(gpus)), [f"{count:,}" for count in gpus])
    panel.set_ylabel("ms")
    panel.grid(axis="y", linewidth=0.4)


def finish_growth(figure, axes, title: str) -> None:
    """The legend, which is that of every panel, and the title."""
    handles, _ = axes[0, 0].get_legend_handles_labels()
    options = {"loc": "outside lower center", "frameon": False, "fontsize": 9}
    figure.legend(handles=handles, ncols=len(handles) // 2, **options)
    figure.suptitle(title, fontsize=12)
