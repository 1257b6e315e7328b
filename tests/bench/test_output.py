"""How scripts/bench.py shows results: notes, tables, the summary, and what charts leave out."""

from __future__ import annotations

import json
import sys

import bench
import pytest
from zerofp4_bench import output
from zerofp4_bench.output import MOST_ROWS, selected
from zerofp4_bench.session import RESULTS, Clock


@pytest.fixture
def results(tmp_path, monkeypatch):
    """benchmarks/results in a folder of its own."""
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setattr(output, "ROOT", tmp_path)
    monkeypatch.setattr(output, "RESULTS", folder)
    return folder


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"target": 92, "kind": "percent_of_copy", "percent_of_copy": 92.0}, "at least 92%: met"),
        ({"target": 92, "kind": "percent_of_copy", "percent_of_copy": 91.9}, "at least 92%: missed"),
        ({"target": 1.08, "kind": "speedup", "speedup": 1.1}, "at least 1.08x: 1.10x, met"),
        ({"target": 1.08, "kind": "speedup"}, "at least 1.08x: not compared"),
        ({"target": 4, "kind": "launches", "launches": 5}, "at most 4: missed"),
        ({"target": None, "kind": "percent_of_copy", "times_ours": 3.4}, "3.40 times ours"),
        ({"target": 1.03, "kind": "ratio", "ratio": 1.031}, "at most 1.03x: missed"),
        ({"target": None, "kind": "percent_of_copy"}, ""),
    ],
)
def test_notes(row, expected):
    assert output.note(row) == expected


def test_a_table_on_the_terminal_and_no_chart_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(Clock, "copy_gbps", lambda self: 10.0)
    small = ["--device", "cpu", "--size", "64", "--repeats", "1"]
    bench.main(["transpose", *small, "--workload", "square", "--output", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "operation ms % of copy target" in [" ".join(line.split()) for line in shown.splitlines()]
    assert "no chart: matplotlib is not installed (the extra `train` has it)" in shown
    assert not list(tmp_path.glob("*.png"))


def test_results_are_shown_by_device_then_in_the_order_of_all(results):
    names = [("host", None), ("adamw", None), ("local_step", 2), ("local_step", None), ("x", None)]
    for name, threads in names:
        suffix = "cuda" if threads is None else "cpu"
        content = {"benchmark": name, "device": "D", "threads": threads, "copy_gbps": 1.0, "rows": []}
        (results / f"{name}_{suffix}.json").write_text(json.dumps(content))
    names = [path.stem for path, _ in output.load(results)]
    assert names == ["local_step_cuda", "adamw_cuda", "host_cuda", "x_cuda", "local_step_cpu"]


def test_the_section_of_the_docs_has_tables_of_times_and_of_counts(results):
    timed = {"name": "amax/64", "ms": 0.5, "gbps": 2000.0, "percent_of_copy": 50.0, "rule": "4n"}
    timed |= {"kind": "percent_of_copy", "target": 40}
    counted = {"name": "host_step/10", "kind": "host_us", "host_us": 61.0, "target": 60, "rule": "one step"}
    content = {"benchmark": "amax", "device": "D", "threads": None, "copy_gbps": 4000.0}
    (results / "amax_cuda.json").write_text(json.dumps(content | {"rows": [timed, counted]}))
    (results / "percent_of_copy_cuda.png").write_bytes(b"")
    assert output.docs_section().splitlines() == [
        "![Percent of the copy ceiling on D](../results/percent_of_copy_cuda.png)",
        "",
        "D, `results/amax_cuda.json`: copy ceiling 4,000 GB/s.",
        "",
        "| operation | ms | % of copy | target |",
        "|---|---:|---:|---|",
        "| amax/64 | 0.500 | 50.0 | at least 40%: met |",
        "",
        "| figure | value | target |",
        "|---|---:|---|",
        "| host_step/10 | 61.0 us | at most 60 us: missed |",
    ]


def row_named(name: str, **more) -> dict:
    timed = {"ms": 1.0, "gbps": 1.0, "percent_of_copy": 1.0, "rule": "n", "kind": "percent_of_copy"}
    return {"name": name, "target": None, **timed, **more}


def test_targets_and_peers_are_shown_first():
    plain = [row_named(f"row/{i}") for i in range(MOST_ROWS)]
    assert selected(plain) == plain
    target, peer = row_named("quantize_1d/16384", target=75), row_named("peer/16384", times_ours=2.0)
    rows = [*plain, target, peer]
    assert selected(rows) == [*plain[:-2], target, peer]
    ratio = {"name": "step_over_bf16/2xcuda", "target": None, "kind": "ratio", "ratio": 0.9, "rule": "n"}
    assert selected([*plain, ratio]) == [*plain[:-1], ratio]
    many = [row_named(f"quantize/{i}", target=1) for i in range(MOST_ROWS + 2)]
    assert selected([*plain, *many]) == many


def test_the_summary_has_times_and_memory_over_those_of_others():
    results = [result for _, result in output.load(RESULTS)]
    rows = {what: rest for what, *rest in output.headlines(results)}
    step, memory = rows["Step, 2 GPUs"], rows["Peak memory of a GPU, 2 GPUs"]
    files = {result["benchmark"]: result["rows"] for result in results if result["threads"] is None}
    found = {row["name"]: row for row in files["step_2_ranks"]}
    ratio = found["peer_step_over_bf16/2xcuda"]["ratio"]
    took = f"{found['peer_step/2xcuda']['milliseconds']:.1f} ms"
    assert step == [took, f"{ratio:.2f} of ZeRO-1 in bf16", pytest.approx(ratio)]
    assert memory[0] == f"{found['peer_memory/2xcuda']['megabytes'] / 1e3:.1f} GB" and memory[2] < 1
    assert sum(what.startswith("Predicted: ") for what in rows) == len(output.PREDICTED)
    assert output.headlines(results[1:]) == [], "a row is missing"
