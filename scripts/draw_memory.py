"""Draws docs/images/memory.png: the bytes a parameter that a GPU keeps to train Llama-3-8B, by what they are.

`scripts/bench.py docs` calls it. README.md and docs/index.md show the picture; test_readme.py compares the
figures. Ours are predicted from shapes (zerofp4/inspect/memory.py), FlashAdamW's are those of its paper, and
activations are what the peak of a run has above what is kept: that run's, in every bar of one GPU.
"""

from pathlib import Path

import pages

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "memory.png"
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
}
"""By way of zerofp4.inspect.memory, what its bar is called."""


def kept(way: str, ranks: int = 1) -> dict[str, float]:
    """Bytes a parameter by what they are: masters and moments are sharded over the ranks."""
    run = pages.runs()[0]
    parts = pages.kept(run, way)
    return {part: size / ranks if part in ("masters", "moments") else size for part, size in parts.items()}


def flash(gradients: float) -> dict[str, float]:
    """Of FlashAdamW: the weights are 16 of the masters' 24 bits."""
    return {"weights": 2.0, "gradients": gradients, "masters": 1.0, "moments": 2.0}


def bars(ranks: int) -> dict[str, dict[str, float]]:
    """With several ranks those ways alone whose gradients are whole."""
    if ranks > 1:
        return {name: kept(way, ranks) for way, name in NAMES.items() if way != pages.EARLY}
    (plain, full, compact, early), (whole, released) = NAMES.items(), pages.FLASH
    found = {plain[1]: kept(plain[0])}
    found |= {f"{whole} (its paper)": flash(2.0), f"{released} (its paper)": flash(0.0)}
    found |= {name: kept(way) for way, name in (full, compact, early)}
    more = {"activations, buffers": pages.beyond(pages.runs()[0])}
    return {name: parts | more for name, parts in found.items()}


def draw() -> Path:
    """Needs matplotlib and transformers. Returns the path of the picture."""
    from zerofp4_bench.output import new_picture, save_picture

    panels = {ranks: bars(ranks) for ranks in RANKS}
    heights = {"height_ratios": [len(each) for each in panels.values()]}
    figure, axes = new_picture(len(RANKS), 1, figsize=(9, 4.4), gridspec_kw=heights)
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
    axes[-1, 0].set_xlabel("bytes a parameter")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    options = {"loc": "outside lower center", "frameon": False, "fontsize": 9, "ncols": len(COLORS)}
    figure.legend(handles[: len(COLORS)], labels[: len(COLORS)], **options)
    save_picture(figure, PICTURE)
    return PICTURE
