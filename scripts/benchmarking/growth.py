"""How a step of several GPUs grows with their number: what was measured beside what a model predicts."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarking.chart import OURS, PEER, STAGE
from benchmarking.model import GPUS_OF_A_HOST, PARTS, WAYS, Phases, milliseconds, phases_of
from benchmarking.traffic import Speeds
from benchmarking.workloads import llama_sizes

RANKS = (1, 2, 4, 8, 64)
"""Numbers of GPUs that are predicted."""
NETWORK_GBPS = 50
"""To other hosts, of a GPU: 400 Gb/s, which is assumed."""
LINK_GBPS = 375.0
"""To other GPUs of a host, assumed where a result file does not say it."""
COLORS = {"collective": STAGE, "peer": OURS, "bf16": PEER}
DRAWN = ("step", "reduce", "update", "publish")


class Measured(NamedTuple):
    """A result file of `scripts/bench.py step` on GPUs: their number, what divides the weights' dimensions,
    and the rows by name.
    """

    ranks: int
    scale: int
    result: dict
    rows: dict[str, dict]


class Cell(NamedTuple):
    """Milliseconds of a part of a step, None where it was not measured, or is none. scale: of both."""

    measured: float | None
    predicted: float | None
    scale: int

    @property
    def ratio(self) -> float | None:
        return self.measured / self.predicted if self.measured and self.predicted else None


class Growth:
    """The files of one device, and the model that its smallest number of GPUs above 1 was measured for.

    A part of a step takes, with any number of GPUs, as much longer than the sum of its phases' floors as it
    takes with that number.
    """

    def __init__(self, measured: Sequence[Measured], network_gbps: float):
        self.base = min((one for one in measured if one.ranks > 1), key=lambda one: one.ranks)
        same = [one for one in measured if one.result["device"] == self.base.result["device"]]
        self.measured = {one.ranks: one for one in same}
        link = self.base.rows.get(f"link/{self.base.ranks}xcuda")
        self.link_is_assumed = link is None
        self.link_gbps = LINK_GBPS if link is None else link["gigabytes_per_second"]
        self.network_gbps = network_gbps
        speeds = self.base.result["copy_gbps"], self.link_gbps, network_gbps
        self.speeds = Speeds(*(1e9 * gbps for gbps in speeds))
        self.ranks = sorted({*RANKS, *self.measured})
        self.left_out = [one.result for one in measured if one not in same]

    def holds(self, result: dict) -> bool:
        """Whether a result file is among those that are compared."""
        return any(one.result is result for one in self.measured.values())

    def cell(self, way: str, part: str, ranks: int) -> Cell:
        """At the scale that so many GPUs were measured at, else that of the model's."""
        found = self.measured.get(ranks)
        scale = self.base.scale if found is None else found.scale
        took = None if found is None else milliseconds(found.rows, way, part, ranks)
        of_base = milliseconds(self.base.rows, way, part, self.base.ranks)
        if of_base is None:
            return Cell(took, None, scale)
        longer = of_base / self.floor(way, part, self.base.ranks, self.base.scale)
        return Cell(took, longer * self.floor(way, part, ranks, scale) or None, scale)

    def floor(self, way: str, part: str, ranks: int, scale: int) -> float:
        return sum(self.speeds.floor(traffic) for _, traffic in self.phases(way, part, ranks, scale))

    def phases(self, way: str, part: str, ranks: int, scale: int) -> Phases:
        shapes = [shape for shape, is_weight in llama_sizes(scale) if is_weight]
        return phases_of(way, shapes, ranks)[part]

    def limit(self, way: str, ranks: int) -> str:
        """The longest phase of a step, and what it waits for."""
        found = self.phases(way, "step", ranks, self.base.scale)
        phase, traffic = max(found, key=lambda pair: self.speeds.floor(pair[1]))
        times = self.speeds.milliseconds(traffic)
        return f"{phase}: {max(times, key=times.__getitem__)}"


def growth_of(results: Sequence[dict], network_gbps: float = NETWORK_GBPS) -> Growth | None:
    """Of all result files; None where no step of several GPUs is among them."""
    found = []
    for result in results:
        name = re.fullmatch(r"step_(\d+)_ranks", result["benchmark"])
        if name and result["threads"] is None:
            rows = {row["name"]: row for row in result["rows"]}
            found.append(Measured(int(name[1]), result["settings"]["scale"], result, rows))
    return Growth(found, network_gbps) if any(one.ranks > 1 for one in found) else None


def words(growth: Growth) -> str:
    """What the model is, for the page."""
    base, memory = growth.base.ranks, growth.speeds.memory / 1e9
    link = "assumed" if growth.link_is_assumed else "measured"
    others = "; ".join(f"{result['benchmark']} on {result['device']}" for result in growth.left_out)
    return (
        "How a step grows with the number of GPUs: milliseconds measured / predicted, and their ratio. The "
        f"model has the bytes of each phase move at {memory:,.0f} GB/s in a GPU's memory (the copy), at "
        f"{growth.link_gbps:,.0f} GB/s to other GPUs of a host of {GPUS_OF_A_HOST} ({link}) and at "
        f"{growth.network_gbps:,.0f} GB/s of each GPU to other hosts (assumed), and takes the slowest of "
        f"these; a part takes as much longer than the sum of its phases as it did with {base} GPUs, where "
        "the ratio is 1 for that. Collectives between hosts go around rings of all GPUs, but for the "
        "all-to-all of gradients; `peer` on several hosts is what `hosts` of `ZeroFP4Optimizer` makes of it. "
        "The last rows have the longest phase of each step, and what it waits for by the model."
        + (f" Not compared, being of another device: {others}." if others else "")
    )


def cells(growth: Growth) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of a table."""
    header = ("", *(f"{ranks} GPU{'s' * (ranks > 1)}" for ranks in growth.ranks))
    rows = [
        (f"{way}: {part}", *(shown(growth, growth.cell(way, part, ranks)) for ranks in growth.ranks))
        for part in PARTS
        for way in WAYS
    ]
    limits = [(f"{way}: longest", *(growth.limit(way, ranks) for ranks in growth.ranks)) for way in WAYS]
    return header, rows + limits


def shown(growth: Growth, cell: Cell) -> str:
    measured, predicted = ("-" if ms is None else f"{ms:.1f}" for ms in cell[:2])
    ratio = "" if cell.ratio is None else f" = {cell.ratio:.2f}"
    scale = "" if cell.scale == growth.base.scale else f", scale {cell.scale}"
    return f"{measured} / {predicted}{ratio}{scale}"


def chart_path(folder: Path) -> Path:
    return folder / "step_growth_cuda.png"


def draw(folder: Path, growth: Growth) -> Path:
    """Points of what was measured at the model's scale, on lines of what it predicts. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    figure, axes = pyplot.subplots(2, 2, sharex=True, figsize=(10, 7.5), dpi=130, layout="constrained")
    for panel, part in zip(axes.flat, DRAWN, strict=True):
        for way, color in COLORS.items():
            draw_line(panel, [growth.cell(way, part, ranks) for ranks in growth.ranks], color, growth)
        panel.set_title(part, loc="left", fontsize=10)
        panel.set_yscale("log", base=2)
        panel.yaxis.set_major_formatter("{x:g}")
        panel.set_xticks(range(len(growth.ranks)), [str(ranks) for ranks in growth.ranks])
        panel.grid(axis="y", linewidth=0.4)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in axes[:, 0]:
        panel.set_ylabel("ms")
    for panel in axes[1]:
        panel.set_xlabel(f"GPUs, {GPUS_OF_A_HOST} on a host")
    handles = [Line2D([], [], color=color, label=way) for way, color in COLORS.items()]
    style = {"color": "black", "linestyle": "none", "marker": "o"}
    handles.append(Line2D([], [], **style, label="measured"))
    handles.append(Line2D([], [], color="black", linestyle="--", label="predicted"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.suptitle(f"A step of several GPUs, {growth.base.result['device']}", fontsize=12)
    path = chart_path(folder)
    figure.savefig(path)
    pyplot.close(figure)
    return path


def draw_line(panel, found: Sequence[Cell], color: str, growth: Growth) -> None:
    at_scale = [cell if cell.scale == growth.base.scale else None for cell in found]
    places = [place for place, cell in enumerate(at_scale) if cell and cell.predicted is not None]
    panel.plot(places, [found[place].predicted for place in places], "--", color=color, linewidth=1.5)
    places = [place for place, cell in enumerate(at_scale) if cell and cell.measured is not None]
    panel.plot(places, [found[place].measured for place in places], "o", color=color, markersize=7)
