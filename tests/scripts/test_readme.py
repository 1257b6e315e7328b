"""README.md is short, and what it says is so."""

import json
import re
from pathlib import Path

import torch
from torch import nn

import zerofp4

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MOST_LINES = 150


def test_it_is_short_and_has_no_tables():
    assert len(README.splitlines()) <= MOST_LINES
    assert not re.search(r"^\|", README, re.MULTILINE), "tables belong in docs/"


def test_the_measured_line_is_in_the_result_file():
    result = json.loads((ROOT / "benchmarks" / "results" / "local_step_cuda.json").read_text())
    row = next(row for row in result["rows"] if row["name"] == "local_step/llama3-8b/rank1of4")
    assert result["device"] == "NVIDIA H200"
    said = f"take {row['ms']:.2f} ms, {row['percent_of_copy']:.1f}% of the speed of a plain copy"
    assert said in " ".join(README.split())


def test_the_snippet_runs(world_of_one):
    snippet, _ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(snippet.splitlines()) == 7
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    names = {"zerofp4": zerofp4, "torch": torch, "model": model, "batch": torch.randn(8, 32)}
    names["loss_of"] = lambda model, batch: (model(batch) - batch).square().mean()
    losses = []
    exec(snippet, names)
    once_more = "\n".join(snippet.splitlines()[3:])
    for _ in range(5):
        exec(once_more, names)
        losses.append(names["loss_of"](model, names["batch"]).item())
    assert losses[-1] < losses[0]
    assert names["report"].converted == ["0", "2"]


def test_the_snippet_of_fsdp2_is_that_of_its_page():
    """Where it is run (test_docs.py)."""
    page = (ROOT / "docs" / "fsdp2.md").read_text()
    _, *shown = (
        [line.partition("  #")[0].rstrip() for line in snippet.splitlines()]
        for snippet in re.findall(r"```python\n(.*?)```", README + page, re.DOTALL)
    )
    assert len(shown[0]) == 7 and [line for line in shown[1] if line in shown[0]] == shown[0]


def test_both_commands_end_as_it_says():
    for script, word in (("demo.sh", "DEMO"), ("test.sh", "TESTS")):
        text = (ROOT / "scripts" / script).read_text()
        assert f"\nverdict {word}\n" in text and text.endswith("passed\n"), script
        for end in (f"{word} PASSED", f"{word} FAILED"):
            assert end in README, f"{end} is not in README.md"
    verdict = (ROOT / "scripts" / "verdict.sh").read_text()
    assert '"$VERDICT PASSED"' in verdict and '"$VERDICT FAILED"' in verdict
