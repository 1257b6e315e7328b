"""How python -m benchmarks shows results: notes, tables and the summary."""

from __future__ import annotations

import importlib.util
import json

import pytest

import benchmarks.__main__ as bench
from benchmarks import hosts, output, pages, pictures
from benchmarks.session import RESULTS


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


def test_results_are_shown_by_device_then_in_the_order_of_all(results):
    names = [("host", None), ("adamw", None), ("local_step", 2), ("local_step", None), ("x", None)]
    for name, threads in names:
        suffix = "cuda" if threads is None else "cpu"
        content = {"benchmark": name, "device": "D", "threads": threads, "copy_gbps": 1.0, "rows": []}
        (results / f"{name}_{suffix}.json").write_text(json.dumps(content))
    names = [path.stem for path, _ in output.load(results)]
    assert names == ["local_step_cuda", "adamw_cuda", "host_cuda", "x_cuda", "local_step_cpu"]


def test_the_table_of_fine_tunings(results):
    """Nothing while there is no file. A model that a run has not trained has no loss."""
    assert output.finetune_section() == ""
    options = {"block": "1x16", "four_over_six": True, "teacher": False, "fsdp": True, "steps": 7}
    content = {"device": "D", "ranks": 2, "parameters": 538_000_000, "options": options}
    (results / "finetune").mkdir()
    for name, losses in (("a", {"bfloat16": 1.5}), ("b", {"bfloat16": 1.25, "fine-tuned": 1.0})):
        path = results / "finetune" / f"{name}.json"
        path.write_text(json.dumps(content | {"losses": losses, "ranks": 1 + (name == "a")}))
    what = "538.0M parameters, blocks of 1x16, four over six, fully_shard, 7 steps"
    assert output.finetune_section().splitlines() == [
        "| model and training | bfloat16 | fine-tuned |",
        "|---|---:|---:|",
        f"| {what}, 2 x D | 1.5000 |  |",
        f"| {what}, D | 1.2500 | 1.0000 |",
    ]


def test_the_tables_of_few_bits_between_hosts(results, monkeypatch):
    """Nothing while there is no file."""
    monkeypatch.setattr(pages, "RESULTS", results)
    assert pages.between_hosts_section() == ""

    def write(
        benchmark: str, settings: dict, threads: int | None, kind: str, found: dict[str, float]
    ) -> None:
        rows = [{"name": name, "kind": kind, kind: value} for name, value in found.items()]
        content = {
            "benchmark": benchmark,
            "device": "D",
            "threads": threads,
            "settings": settings,
            "rows": rows,
        }
        (results / f"{benchmark}.json").write_text(json.dumps(content))

    settings = {"hosts": 2, "layers": 3, "tokens": 1024, "ways": ["fully_shard", "reduce_scatter", "nvfp4"]}
    found = {"link/4xcuda": 2.5, "nvfp4/sent/4xcuda": 125.0, "reduce_scatter/sent/4xcuda": 250.0}
    for way, step in {"fully_shard": 400.0, "reduce_scatter": 200.0, "nvfp4": 100.0}.items():
        found |= {f"{way}/step/4xcuda": step, f"{way}/tokens/4xcuda": 4096e3 / step}
    write("hosts_4_ranks", settings, None, "ratio", found)
    errors = (("bf16", 5.4321e-6), ("mxfp8", 0.00141), ("nvfp4", 0.0222), ("nvfp4_plain", 0.0189))
    found = {f"{layer}/{format}": value for layer in ("tokens", "q") for format, value in errors}
    settings = {"preset": "3m", "steps": 7}
    write("gradients_1_ranks", settings, 2, "squared_error", found | {"loss": 5.0})
    assert pages.between_hosts_section().splitlines() == [
        "Relative squared errors of gradients. A Llama with 3M parameters in its layers has trained 7 steps "
        "in bf16 (D, 2 threads):",
        "",
        "| gradients of | bf16 | MXFP8 | NVFP4 | NVFP4, no transform |",
        "|---|---:|---:|---:|---:|",
        "| `q` | 5.4e-06 | 0.0014 | 0.022 | 0.019 |",
        "| embedding, exact by default | 5.4e-06 | 0.0014 | 0.022 | 0.019 |",
        "",
        "2 emulated hosts, 4 x D, 3 layers of Llama-3-8B's shape, 1,024 tokens per rank. A rank sends "
        "2.5 GB/s to the next host:",
        "",
        "| trained with | tokens per second | step | over `reduce_scatter` | sent by a rank |",
        "|---|---:|---:|---:|---:|",
        f"| {hosts.WAYS['fully_shard'].rule} | 10,240 | 400 ms | 2.00 | - |",
        '| NVFP4 weights, `reduction="reduce_scatter"` | 20,480 | 200 ms | 1.00 | 250 MB |',
        '| NVFP4 weights, `between_hosts="nvfp4"` | 40,960 | 100 ms | 0.50 | 125 MB |',
    ]


def test_the_section_of_the_docs_has_tables_of_times_and_of_counts(results):
    timed = {"name": "amax/64", "ms": 0.5, "gbps": 2000.0, "percent_of_copy": 50.0, "rule": "4n"}
    timed |= {"kind": "percent_of_copy", "target": 40}
    counted = {"name": "host_step/10", "kind": "host_us", "host_us": 61.0, "target": 60, "rule": "one step"}
    content = {"benchmark": "amax", "device": "D", "threads": None, "copy_gbps": 4000.0}
    (results / "amax_cuda.json").write_text(json.dumps(content | {"rows": [timed, counted]}))
    assert output.docs_section().splitlines() == [
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


def test_points_of_links_are_of_runs_that_have_both_sides(results, monkeypatch):
    monkeypatch.setattr(pictures, "RESULTS", results)

    def write(ranks: int, gbps: float, **tokens: float) -> None:
        rows = [{"name": f"link/{ranks}xcuda", "gigabytes_per_second": gbps}]
        for case, rate in tokens.items():
            rows.append({"name": f"{case}/tokens/{ranks}xcuda", "tokens_per_second": rate})
        (results / f"fsdp2_{ranks}_ranks_cuda.json").write_text(json.dumps({"rows": rows}))

    write(2, 254.0, reshard=12.0, reshard_bf16=10.0, reshard_float8=5.0)
    write(3, 25.0, reshard=15.0, reshard_bf16=10.0)  # without torchao
    write(4, 323.0, keep=8.0, keep_bf16=10.0)
    found = pictures.points_of_links()
    assert found == {"reshard": [(25.0, 1.5), (254.0, 1.2)], "reshard_float8": [(254.0, 0.5)]}
