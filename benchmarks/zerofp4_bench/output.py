"""Result files as tables: on the terminal and on pages of docs/; and the chart of the summary."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from zerofp4_bench.operations import SHOWN
from zerofp4_bench.rules import KINDS
from zerofp4_bench.session import RESULTS, ROOT
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

BEGIN, END = "<!-- benchmarks: begin -->\n", "\n<!-- benchmarks: end -->"


def load(folder: Path) -> list[tuple[Path, dict]]:
    """The result files of a folder: a GPU's before a CPU's, in the order in which `all` makes them."""
    results = [(path, json.loads(path.read_text())) for path in folder.glob("*.json")]

    def order(item: tuple[Path, dict]):
        path, result = item
        name = result["benchmark"]
        place = SHOWN.index(name) if name in SHOWN else len(SHOWN)
        return result["threads"] is not None, place, path.name

    return sorted(results, key=order)


def device_name(result: dict) -> str:
    threads = result["threads"]
    return result["device"] + (f", {threads} thread{'s' * (threads > 1)}" if threads else "")


# Tables


class Table(NamedTuple):
    header: tuple[str, ...]
    alignment: str  # "l" or "r" for each column
    rows: list[tuple[str, ...]]


def tables(rows: list[dict]) -> list[Table]:
    """Tables of times and of other figures from the rows of a result file, without those that are empty."""
    timed = [row for row in rows if "ms" in row]
    others = [row for row in rows if "ms" not in row]
    times = [(row["name"], f"{row['ms']:.3f}", f"{row['percent_of_copy']:.1f}", note(row)) for row in timed]
    counts = [(row["name"], KINDS[row["kind"]].show(row[row["kind"]]), note(row)) for row in others]
    found = (
        Table(("operation", "ms", "% of copy", "target"), "lrrl", times),
        Table(("figure", "value", "target"), "lrl", counts),
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
        print("\n".join(plain_lines(table)))


def plain_lines(table: Table) -> list[str]:
    rows = (table.header, *table.rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.rjust if side == "r" else str.ljust for side in table.alignment]
    return [
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)).rstrip()
        for row in rows
    ]


# The pages


def markdown(path: Path, result: dict) -> str:
    """The tables of one result file under a line that names it."""
    head = f"{device_name(result)}, `{path.relative_to(ROOT)}`: copy ceiling {result['copy_gbps']:,.0f} GB/s."
    return "\n\n".join([head, *map(markdown_table, tables(result["rows"]))])


def markdown_table(table: Table) -> str:
    rule = "".join("---:|" if alignment == "r" else "---|" for alignment in table.alignment)
    lines = ["| " + " | ".join(row) + " |" for row in (table.header, *table.rows)]
    return "\n".join([lines[0], "|" + rule, *lines[1:]])


def docs_section() -> str:
    """All tables, for docs/measurements.md; at the end, how steps of several GPUs grow."""
    results = load(RESULTS)
    parts = [markdown(path, result) for path, result in results]
    if (grown := growth_of([result for _, result in results])) is not None:
        parts += [growth_words(grown), markdown_table(growth_table(grown))]
        parts += [hosts_words(grown), markdown_table(hosts_table(grown))]
    return "\n\n".join(parts)


def summary_section() -> str:
    """The chart and the table at the top of docs/performance.md."""
    rows = [row[:3] for row in headlines([result for _, result in load(RESULTS)])]
    picture = f"![Ours over what others take]({Path('..', (RESULTS / SUMMARY_CHART).relative_to(ROOT))})"
    return f"{picture}\n\n{markdown_table(Table(('', 'ours', 'against'), 'lrl', rows))}"


def finetune_section() -> str:
    """A table for docs/serving.md of what examples/quantization_aware_finetune.py has written to
    benchmarks/results/finetune; nothing while there is no file.
    """
    results = [json.loads(path.read_text()) for path in sorted((RESULTS / "finetune").glob("*.json"))]
    names = list(dict.fromkeys(name for result in results for name in result["losses"]))
    rows = []
    for result in results:
        losses = [result["losses"].get(name) for name in names]
        cells = ["" if loss is None else f"{loss:.4f}" for loss in losses]
        rows.append((finetune_words(result), *cells))
    header = ("model and training", *names)
    return markdown_table(Table(header, "l" + "r" * len(names), rows)) if rows else ""


def finetune_words(result: dict) -> str:
    options = result["options"]
    choices = {"four_over_six": "four over six", "teacher": "teacher", "fsdp": "fully_shard"}
    words = [f"{result['parameters'] / 1e6:.1f}M parameters", f"blocks of {options['block']}"]
    words += [word for name, word in choices.items() if options[name]]
    device = f"{result['ranks']} x {result['device']}" if result["ranks"] > 1 else result["device"]
    return ", ".join([*words, f"{options['steps']} steps", device])


SECTIONS = {
    "performance.md": summary_section,
    "measurements.md": docs_section,
    "serving.md": finetune_section,
}
"""By page of docs/, what stands between its markers."""


# The summary

HEADLINES = """\
Step, 1 GPU; step_1_ranks; step/1xcuda; step_bf16/1xcuda; ZeRO-1 in bf16
Step, 2 GPUs; step_2_ranks; peer_step/2xcuda; step_bf16/2xcuda; ZeRO-1 in bf16
Clipping and step, 2 GPUs; step_2_ranks; peer_step_clipped/2xcuda; step_bf16_clipped/2xcuda; ZeRO-1 in bf16
Peak memory of a GPU, 2 GPUs; step_2_ranks; peer_memory/2xcuda; memory_bf16/2xcuda; ZeRO-1 in bf16
Cast of a quarter of the model; local_step; local_step/llama3-8b/rank1of4; ; copying as many bytes
AdamW on that quarter; adamw; adamw/llama3-8b; ; copying as many bytes
Linear layer, both passes; layers; linear/16384x8192x8192; bf16_linear/16384x8192x8192; torch in bf16
FSDP2: all-gathers, 2 GPUs; fsdp2_2_ranks; reshard/gather/2xcuda; reshard_bf16/gather/2xcuda; bf16
FSDP2: whole step, 2 GPUs; fsdp2_2_ranks; reshard/step/2xcuda; reshard_bf16/step/2xcuda; bf16
Checkpoint: save, 2 GPUs; checkpoint_2_ranks; zerofp4_save/2xcuda; dtensors_save/2xcuda; FP32 DTensors"""
"""By line: what, its benchmark and row, the row that it is compared with (or a copy is), and what that is."""
PREDICTED = ((8, "default"), (TARGET_GPUS, "default"), (TARGET_GPUS, "reduce_scatter"))


def headlines(results: list[dict]) -> list[tuple[str, str, str, float]]:
    """What, ours, against what, and the ratio of time or memory; none if the files lack one of these rows."""
    found, specified = [], [line.split("; ") for line in HEADLINES.splitlines()]
    on_gpus = (result for result in results if result["threads"] is None)
    rows = {(result["benchmark"], row["name"]): row for result in on_gpus for row in result["rows"]}
    grown = growth_of(results)
    if grown is None or not {(file, name) for _, file, name, *_ in specified} <= rows.keys():
        return []
    for what, file, name, other, words in specified:
        row = rows[file, name]
        if other:
            figure, ratio = row[row["kind"]], row[row["kind"]] / rows[file, other][row["kind"]]
            against = f"{ratio:.2f} of {words}"
        else:
            figure, ratio = row["ms"], 100 / row["percent_of_copy"]
            against = f"{row['percent_of_copy']:.1f}% of the speed of {words}"
        ours = f"{figure / 1e3:,.1f} GB" if row["kind"] == "megabytes" else f"{figure:,.1f} ms"
        found.append((what, ours, against, ratio))
    for gpus, way in PREDICTED:
        ms, ratio = over_bf16(grown, way, gpus, HOST_GBPS[1])
        words = f"Predicted: step, {gpus} GPUs, `{way}`"
        found.append((words, f"{ms:.1f} ms", f"{ratio:.2f} of ZeRO-1 in bf16", ratio))
    return found


def growth_words(growth: Growth) -> str:
    memory, link = (speed / 1e9 for speed in growth.speeds[:2])
    others = "; ".join(f"{result['benchmark']} on {result['device']}" for result in growth.left_out)
    return (
        "A step by the number of GPUs of a host: milliseconds measured / predicted, and their ratio. "
        f"Predicted from {memory:,.0f} GB/s in a GPU's memory (the copy), {link:,.0f} GB/s to other GPUs of "
        f"the host (measured), and what was measured with {growth.base.ranks} GPUs."
        + (f" Not compared, being of another device or scale: {others}." if others else "")
    )


def growth_table(growth: Growth) -> Table:
    header = ("", *(f"{ranks} GPU{'s' * (ranks > 1)}" for ranks in growth.ranks))
    rows = [
        (f"{way}: {part}", *(shown(growth.cell(way, part, ranks)) for ranks in growth.ranks))
        for part in PARTS
        for way in WAYS
    ]
    return Table(header, "l" * len(header), rows)


def shown(cell: Cell) -> str:
    measured, predicted = ("-" if ms is None else f"{ms:.1f}" for ms in cell)
    return f"{measured} / {predicted}" + ("" if cell.ratio is None else f" = {cell.ratio:.2f}")


def hosts_words(growth: Growth) -> str:
    factors = {way: factor for way in WAYS if (factor := growth.longer(way, "step"))}
    measured = ", ".join(f"{way} {factor:.2f}" for way, factor in factors.items())
    bounds = " and ".join(f"`{way}` {KINDS['ratio'].bound(target)}" for way, target in HOST_TARGETS.items())
    return (
        f"A step by the number of GPUs, {OF_HOST} a host: milliseconds, and the ratio to those of `bf16`. "
        "**All of it is predicted: no step of several hosts was measured.** Measured factors over the "
        f"sum of the phases: {measured}. Targets at {TARGET_GPUS} GPUs: {bounds}."
    )


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


# The chart

OURS, PREDICTION = "#1f5fa8", "#8db8e2"
INCHES_PER_BAR = 0.26
SUMMARY_CHART = "summary_cuda.png"


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


def draw_summary() -> Path:
    """Draw the chart of the summary, from benchmarks/results. Needs matplotlib."""
    rows = headlines([result for _, result in load(RESULTS)])
    figure, axes = new_picture(1, 1, figsize=(8, INCHES_PER_BAR * len(rows) + 1))
    panel, names = axes[0, 0], [what.replace("`", "") for what, *_ in rows]
    colors = [PREDICTION if name.startswith("Predicted") else OURS for name in names]
    bars = panel.barh(names, [ratio for *_, ratio in rows], color=colors)
    panel.bar_label(bars, fmt="%.2f", padding=4, fontsize=8.5)
    panel.axvline(1, color="black", linewidth=0.8, linestyle=":")
    panel.set_xlabel("time or memory, over that of the other way; light blue: predicted")
    panel.invert_yaxis()
    save_picture(figure, RESULTS / SUMMARY_CHART)
    return RESULTS / SUMMARY_CHART
