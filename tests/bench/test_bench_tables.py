"""How scripts/bench.py shows results: notes, tables, what docs/performance.md leaves out."""

from __future__ import annotations

import json
import sys

import bench
import pytest
from benchmarking import chart, session, tables
from benchmarking.clock import Clock
from benchmarking.selection import MOST_ROWS, selected


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
        ({"target": None, "kind": "percent_of_copy", "budget": "so many"}, "so many"),
        (
            {"target": 55, "kind": "percent_of_copy", "percent_of_copy": 56.0, "budget": "so many"},
            "so many; at least 55%: met",
        ),
    ],
)
def test_notes(row, expected):
    assert tables.note(row) == expected


def test_tables_without_rich_and_chart_without_matplotlib(tmp_path, monkeypatch, capsys):
    for module in ("rich.console", "matplotlib"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(Clock, "copy_gbps", lambda self: 10.0)
    small = ["--device", "cpu", "--size", "64", "--repeats", "1"]
    bench.main(["transpose", *small, "--workload", "square", "--output", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "\noperation        ms  GB/s  % of copy  note\n" in shown
    assert "no chart: matplotlib is not installed (the extra `train` has it)" in shown
    assert not list(tmp_path.glob("*.png"))


def test_results_are_shown_by_device_then_in_the_order_of_all(tmp_path):
    for name, threads in (
        ("host", None),
        ("adamw", None),
        ("local_step", 2),
        ("local_step", None),
        ("x", None),
    ):
        suffix = "cuda" if threads is None else "cpu"
        content = {"benchmark": name, "device": "D", "threads": threads, "copy_gbps": 1.0, "rows": []}
        (tmp_path / f"{name}_{suffix}.json").write_text(json.dumps(content))
    names = [path.stem for path, _ in tables.load(tmp_path)]
    assert names == ["local_step_cuda", "adamw_cuda", "host_cuda", "x_cuda", "local_step_cpu"]


def test_bars_of_one_workload_stand_together():
    rows = [{"name": name} for name in ("amax/a", "cast/a", "amax/b/c", "cast/b/c")]
    assert chart.places(rows) == [0, 1, 2 + chart.GAP, 3 + chart.GAP]
    assert chart.places([{"name": "transpose/a"}, {"name": "transpose/b"}]) == [0, 1]


def test_the_section_of_the_docs_has_tables_of_times_and_of_counts(tmp_path, monkeypatch):
    timed = {"name": "amax/64", "ms": 0.5, "gbps": 2000.0, "percent_of_copy": 50.0, "rule": "4n"}
    timed |= {"kind": "percent_of_copy", "target": 40}
    counted = {"name": "host_step/10", "kind": "host_us", "host_us": 61.0, "target": 60, "rule": "one step"}
    content = {"benchmark": "amax", "device": "D", "threads": None, "copy_gbps": 4000.0}
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "amax_cuda.json").write_text(json.dumps(content | {"rows": [timed, counted]}))
    (folder / "percent_of_copy_cuda.png").write_bytes(b"")
    for module in (tables, session):
        monkeypatch.setattr(module, "ROOT", tmp_path)
        monkeypatch.setattr(module, "RESULTS", folder)
    assert tables.docs_section().splitlines() == [
        "![Percent of the copy ceiling on D](../results/percent_of_copy_cuda.png)",
        "",
        "D, `results/amax_cuda.json`: copy ceiling 4,000 GB/s.",
        "",
        "| operation | ms | GB/s | % of copy | note | bytes counted |",
        "|---|---:|---:|---:|---|---|",
        "| amax/64 | 0.500 | 2,000 | 50.0 | at least 40%: met | 4n |",
        "",
        "| figure | value | note | what it is |",
        "|---|---:|---|---|",
        "| host_step/10 | 61.0 us | at most 60 us: missed | one step |",
    ]


def test_the_picture_of_a_comparison_is_drawn_and_shown(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    rows = [
        {
            "name": "keep/step/2xcuda",
            "target": None,
            "kind": "milliseconds",
            "milliseconds": 2.0,
            "rule": "n",
        },
        {"name": "keep/peak_over_bf16/2xcuda", "target": 0.95, "kind": "ratio", "ratio": 0.9, "rule": "n"},
        {
            "name": "keep/tokens_over_bf16/2xcuda",
            "target": 1.0,
            "kind": "speedup",
            "speedup": 1.2,
            "rule": "n",
        },
    ]
    content = {
        "benchmark": "fsdp2_2_ranks",
        "device": "D",
        "threads": None,
        "copy_gbps": 4000.0,
        "rows": rows,
    }
    for benchmark in ("fsdp2_2_ranks", "megatron_2_ranks"):
        found = json.dumps(content | {"benchmark": benchmark})
        (tmp_path / f"{benchmark}_cuda.json").write_text(found)
    for module in (tables, session):
        monkeypatch.setattr(module, "ROOT", tmp_path.parent)
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    bench.draw(tmp_path)
    assert [path.name for path in tmp_path.glob("*.png")] == ["fsdp2_2_ranks_cuda.png"]
    lines = tables.docs_section().splitlines()
    assert lines[0] == f"![fsdp2_2_ranks: ours over bf16](../{tmp_path.name}/fsdp2_2_ranks_cuda.png)"
    assert "| keep/peak_over_bf16/2xcuda | 0.900x | at most 0.95x: met | n |" in lines
    assert "| keep/tokens_over_bf16/2xcuda | 1.20x | at least 1x: 1.20x, met | n |" in lines


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


def test_the_page_says_how_many_rows_it_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    rows = [row_named(f"row/{i}") for i in range(MOST_ROWS + 3)]
    result = {"benchmark": "x", "device": "D", "threads": None, "copy_gbps": 10.0, "rows": rows}
    shown = tables.markdown(tmp_path / "x_cuda.json", result).splitlines()
    assert shown[0] == "D, `x_cuda.json`: copy ceiling 10 GB/s; 3 more rows are in the file."
    assert len(shown) == 2 + 2 + MOST_ROWS
