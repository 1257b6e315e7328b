"""`python -m benchmarks` on two ranks of the CPU, as tests of it start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import session
from benchmarks.workloads import ROOT

STEP = ["step", "--scale", "256", "--repeats", "1", "--bucket-mb", "0.01"]
FSDP2 = ["fsdp2", "--scale", "64", "--repeats", "1", "--layers", "2", "--tokens", "4"]
SMALL_COPY = 1 << 20  # bytes
PROGRAM = f"""
import sys
from benchmarks import __main__ as bench, session
session.COPY_BYTES["cpu"] = session.CPU_FLUSH_BYTES = {SMALL_COPY}
for arguments in ({STEP}, {FSDP2}):
    bench.main([*arguments, "--output", sys.argv[1]])
"""


def copy_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after a measurement, and to make caches cold."""
    monkeypatch.setattr(session, "CPU_FLUSH_BYTES", SMALL_COPY)
    monkeypatch.setitem(session.COPY_BYTES, "cpu", SMALL_COPY)


def two_ranks(folder: Path) -> tuple[subprocess.CompletedProcess, Path]:
    """One start for both, with small copies. What came of it, and the folder that they wrote to."""
    (folder / "both_of_them.py").write_text(PROGRAM)
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), *sys.path])),
    }
    command = [sys.executable, "-m", "distributed.fork", "2", "-m", "both_of_them", str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True), folder
