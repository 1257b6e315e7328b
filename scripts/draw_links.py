"""Draws docs/images/links.png: tokens a second with gathers in 4 and 8 bits over those in bf16, by the link.

`scripts/bench.py docs` calls it, and docs/fsdp2.md shows the picture. Points are runs of `bench.py fsdp2`
that reshard. Those in benchmarks/results/slow_links were made with NCCL's faster ways turned off.
"""

import json
from pathlib import Path

from zerofp4_bench.output import new_picture, save_picture
from zerofp4_bench.session import RESULTS

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "links.png"
LINES = {"reshard": "4 bits, ours", "reshard_float8": "8 bits, torchao (eager)"}
"""By the case of the benchmark, what its line is called."""


def points() -> dict[str, list[tuple[float, float]]]:
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


def draw() -> Path:
    """Needs matplotlib. Returns the path of the picture."""
    figure, axes = new_picture(1, 1, figsize=(7, 3.2))
    panel = axes[0, 0]
    for (case, line), color in zip(points().items(), ("#1f5fa8", "#b9bec6"), strict=True):
        panel.plot(*zip(*line, strict=True), marker="o", color=color, label=LINES[case])
        where = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "fontsize": 9}
        for place in line:
            panel.annotate(f"{place[1]:.2f}", place, **where)
    panel.axhline(1, color="black", linewidth=0.8, linestyle=":")
    panel.set_xscale("log")
    panel.minorticks_off()
    links = [gbps for gbps, _ in points()["reshard"]]
    panel.set_xticks(links, [f"{gbps:.0f}" for gbps in links])
    panel.set_xlabel("GB/s that a GPU receives in an all-gather")
    panel.set_ylabel("tokens a second, over bf16")
    panel.margins(y=0.2)
    panel.legend(frameon=False, fontsize=9)
    save_picture(figure, PICTURE)
    return PICTURE
