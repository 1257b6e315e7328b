"""README.md is short, and what it says is so."""

import draw_memory
from cases.docs import ROOT

README = (ROOT / "README.md").read_text()
MOST_LINES = 120


def test_it_is_short():
    assert len(README.splitlines()) <= MOST_LINES


def test_the_picture_of_memory_and_the_bytes_beside_it():
    assert f"]({draw_memory.PICTURE.relative_to(ROOT)})" in README and draw_memory.PICTURE.exists()
    weights = draw_memory.weights()
    (one, bf16_of_one), (eight, bf16_of_eight) = (
        [sum(draw_memory.kept(weights[name], ranks).values()) for name in ("NVFP4, rows", "bf16")]
        for ranks in draw_memory.RANKS
    )
    alone = f"{one:.1f} bytes on one GPU in place of {bf16_of_one:.1f}"
    shared = f"{eight:.1f} on each of 8 GPUs in place of {bf16_of_eight:.1f}."
    assert f"{alone}, and {shared}" in README.replace("\n", " ")


def test_both_commands_end_as_it_says():
    for script, word in (("demo.sh", "DEMO"), ("test.sh", "TESTS")):
        text = (ROOT / "scripts" / script).read_text()
        assert f"\nverdict {word}\n" in text and text.endswith("passed\n"), script
        for end in (f"{word} PASSED", f"{word} FAILED"):
            assert end in README, f"{end} is not in README.md"
    verdict = (ROOT / "scripts" / "verdict.sh").read_text()
    assert '"$VERDICT PASSED"' in verdict and '"$VERDICT FAILED"' in verdict
