"""`python -m benchmarks` as tests start it, in this process or on two ranks, and its result files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks.__main__ as bench
from benchmarks.rules import KINDS
from benchmarks.workloads import ROOT

STEP = ["step", "--scale", "256", "--repeats", "1", "--bucket-mb", "0.01"]
FSDP2 = ["fsdp2", "--scale", "64", "--repeats", "1", "--layers", "2", "--tokens", "4"]
HOSTS = ["hosts", "--scale", "64", "--repeats", "1", "--layers", "2", "--tokens", "4"]
PROGRAM = f"""
import sys
from benchmarks import __main__ as bench, session
session.COPY_BYTES["cpu"] = session.CPU_FLUSH_BYTES = 1 << 20
for arguments in ({STEP}, {FSDP2}, {HOSTS}):  # hosts last: it leaves each rank with a host of its own
    bench.main([*arguments, "--output", sys.argv[1]])
"""


def measured(folder: Path, benchmark: str, *options: str) -> dict:
    """The result of a run in this process; rows are by name."""
    assert bench.main([benchmark, *options, "--output", str(folder)]) == 0
    (path,) = folder.glob(f"{benchmark}_*.json")
    return read_result(path)


def read_result(path: Path) -> dict:
    """With rows by name. Checks what every result file has; on a CPU no row has a target."""
    result = json.loads(path.read_text())
    assert path.stem == f"{result['benchmark']}_{'cuda' if result['threads'] is None else 'cpu'}"
    assert result["device"] and result["date"] and "commit" in result
    assert {"zerofp4", "torch", "python", "build"} == result["versions"].keys()
    assert result["copy_gbps"] == max(result["copy_gbps_before"], result["copy_gbps_after"]) > 0
    for row in result["rows"]:
        assert row["kind"] in KINDS and row["rule"] and "target" in row
        assert row["target"] is None or result["threads"] is None
        if "ms" in row:
            assert row["gbps"] == pytest.approx(row["bytes"] / row["ms"] / 1e6)
            assert row["percent_of_copy"] == pytest.approx(100 * row["gbps"] / result["copy_gbps"])
            assert row["runs"] >= 1 and row["elements"] >= 1
        else:
            assert isinstance(row[row["kind"]], int | float)
    rows = {row["name"]: row for row in result["rows"]}
    assert len(rows) == len(result["rows"]), "a name stands for one row"
    return result | {"rows": rows}


def check_ratio(rows: dict[str, dict], name: str, over: str, under: str) -> None:
    """That a row has the ratio of what two others are about."""
    (above, below), ratio = ((row[row["kind"]] for row in (rows[over], rows[under])), rows[name])
    assert ratio[ratio["kind"]] == pytest.approx(above / below), name


def without_places(rows: dict[str, dict]) -> dict[str, dict]:
    """By names without the ranks, such as 2xcpu, that they end with."""
    return {name.rpartition("/")[0]: row for name, row in rows.items()}


def two_ranks(folder: Path) -> tuple[subprocess.CompletedProcess, Path]:
    """One start for all of them, with small copies. What came of it, and the folder that they wrote to."""
    (folder / "all_of_them.py").write_text(PROGRAM)
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), *sys.path])),
    }
    command = [sys.executable, "-m", "distributed.fork", "2", "-m", "all_of_them", str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True), folder
