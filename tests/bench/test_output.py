"""How python -m benchmarks shows results: notes, tables and the summary."""

from __future__ import annotations

import importlib.util
import json

import pytest

import benchmarks.__main__ as bench
from benchmarks import output, pages, pictures
from benchmarks.session import RESULTS


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


def test_a_table_on_the_terminal(tmp_path, monkeypatch, capsys):
    small = ["--device", "cpu", "--size", "64", "--repeats", "1"]
    bench.main(["transpose", *small, "--workload", "square", "--output", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "operation ms % of copy target" in [" ".join(line.split()) for line in shown.splitlines()]


@pytest.mark.parametrize("has_matplotlib", [False, True])
def test_docs_are_written_and_charts_drawn_where_that_can_be(has_matplotlib, monkeypatch, capsys):
    found = [] if has_matplotlib else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(pages, "write_docs", lambda: ["page"])
    for name in ("summary", "memory", "links", "losses"):
        monkeypatch.setattr(pictures, f"draw_{name}", lambda name=name: name)
    bench.main(["docs"])
    lines = capsys.readouterr().out.splitlines()
    charts = ["wrote summary", "wrote memory", "wrote links", "wrote losses"]
    missing = ["no charts: matplotlib is not installed (the extra `train` has it)"]
    assert lines == ["wrote page", *charts] if has_matplotlib else [*missing, "wrote page"]


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
    assert output.headlines(results[1:]) == [], "a row is missing"


def test_points_of_links_are_of_runs_that_have_both_sides(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "RESULTS", tmp_path)

    def write(ranks: int, gbps: float, **tokens: float) -> None:
        rows = [{"name": f"link/{ranks}xcuda", "gigabytes_per_second": gbps}]
        for case, rate in tokens.items():
            rows.append({"name": f"{case}/tokens/{ranks}xcuda", "tokens_per_second": rate})
        (tmp_path / f"fsdp2_{ranks}_ranks_cuda.json").write_text(json.dumps({"rows": rows}))

    write(2, 254.0, reshard=12.0, reshard_bf16=10.0, reshard_float8=5.0)
    write(3, 25.0, reshard=15.0, reshard_bf16=10.0)  # without torchao
    write(4, 323.0, keep=8.0, keep_bf16=10.0)
    found = pictures.points_of_links()
    assert found == {"reshard": [(25.0, 1.5), (254.0, 1.2)], "reshard_float8": [(254.0, 0.5)]}
