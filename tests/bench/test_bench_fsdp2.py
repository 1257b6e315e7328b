"""scripts/bench.py fsdp2: training steps of several ranks. Never how fast anything is."""

import json
import os
import subprocess
import sys

import pytest
from benchmarking.session import ROOT
from benchmarking.targets import KINDS

SIZES = ["--scale", "64", "--repeats", "1", "--layers", "2", "--tokens", "4"]


@pytest.mark.bench
@pytest.mark.heavy
def test_both_ways_to_gather(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    arguments = [*launcher, "scripts/bench.py", "fsdp2", *SIZES, "--output", str(tmp_path)]
    run = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "fsdp2_2_ranks_cpu.json").read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert result["settings"] == {"scale": 64, "repeats": 1, "layers": 2, "tokens": 4}
    for keep, gathers in (("reshard", 2), ("keep", 1)):  # in the forward and in the backward pass
        ours, theirs = rows[f"{keep}/step/2xcpu"], rows[f"{keep}_bf16/step/2xcpu"]
        expected = ours["milliseconds"] / theirs["milliseconds"]
        assert rows[f"{keep}/step_over_bf16/2xcpu"]["ratio"] == pytest.approx(expected)
        assert rows[f"{keep}/resident/2xcpu"]["bytes_per_parameter"] == pytest.approx(0.5 + 1 / 256, abs=1e-3)
        converted, norms = 2 * (4 * 64 * 64 + 3 * 64 * 224), 2 * 2 * 64
        for name, bits in ((keep, 4), (f"{keep}_bf16", 16)):
            moved = rows[f"{name}/gathered/2xcpu"]["megabytes"] * 1e6
            assert moved == pytest.approx(gathers * (converted * bits / 8 + norms * 2)), name
    assert all(row["kind"] in KINDS and row["rule"] and row["target"] is None for row in result["rows"])
    assert (tmp_path / "fsdp2_2_ranks.png").exists()
