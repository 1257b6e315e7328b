"""Draws docs/images/memory.png: the bytes that a GPU keeps for each parameter of a linear layer.

`scripts/bench.py docs` calls it. README.md and docs/index.md show the picture; test_readme.py compares the
figures.
"""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "memory.png"
RANKS = (1, 8)
COLORS = {"weights": "#1f5fa8", "gradients": "#b9bec6", "masters": "#8db8e2", "moments": "#d7e6f5"}


def weights() -> dict[str, float]:
    """Bytes of a weight, scales included, as scripts/bench.py fsdp2 has measured them."""
    path = ROOT / "benchmarks" / "results" / "fsdp2_2_ranks_cuda.json"
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    names = {"bf16": "bf16", "NVFP4, rows and columns": "rows_and_columns", "NVFP4, rows": "rows"}
    return {name: rows[f"resident/{row}/2xcuda"]["bytes_per_parameter"] for name, row in names.items()}


def kept(weight: float, ranks: int) -> dict[str, float]:
    """Bytes by what they are: bf16 gradients whole, FP32 masters and two FP32 moments over the ranks."""
    return {"weights": weight, "gradients": 2.0, "masters": 4 / ranks, "moments": 8 / ranks}


def draw() -> Path:
    """Needs matplotlib. Returns the path of the picture."""
    from zerofp4_bench.output import new_picture, save_picture

    figure, axes = new_picture(1, len(RANKS), figsize=(9, 2.3), sharey=True)
    for panel, ranks in zip(axes.flat, RANKS, strict=True):
        for name, weight in weights().items():
            left = 0.0
            for part, size in kept(weight, ranks).items():
                panel.barh(name, size, left=left, color=COLORS[part], label=part)
                left += size
            panel.annotate(f"{left:.1f}", (left, name), (4, -3), textcoords="offset points", fontsize=9)
        panel.set_title(f"{ranks} GPU{'s' * (ranks > 1)}", loc="left", fontsize=10)
        panel.set_xlim(0, 18)
        panel.set_xticks(range(0, 17, 4))
        panel.set_xlabel("bytes a parameter on each GPU")
    axes[0, 0].invert_yaxis()
    handles, labels = axes[0, 0].get_legend_handles_labels()
    options = {"loc": "outside lower center", "frameon": False, "fontsize": 9, "ncols": len(COLORS)}
    figure.legend(handles[: len(COLORS)], labels[: len(COLORS)], **options)
    save_picture(figure, PICTURE)
    return PICTURE
