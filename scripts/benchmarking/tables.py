"""Result files as tables: on the terminal, and in docs/performance.md."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarking import growth
from benchmarking.budgets import budget
from benchmarking.chart import chart_path, comparison_path
from benchmarking.operations import SHOWN
from benchmarking.selection import selected
from benchmarking.session import RESULTS, ROOT
from benchmarking.targets import KINDS

BEGIN, END = "<!-- benchmarks: begin -->\n", "\n<!-- benchmarks: end -->"
WIDTH_OF_LOGS = 180
INSTRUCTIONS = "instructions_cuda.json"  # no result file of an operation, but what budgets are made of


class Table(NamedTuple):
    """Cells by row. The last column says how the figures came about, which a terminal has seen before."""

    header: tuple[str, ...]
    alignment: str  # "l" or "r" for each column
    rows: list[tuple[str, ...]]

    def without_rule(self) -> "Table":
        return Table(self.header[:-1], self.alignment[:-1], [row[:-1] for row in self.rows])


def load(folder: Path) -> list[tuple[Path, dict]]:
    """The result files of a folder: a GPU's before a CPU's, in the order in which `all` makes them."""
    paths = [path for path in folder.glob("*.json") if path.name != INSTRUCTIONS]
    results = [(path, json.loads(path.read_text())) for path in paths]

    def order(item: tuple[Path, dict]):
        path, result = item
        name = result["benchmark"]
        place = SHOWN.index(name) if name in SHOWN else len(SHOWN)
        return result["threads"] is not None, place, path.name

    return sorted(results, key=order)


def with_budgets(result: dict) -> dict:
    """The result; where the instructions of a row's operation were counted on the same device, its "budget"
    in words is in the row, and the commit of the counts is "counted_at".
    """
    path = RESULTS / INSTRUCTIONS
    counted = json.loads(path.read_text()) if path.exists() else None
    if counted is None or counted["device"] != result["device"]:
        return result
    by_operation = {operation_of(row): row for row in reversed(counted["rows"])}  # the first of a name stays

    def with_budget(row: dict) -> dict:
        counts = by_operation.get(operation_of(row))
        words = counts and budget(row, counts, result["device"], result["copy_gbps"])
        return row | {"budget": words} if words else row

    rows = [with_budget(row) if "ms" in row else row for row in result["rows"]]
    return result | {"rows": rows, "counted_at": counted["commit"]}


def operation_of(row: dict) -> str:
    return row["name"].partition("/")[0]


def device_name(result: dict) -> str:
    threads = result["threads"]
    return result["device"] + (f", {threads} thread{'s' * (threads > 1)}" if threads else "")


def timed_table(timed: list[dict]) -> Table:
    rows = [
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
    return Table(("operation", "ms", "GB/s", "% of copy", "note", "bytes counted"), "lrrrll", rows)


def counted_table(counted: list[dict]) -> Table:
    rows = [
        (row["name"], KINDS[row["kind"]].show(row[row["kind"]]), note(row), row["rule"]) for row in counted
    ]
    return Table(("figure", "value", "note", "what it is"), "lrll", rows)


def instructions_table(rows: list[dict]) -> Table:
    """Of the file of instructions: counts by the element, how busy schedulers and memory were, and bounds."""

    def cells(row: dict) -> tuple[str, ...]:
        counts = (
            "-" if row[name] is None else f"{row[name]:.3g}"
            for name in ("instructions", "alu", "fma", "other")
        )
        busy = (
            "-" if row[name] is None else f"{row[name]:.0f}" for name in ("issue_percent", "dram_percent")
        )
        limits = ", ".join(f"{bound['gbps']:,.0f} by {limit}" for limit, bound in row["bounds"].items())
        return (row["name"], *counts, *busy, limits)

    header = ("row", "instructions", "ALU", "FMA", "other", "issue %", "DRAM %", "at most GB/s")
    return Table(header, "lrrrrrrl", [cells(row) for row in rows])


def tables(rows: list[dict]) -> list[Table]:
    """Of rows of a result file, those tables that are not empty."""
    timed, counted = split(rows)
    return [table for table in (timed_table(timed), counted_table(counted)) if table.rows]


def split(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """Those with times, and the others."""
    return [row for row in rows if "ms" in row], [row for row in rows if "ms" not in row]


def note(row: dict) -> str:
    """The instruction budget and the target where there are any, or a peer's time in ours."""
    return "; ".join(filter(None, [row.get("budget"), judgement(row)]))


def judgement(row: dict) -> str:
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
    """With rich where it is installed, else in plain columns."""
    ceilings = f"{result['copy_gbps_before']:,.1f} GB/s before, {result['copy_gbps_after']:,.1f} after"
    print(f"\n{result['benchmark']} on {device_name(result)}; copy ceiling {ceilings}")
    for table in tables(with_budgets(result)["rows"]):
        print_table(table.without_rule())


def print_table(table: Table) -> None:
    try:
        print_rich(table)
    except ImportError:
        print("\n".join(plain_lines(table)))


def print_rich(table: Table) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable

    shown = RichTable()
    for name, alignment in zip(table.header, table.alignment, strict=True):
        shown.add_column(name, justify="right" if alignment == "r" else "left", no_wrap=True)
    for row in table.rows:
        style = "red" if row[-1].endswith("missed") else "green" if row[-1].endswith(" met") else None
        shown.add_row(*row, style=style)
    Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_OF_LOGS).print(shown)


def plain_lines(table: Table) -> list[str]:
    rows = (table.header, *table.rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(justified, row, widths, table.alignment)).rstrip() for row in rows]


def justified(cell: str, width: int, alignment: str) -> str:
    return cell.rjust(width) if alignment == "r" else cell.ljust(width)


def markdown(path: Path, result: dict) -> str:
    """The tables of one result file under a line that names it, with the rows that `selected` chooses."""
    result = with_budgets(result)
    shown = [row for rows in split(result["rows"]) for row in selected(rows)]
    left_out = len(result["rows"]) - len(shown)
    head = f"{device_name(result)}, `{path.relative_to(ROOT)}`: copy ceiling {result['copy_gbps']:,.0f} GB/s"
    if any("budget" in row for row in shown) and result["counted_at"] != result["commit"]:
        head += f"; instructions counted at commit {(result['counted_at'] or 'unknown')[:7]}"
    parts = [head + (f"; {left_out} more rows are in the file." if left_out else ".")]
    return "\n\n".join([*parts, *map(markdown_table, tables(shown))])


def markdown_table(table: Table) -> str:
    rule = "".join("---:|" if alignment == "r" else "---|" for alignment in table.alignment)
    lines = ["| " + " | ".join(row) + " |" for row in (table.header, *table.rows)]
    return "\n".join([lines[0], "|" + rule, *lines[1:]])


def growth_markdown(found: growth.Growth) -> str:
    """The chart, if there is one, what the model is, and the table."""
    path = growth.chart_path(RESULTS)
    link = Path("..", path.relative_to(ROOT))
    chart = [f"![A step of several GPUs, measured and predicted]({link})"] if path.exists() else []
    header, rows = growth.cells(found)
    return "\n\n".join([*chart, growth.words(found), markdown_table(Table(header, "l" * len(header), rows))])


def docs_section(network_gbps: float = growth.NETWORK_GBPS) -> str:
    """What stands between the benchmark markers: per device its chart, if there is one, then its tables;
    behind those of steps of several GPUs how these grow. network_gbps: what is assumed of a network between
    hosts.
    """
    parts, shown, results = [], set(), load(RESULTS)
    grown = growth.growth_of([result for _, result in results], network_gbps)
    steps = [path for path, result in results if grown is not None and grown.holds(result)]
    for path, result in results:
        chart = chart_path(RESULTS, result)
        if chart.exists() and chart not in shown:
            shown.add(chart)
            link = Path("..", chart.relative_to(ROOT))
            parts.append(f"![Percent of the copy ceiling on {result['device']}]({link})")
        picture = comparison_path(RESULTS, result)
        if picture.exists():
            link = Path("..", picture.relative_to(ROOT))
            parts.append(f"![{result['benchmark']}: ours over bf16]({link})")
        parts.append(markdown(path, result))
        if path in steps[-1:]:
            parts.append(growth_markdown(grown))
    return "\n\n".join(parts)


def write_docs(network_gbps: float = growth.NETWORK_GBPS) -> Path:
    """Put the section between the markers of the page that shows it."""
    path = ROOT / "docs" / "performance.md"
    head, rest = path.read_text().split(BEGIN)
    path.write_text(head + BEGIN + docs_section(network_gbps) + END + rest.split(END)[1])
    return path
