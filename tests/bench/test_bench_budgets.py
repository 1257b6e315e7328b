"""The instruction budgets of scripts/bench.py: bounds by what a GPU executes in a cycle, and their words."""

from __future__ import annotations

import json

import pytest
from benchmarking import budgets, session, tables

H200 = "NVIDIA H200"
N = 8192 * 8192


def test_bounds_are_those_of_schedulers_and_units():
    cycles = 132 * 1.755e9
    found = budgets.bounds({"instructions": 33.0, "alu": 24.0, "fma": 12.0}, 1e9, H200)
    assert [bound.limit for bound in found] == ["ALU", "issue", "FMA"], "the tightest first"
    assert [bound.seconds for bound in found] == pytest.approx(
        [1e9 * 24 / 64 / cycles, 1e9 * 33 / 128 / cycles, 1e9 * 12 / 128 / cycles]
    )
    assert budgets.bounds({"instructions": 33.0, "alu": None}, 1e9, H200) == [found[1]]
    assert budgets.bounds({"instructions": 33.0}, 1e9, "another GPU") == []


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (
            {"instructions": 33.0, "alu": 16.0, "fma": 12.04},
            "33 instructions (16 ALU, 12 FMA): at most 57% by issue",
        ),
        (
            {"instructions": 33.0, "alu": 20.0, "fma": 4.0},
            "33 instructions (20 ALU, 4 FMA): at most 47% by ALU",
        ),
        ({"instructions": 33.0, "alu": None, "fma": 12.0}, "33 instructions (12 FMA): at most 57% by issue"),
        ({"instructions": 0.333, "alu": None}, "0.333 instructions: at most 5612% by issue"),
        ({"instructions": None, "alu": 20.0}, "instructions: 20 ALU: at most 47% by ALU"),
        ({"instructions": None}, None),
        ({"instructions": 0.0}, None),
    ],
)
def test_a_budget_in_words(counts, words):
    row = {"name": "quantize_1d/8192", "elements": N, "bytes": 2.5625 * N}
    assert budgets.budget(row, counts, H200, copy_gbps=4000.0 * 1.0165) == words
    assert budgets.budget({"bytes": 1.0}, counts, H200, 4000.0) is None, (
        "a row that does not say its elements"
    )


@pytest.fixture
def results(tmp_path, monkeypatch):
    """benchmarks/results in a folder of its own, with instructions that were counted."""
    folder = tmp_path / "results"
    folder.mkdir()
    counts = {"name": "quantize_1d/8192", "instructions": 33.0, "alu": 16.0, "fma": 12.0}
    rows = [counts, counts | {"name": "quantize_1d/65536x512", "instructions": 99.0}]
    counted = {"benchmark": "instructions", "device": H200, "commit": "0123456789", "rows": rows}
    (folder / tables.INSTRUCTIONS).write_text(json.dumps(counted))
    for module in (tables, session):
        monkeypatch.setattr(module, "ROOT", tmp_path)
        monkeypatch.setattr(module, "RESULTS", folder)
    return folder


def result_of(device: str = H200, commit: str = "abcdef", **row) -> dict:
    timed = {"name": "quantize_1d/16384", "ms": 0.2, "gbps": 3000.0, "percent_of_copy": 75.0, "rule": "2.5n"}
    timed |= {"kind": "percent_of_copy", "target": 70, "bytes": 2.5625 * 4 * N, "elements": 4 * N}
    content = {"benchmark": "quantize", "device": device, "threads": None, "commit": commit}
    return content | {"copy_gbps": 4066.0, "rows": [timed | row]}


def test_tables_show_the_budget_beside_the_target(results):
    (results / "quantize_cuda.json").write_text(json.dumps(result_of()))
    assert [path.name for path, _ in tables.load(results)] == ["quantize_cuda.json"]
    head, _, _, _, line = tables.docs_section().splitlines()
    assert head.endswith("copy ceiling 4,066 GB/s; instructions counted at commit 0123456.")
    assert "| 33 instructions (16 ALU, 12 FMA): at most 57% by issue; at least 70%: met |" in line


def test_a_commit_that_is_that_of_the_counts_is_not_named(results):
    shown = tables.markdown(results / "quantize_cuda.json", result_of(commit="0123456789"))
    assert "at most 57% by issue" in shown and "commit" not in shown


@pytest.mark.parametrize(
    "result",
    [
        result_of(device="another GPU"),
        result_of(name="transpose/16384"),
        result_of(elements=None),
        result_of(name="torchao_quantize_1d/16384"),
    ],
)
def test_rows_without_a_budget(result, results):
    shown = tables.markdown(results / "quantize_cuda.json", result)
    assert "| at least 70%: met |" in shown and "instructions" not in shown


def test_tables_without_counts(results):
    (results / tables.INSTRUCTIONS).unlink()
    assert "instructions" not in tables.markdown(results / "quantize_cuda.json", result_of())
    assert tables.with_budgets(result_of()) == result_of()
