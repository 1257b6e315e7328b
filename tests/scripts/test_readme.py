"""README.md is short, and what it says is so."""

import re

from cases.docs import ROOT, blocks

README = (ROOT / "README.md").read_text()
MOST_LINES = 150


def test_it_is_short_and_has_no_tables():
    assert len(README.splitlines()) <= MOST_LINES
    assert not re.search(r"^\|", README, re.MULTILINE), "tables belong in docs/"


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
