"""The tests of CPU kernels again, with each instruction set other than the best that this processor has."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from early import waits_for

import zerofp4

ROOMS = ("ops", "optim", "tensors")  # whose tests are marked cpu_kernel
SETS = ("baseline", "avx2", "avx512")
RUNNING = zerofp4.build_info()["cpu"]["running"]

# Not those on a GPU: "cpu" would be a word of theirs too, for their mark.
SELECTED = ["-m", "cpu_kernel", "-k", "not cuda"]


def run_with(isa: str, _: Path) -> subprocess.CompletedProcess:
    folders = [str(Path(__file__).with_name(room)) for room in ROOMS]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *folders, *SELECTED],
        env=os.environ | {"ZEROFP4_CPU_ISA": isa, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )


RUNS = {isa: functools.partial(run_with, isa) for isa in SETS if isa != RUNNING}


@pytest.mark.nightly
@pytest.mark.parametrize("isa", [pytest.param(isa, marks=waits_for(work)) for isa, work in RUNS.items()])
def test_every_other_instruction_set(early, isa):
    run = early(RUNS[isa])
    if "this build runs" in run.stdout + run.stderr:
        pytest.skip(f"this processor or build has no {isa}")
    assert run.returncode == 0, run.stdout + run.stderr
