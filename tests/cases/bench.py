"""scripts/bench.py, as tests of it start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from zerofp4_bench.session import ROOT


def bench_on_two_ranks(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess, Path]:
    """On the CPU. What came of it, and the folder that it wrote to."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [*launcher, "scripts/bench.py", *arguments, "--output", str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True), folder
