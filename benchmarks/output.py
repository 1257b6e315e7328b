"""Result files as tables: on the terminal and on pages of docs/; and the chart of the summary."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.operations import SHOWN
from benchmarks.rules import KINDS
from benchmarks.session import RESULTS
from benchmarks.workloads import ROOT
from zerofp4.inspect.table import print_table

SUMMARY_CHART = RESULTS / "summary_cuda.png"
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
    header: Sequence[str]
    alignment: str  # "<" or ">" for each column
    rows: list[Sequence[str]]


def tables(rows: list[dict]) -> list[Table]:
    """Tables of times and of other figures from the rows of a result file, without those that are empty."""
    timed = [row for row in rows if "ms" in row]
    others = [row for row in rows if "ms" not in row]
    times = [(row["name"], f"{row['ms']:.3f}", f"{row['percent_of_copy']:.1f}", note(row)) for row in timed]
    counts = [(row["name"], KINDS[row["kind"]].show(row[row["kind"]]), note(row)) for row in others]
    found = (
        Table(("operation", "ms", "% of copy", "target"), "<>><", times),
        Table(("figure", "value", "target"), "<><", counts),
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
        print_table([table.header, *table.rows], table.alignment)


# The pages


def markdown(path: Path, result: dict) -> str:
    """The tables of one result file under a line that names it."""
    head = f"{device_name(result)}, `{path.relative_to(ROOT)}`: copy ceiling {result['copy_gbps']:,.0f} GB/s."
    return "\n\n".join([head, *map(markdown_table, tables(result["rows"]))])


def markdown_table(table: Table) -> str:
    rule = "".join("---:|" if alignment == ">" else "---|" for alignment in table.alignment)
    lines = ["| " + " | ".join(row) + " |" for row in (table.header, *table.rows)]
    return "\n".join([lines[0], "|" + rule, *lines[1:]])


def docs_section() -> str:
    """All tables, for docs/measurements.md."""
    return "\n\n".join(markdown(path, result) for path, result in load(RESULTS))


def summary_section() -> str:
    """The chart and the table at the top of docs/performance.md."""
    rows = [row[:3] for row in headlines([result for _, result in load(RESULTS)])]
    picture = f"![Ours over what others take]({Path('..', SUMMARY_CHART.relative_to(ROOT))})"
    return f"{picture}\n\n{markdown_table(Table(('', 'ours', 'against'), '<><', rows))}"


def finetune_section() -> str:
    """What examples/quantization_aware_finetune.py left in results/finetune, for docs/serving.md."""
    results = [json.loads(path.read_text()) for path in sorted((RESULTS / "finetune").glob("*.json"))]
    names = list(dict.fromkeys(name for result in results for name in result["losses"]))
    rows = []
    for result in results:
        losses = [result["losses"].get(name) for name in names]
        cells = ["" if loss is None else f"{loss:.4f}" for loss in losses]
        rows.append((finetune_words(result), *cells))
    header = ("model and training", *names)
    return markdown_table(Table(header, "<" + ">" * len(names), rows))


def finetune_words(result: dict) -> str:
    options = result["options"]
    choices = {"four_over_six": "four over six", "teacher": "teacher", "fsdp": "fully_shard"}
    words = [f"{result['parameters'] / 1e6:.1f}M parameters", f"blocks of {options['block']}"]
    words += [word for name, word in choices.items() if options[name]]
    device = f"{result['ranks']} x {result['device']}" if result["ranks"] > 1 else result["device"]
    return ", ".join([*words, f"{options['steps']} steps", device])


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


def headlines(results: list[dict]) -> list[tuple[str, str, str, float]]:
    """What, ours, against what, and the ratio of time or memory; none if the files lack one of these rows."""
    found, specified = [], [line.split("; ") for line in HEADLINES.splitlines()]
    on_gpus = (result for result in results if result["threads"] is None)
    rows = {(result["benchmark"], row["name"]): row for result in on_gpus for row in result["rows"]}
    if not {(file, name) for _, file, name, *_ in specified} <= rows.keys():
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
    return found
