"""README.md is short, and what it says is so."""

import json
import re

from docs_cases import ROOT, blocks

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


def test_the_snippet_of_fsdp2_is_that_of_its_page():
    """But for comments, and for the loop that follows there."""
    blocks_here = blocks(ROOT / "README.md", "python")[1], blocks(ROOT / "docs" / "fsdp2.md", "python")[0]
    shown, page = (
        [line.partition("  #")[0].rstrip() for line in block.code.splitlines()] for block in blocks_here
    )
    assert shown == page[: len(shown)] and page[-1].endswith("optimizer.zero_grad()")


def test_both_commands_end_as_it_says():
    for script, word in (("demo.sh", "DEMO"), ("test.sh", "TESTS")):
        text = (ROOT / "scripts" / script).read_text()
        assert f"\nverdict {word}\n" in text and text.endswith("passed\n"), script
        for end in (f"{word} PASSED", f"{word} FAILED"):
            assert end in README, f"{end} is not in README.md"
    verdict = (ROOT / "scripts" / "verdict.sh").read_text()
    assert '"$VERDICT PASSED"' in verdict and '"$VERDICT FAILED"' in verdict
