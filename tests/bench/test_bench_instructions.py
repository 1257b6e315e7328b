"""scripts/bench.py instructions: what it calls, what ncu is asked, and how its report is read."""

from __future__ import annotations

import itertools
import json
import os
import stat
import sys
from pathlib import Path

import bench
import pytest
import torch
from benchmarking import instructions, launches, tables
from benchmarking.instructions import CountError, kernels_of, rows_of
from benchmarking.targets import TARGETS

H200 = "NVIDIA H200"
N = 8192 * 8192
CALLS = [
    {"name": "quantize_1d/8192", "elements": N, "bytes": 2.5625 * N},
    {"name": "local_step/8192", "elements": N, "bytes": 8.5 * N},
    {"name": "clone/32768x32768", "elements": N, "bytes": 2.0 * N},
    {"name": "dequantize_1d/8192", "elements": N, "bytes": 2.5625 * N},
]
REPORT = (Path(__file__).parents[1] / "data" / "ncu_raw.csv").read_text()
"""Of these calls, as ncu prints it: one launches no kernel of ours, and a figure of the last is missing."""


# The report


def test_a_row_has_counts_by_the_element():
    rows, remarks = rows_of(CALLS, kernels_of(REPORT), H200)
    quantize, step, dequantize = rows
    assert [row["name"] for row in rows] == [CALLS[i]["name"] for i in (0, 1, 3)]
    assert (quantize["instructions"], quantize["alu"], quantize["fma"]) == (33, 16, 12)
    assert (quantize["fmaheavy"], quantize["lsu"], quantize["xu"], quantize["other"]) == (7, 2, 1, 5)
    assert (quantize["issue_percent"], quantize["dram_percent"]) == (70.5, 61.5)
    assert step["instructions"] == 12 + 4 + 8192 * 32 / N and len(step["kernels"]) == 3
    assert step["issue_percent"] == pytest.approx((1 * 5 + 60 * 20 + 139 * 40) / 200), "means over the time"
    assert dequantize["xu"] is None and dequantize["instructions"] == 5
    assert remarks == [
        "not counted, or not for every kernel: smsp__inst_executed_pipe_xu.sum",
        "clone/32768x32768 launches no kernel of ours",
    ]
    seconds = N * 33 / (132 * 1.755e9 * 128)
    assert quantize["bounds"]["issue"]["ms"] == pytest.approx(seconds * 1e3)
    assert quantize["bounds"]["issue"]["gbps"] == pytest.approx(2.5625 * N / seconds / 1e9)


def test_launches_are_taken_in_their_order():
    preamble, header, units, *lines = REPORT.splitlines()
    shuffled = "\n".join([preamble, header, units, *reversed(lines)])
    assert kernels_of(shuffled) == kernels_of(REPORT)


def test_a_metric_that_is_not_in_the_report_is_named():
    report = REPORT.replace("smsp__inst_executed_pipe_alu.sum", "smsp__inst_executed_pipe_new.sum")
    rows, remarks = rows_of(CALLS, kernels_of(report), H200)
    assert rows[0]["alu"] is None and rows[0]["other"] is None and rows[0]["fma"] == 12
    assert "not counted, or not for every kernel: smsp__inst_executed_pipe_alu.sum" in remarks
    assert rows[0]["bounds"].keys() == {"issue", "FMA"}
    assert tables.instructions_table(rows).rows[0][1:5] == ("33", "-", "12", "-")


def test_percentages_of_several_kernels_need_their_time():
    report = REPORT.replace("gpu__time_duration.sum", "gpu__another_duration.sum")
    quantize, step, _ = rows_of(CALLS, kernels_of(report), H200)[0]
    assert step["issue_percent"] is None and quantize["issue_percent"] == 70.5


@pytest.mark.parametrize(
    ("calls", "report", "message"),
    [
        (CALLS[:3], REPORT, "3 calls were made, ncu saw 4"),
        (CALLS, REPORT.replace("spin_kernel", "another_kernel"), "4 calls were made, ncu saw 0"),
        (CALLS, "==WARNING== No kernels were profiled.", "has no header: ==WARNING== No kernels"),
        (CALLS, "", "has no header: it is empty"),
    ],
)
def test_a_report_of_something_else(calls, report, message):
    with pytest.raises(CountError, match=message):
        rows_of(calls, kernels_of(report), H200)


# ncu

FAKE = """#!{python}
import json, sys
from pathlib import Path

folder = Path({folder!r})
given = sys.argv[1:]
with open(folder / "given.json", "a") as log:
    log.write(json.dumps(given) + "\\n")
if "--version" in given:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0")
elif "--query-metrics" in given:
    print((folder / "metrics").read_text())
elif "--import" in given:
    print((folder / "report.csv").read_text())
elif {fails!r}:
    print("==ERROR== ERR_NVGPUCTRPERM - no permission")
    sys.exit({code})
else:
    Path(given[given.index("--export") + 1]).write_text("a report")
    Path(given[-1]).write_text((folder / "calls.json").read_text())
"""


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """Puts an ncu on PATH that answers with the report above, or fails; returns a function that makes it."""
    folder = tmp_path / "ncu"
    folder.mkdir()
    (folder / "report.csv").write_text(REPORT)
    (folder / "calls.json").write_text(json.dumps(CALLS))
    known = sorted({metric.partition(".")[0] for metric in instructions.METRICS})
    (folder / "metrics").write_text("Metric Name\n" + "\n".join(f"{name}  Counter  inst" for name in known))
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: H200)

    def make(fails: bool = False, code: int = 0) -> Path:
        script = folder / "ncu"
        script.write_text(FAKE.format(python=sys.executable, folder=str(folder), fails=fails, code=code))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        return folder

    return make


def test_from_the_command_line(fake_ncu, tmp_path, capsys):
    folder = fake_ncu()
    metrics = (folder / "metrics").read_text()
    (folder / "metrics").write_text(metrics.replace("smsp__inst_executed_pipe_lsu ", "another "))
    assert bench.main(["instructions", "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "instructions_cuda.json").read_text())
    assert result["benchmark"] == "instructions" and result["device"] == H200 and "commit" in result
    assert result["ncu"] == "Version 2025.3.1.0" and result["settings"] == {"size": 8192}
    assert [row["name"] for row in result["rows"]] == [CALLS[i]["name"] for i in (0, 1, 3)]
    *_, profiled, shown, _ = map(json.loads, (folder / "given.json").read_text().splitlines())
    assert profiled[profiled.index("--metrics") + 1].split(",") == [
        metric for metric in instructions.METRICS if "pipe_lsu" not in metric
    ]
    pairs = list(itertools.pairwise(profiled))
    assert ("--clock-control", "none") in pairs and ("--profile-from-start", "off") in pairs
    assert ("--kernel-name", "regex:zerofp4|spin_kernel") in pairs
    assert ("--kernel-name-base", "demangled") in pairs
    assert profiled[-4:-1] == [sys.executable, "-m", "benchmarking.launches"]
    assert shown[shown.index("--page") + 1] == "raw" and "--csv" in shown
    said = capsys.readouterr().out
    assert "quantize_1d/8192" in said and "clone/32768x32768 launches no kernel of ours" in said


@pytest.mark.parametrize(
    ("fails", "code", "message"),
    [
        (True, 1, "ncu failed: ==ERROR== ERR_NVGPUCTRPERM - no permission"),
        (True, 0, "ncu wrote no report: ==ERROR== ERR_NVGPUCTRPERM - no permission"),
    ],
)
def test_what_ncu_says_when_it_fails(fails, code, message, fake_ncu, tmp_path, capsys):
    fake_ncu(fails, code)
    assert bench.main(["instructions", "--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"scripts/bench.py instructions: {message}\n"
    assert not (tmp_path / "instructions_cuda.json").exists()


def test_a_gpu_without_such_counters(fake_ncu, tmp_path):
    (fake_ncu() / "metrics").write_text("Metric Name")
    with pytest.raises(CountError, match=r"--query-metrics does not list smsp__inst_executed$"):
        instructions.count(tmp_path)


def test_neither_ncu_nor_a_gpu(fake_ncu, tmp_path, monkeypatch, capsys):
    fake_ncu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["instructions"]) == 1
    assert "instructions: torch sees no GPU" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bench.main(["instructions"]) == 1
    assert "instructions: ncu of Nsight Compute is not on PATH" in capsys.readouterr().err


# The calls


@pytest.fixture
def events(monkeypatch):
    """What is asked of the profiler and of the GPU, in a list that a test may add to."""
    found: list[str] = []
    for module, name in (
        (torch.cuda.profiler, "start"),
        (torch.cuda.profiler, "stop"),
        (torch.cuda, "_sleep"),
    ):
        monkeypatch.setattr(module, name, lambda *_, name=name: found.append(name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return found


def test_every_row_with_a_target_is_called_after_its_mark(events):
    rows = launches.call_all(torch.device("cpu"), size=64, scale=200)
    assert events == ["start", "_sleep", "stop"] * len(rows)
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names)
    assert all(row["elements"] > 0 and row["bytes"] > 0 for row in rows)
    counted = {name.partition("/")[0] for name in names}
    timed = {name.partition("/")[0] for name, (kind, _) in TARGETS.items() if kind == "percent_of_copy"}
    assert timed <= counted
    assert {"begin", "amax", "scale", "cast", "swizzle", "quantize_grouped"} <= counted


def test_what_must_come_before_a_call_is_not_seen_by_ncu(events):
    calls = launches.Calls(torch.device("cpu"))
    moved = launches.Moved(8, "two of each", 4)
    calls.time("amax/64", lambda: events.append("run"), moved, before=lambda: events.append("before"))
    assert events == ["before", "run", "before", "start", "_sleep", "run", "stop"]
    assert calls.rows == [{"name": "amax/64", "elements": 4, "bytes": 8}]
