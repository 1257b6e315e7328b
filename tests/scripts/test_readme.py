"""README.md is short, and what it says is so."""

import pytest
from cases.docs import ROOT

from benchmarks import pages, pictures

README = (ROOT / "README.md").read_text()
MOST_LINES = 120


def test_it_is_short():
    assert len(README.splitlines()) <= MOST_LINES


def test_the_picture_of_memory_and_the_bytes_beside_it():
    assert f"]({pictures.MEMORY.relative_to(ROOT)})" in README and pictures.MEMORY.exists()
    pytest.importorskip("transformers")
    said = " ".join(README.replace("(docs/optimizer.md#compact-state)", "").split())
    alone, shared = (
        [f"{sum(pictures.kept(way, ranks).values()):.1f}" for way in pictures.NAMES]
        for ranks in pictures.RANKS
    )
    plain, full, compact, early = alone
    assert f"{full} bytes a parameter on one GPU in place of {plain}." in said
    assert f"They take {compact} with [compact state]" in said
    assert f"[compact state], and {early} if backward passes also update." in said
    plain, full, compact, _ = shared
    assert f"8 GPUs it is {full}, or {compact} with compact state, in place of {plain}." in said


def test_the_bars_of_one_gpu_end_at_the_peak_of_the_run():
    pytest.importorskip("transformers")
    run, bars = pages.runs()[0], pictures.bars(1)
    early = list(bars.values())[-1]
    assert sum(early.values()) == pytest.approx(run.peak / run.parameters)
    assert set(early) == set(pictures.COLORS) and min(early.values()) > 0
    flash = [sum(parts.values()) - pages.beyond(run) for name, parts in bars.items() if "its paper" in name]
    assert flash == pytest.approx(list(pages.FLASH.values()))


def test_both_commands_end_as_it_says():
    for script, word in (("demo.sh", "DEMO"), ("test.sh", "TESTS")):
        text = (ROOT / "scripts" / script).read_text()
        assert f"\nverdict {word}\n" in text and text.endswith("passed\n"), script
        for end in (f"{word} PASSED", f"{word} FAILED"):
            assert end in README, f"{end} is not in README.md"
    verdict = (ROOT / "scripts" / "verdict.sh").read_text()
    assert '"$VERDICT PASSED"' in verdict and '"$VERDICT FAILED"' in verdict
