"""The generated part of docs/training.md, with one run of each arm and with several."""

import json
import math
from pathlib import Path

import pytest

from benchmarks import losses, pictures
from benchmarks.arms import ARMS
from benchmarks.losses import LOSSES, bits_per_weight, gap, t_of_95

DOCUMENTS = LOSSES["held-out documents"]


def run(
    arm: str, seed: int, loss: float, preset: str = "30m", tokens: int = 200_000_000, fork: int = 0
) -> dict:
    """A result file whose every loss is the same. fork: the step, of 100."""
    both = {"documents": loss, "packages": loss}
    shares = {"flipped": 0.01, "oscillating": 0.02}
    curve = [{"step": step, "train": loss, **both, **shares} for step in (50, 100)]
    found = {"arm": arm, "seed": seed, "preset": preset, "steps": 100, "tokens": tokens, "device": "cpu"}
    found |= {"parameters_of_blocks": 30_000_000, "tokens_per_parameter": tokens / 30e6, "epochs": 3.4}
    found |= {"curve": curve, "final": both}
    found |= {"fork": fork} if fork else {}
    if ARMS[arm].convert:
        found |= {"masters": both, "errors": {"blocks.0.q.weight": 0.09, "blocks.1.q.weight": 0.11}}
    return found


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Writes result files, which losses.py reads from then on."""
    monkeypatch.setattr(losses, "RESULTS", tmp_path)
    monkeypatch.setattr(losses, "results", losses.results.__wrapped__)

    def write(*runs: dict) -> Path:
        for each in runs:
            fork = f"-fork-{each['fork']}" if "fork" in each else ""
            folder = tmp_path / "fidelity" / f"{each['preset']}-{each['tokens']}{fork}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{each['arm']}-{each['seed']}.json").write_text(json.dumps(each))
        return tmp_path

    return write


def test_published_runs_of_a_fork_have_left_the_published_run_in_bf16():
    found = losses.results()
    forks = [arms for arms in found.values() if losses.fork(arms)]
    assert forks
    for arms in forks:
        for run in (run for arm, own in arms.items() if arm != "bf16" for run in own.values()):
            before = [row for row in run["curve"] if row["step"] <= run["fork"]]
            assert before and before == arms["bf16"][run["seed"]]["curve"][: len(before)]


def test_a_gap_and_its_interval():
    """Seeds are 2% apart in every arm. Gaps of -1% and 1% have a standard deviation of 1.41 points."""
    arms = {
        "bf16": {0: run("bf16", 0, 1.98), 1: run("bf16", 1, 2.02)},
        "w16x16": {0: run("w16x16", 0, 1.98 * 0.99), 1: run("w16x16", 1, 2.02 * 1.01)},
        "full": {0: run("full", 0, 1.98 * 2)},
    }
    deviation = math.sqrt(2)
    assert gap(arms, "w16x16", DOCUMENTS) == pytest.approx((0, 12.706 * deviation / math.sqrt(2)), rel=1e-4)
    assert gap(arms, "full", DOCUMENTS) == pytest.approx((100, 12.706 * deviation), rel=1e-4)
    assert gap(arms, "full", DOCUMENTS, "w16x16")[0] == pytest.approx(100 * (2 / 0.99 - 1))
    one = {arm: {0: own[0]} for arm, own in arms.items()}
    assert gap(one, "full", DOCUMENTS) == (pytest.approx(100), None)


def test_factors_of_students_distribution():
    known = {1: 12.706, 11: 2.201, 12: 2.179, 20: 2.086, 60: 2.000}
    assert {freedom: t_of_95(freedom) for freedom in known} == pytest.approx(known, abs=2e-3)


def test_bits_per_weight():
    assert bits_per_weight("compact") == 16
    assert bits_per_weight("w16x16") == 4 + 8 / 256
    assert bits_per_weight("ends-w1x16-46") == pytest.approx((30 * 4.5 + 2 * 16) / 32)


def test_the_page_with_one_run_of_each_arm(published):
    published(run("bf16", 0, 2.0), run("w16x16", 0, 2.01), run("update", 0, 2.0), run("full", 1, 2.03))
    page = losses.section()
    assert "| weights 16x16 | 1 | +0.50% | +0.50% | +0.50% |" in page and "±" not in page
    assert "No arm has two seeds yet" in page and "What to use when" not in page
    assert "| weights 16x16 | 10.0% | 11.0% | blocks.1.q | 1% | 2% |  |" in page
    assert "full recipe" not in page, "it has no run of bf16 with its seed"
    assert "| all three products, NVIDIA's recipe | 1.60% | 1.78% | 1.88% |\n" in page
    assert "over those of another arm" not in page


def test_the_page_shows_the_evidence_with_the_most_tokens(published, tmp_path, monkeypatch):
    """And every table has its own spread."""
    pytest.importorskip("matplotlib")
    short = [run(arm, seed, 2.0 + 0.01 * seed) for arm in ("bf16", "w16x16") for seed in (0, 1)]
    short += [run("w1x16-46", 0, 2.0), run("w1x16-46", 1, 2.01 * 1.01)]
    lasting = [("bf16", 0, 1.0), ("bf16", 1, 1.0), ("w16x16", 0, 1.02), ("w16x16", 1, 1.02)]
    long = [run(*each, tokens=750_000_000) for each in lasting]
    alone = run("w16x16", 0, 1.0, preset="100m")
    published(*short, *long, alone)
    page = losses.section()
    assert "100M" not in page.replace("| 100M |", ""), "there is no run of bf16"
    assert page.index("## 30M, 200M tokens") < page.index("## 30M, 750M tokens")
    uses = page.split("## Curves")[0]
    assert "| 4.03 | +2.00% ± 0.00 | bf16, FP32 masters | 2 | 25.0 | none |" in uses
    assert "| 4.50 | +0.50% ± 1.75 | bf16, FP32 masters | 2 | 6.7 | none |" in uses
    assert "| weights 1x16, four over six | weights 16x16 | +0.50% ± 1.75 |" in page
    monkeypatch.setattr(losses, "PICTURE", tmp_path / "losses.png")
    assert pictures.draw_losses().read_bytes().startswith(b"\x89PNG")


def test_arms_that_leave_a_run_in_bf16_are_beside_it(published):
    """And of two intervals at one size the smaller one counts."""
    whole = [("bf16", 0, 2.0), ("bf16", 1, 2.1), ("w16x16", 0, 2.0), ("w16x16", 1, 2.2)]
    forked = [("w16x16", 0, 2.01), ("w16x16", 1, 2.1105), ("w1x16-46", 0, 2.0), ("full", 2, 2.0)]
    published(*(run(*each) for each in whole), *(run(*each, fork=20) for each in forked))
    page = losses.section()
    assert page.index("## 30M, 200M tokens\n") < page.index("## 30M, 200M tokens, the first 20% in bf16\n")
    assert "| weights 16x16 | 2 | +0.50% ± 0.00 |" in page and "full recipe" not in page
    assert "| +0.50% ± 0.00 | bf16, FP32 masters | 2 | 6.7 | 20% |" in page
