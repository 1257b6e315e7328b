"""The tests of CPU kernels again, with each instruction set other than the best that this processor has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import zerofp4

ROOMS = ("ops", "tensors")  # whose tests are marked cpu_kernel
CPU = zerofp4.build_info()["cpu"]


@pytest.mark.heavy
@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_instruction_set(isa):
    if isa == CPU["running"]:
        pytest.skip("all tests of this run are with it")
    folders = [str(Path(__file__).with_name(room)) for room in ROOMS]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *folders, "-m", "cpu_kernel", "-k", "cpu"],
        env=os.environ | {"ZEROFP4_CPU_ISA": isa},
        capture_output=True,
        text=True,
    )
    if "this build runs" in run.stdout + run.stderr:
        pytest.skip(f"this processor or build has no {isa}")
    assert run.returncode == 0, run.stdout + run.stderr
