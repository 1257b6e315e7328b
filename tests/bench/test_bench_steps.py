"""scripts/bench.py step: a step of several ranks. Never how fast anything is."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_cases import bench_on_two_ranks
from benchmarking import tables
from benchmarking.steps import count_above
from benchmarking.targets import KINDS
from early import waits_for

import zerofp4
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

PARTS = ("step", "step_clipped", "reduce", "update", "publish")


def step(folder: Path) -> tuple[subprocess.CompletedProcess, Path]:
    return bench_on_two_ranks(folder, "step", "--scale", "256", "--repeats", "1", "--bucket-mb", "0.01")


@pytest.mark.bench
@pytest.mark.heavy
@waits_for(step)
def test_a_step_of_two_ranks(early):
    run, folder = early(step)
    assert run.returncode == 0, run.stderr
    result = json.loads((folder / "step_2_ranks_cpu.json").read_text())
    names = {row["name"] for row in result["rows"]}
    for part in (*PARTS, "exposed", "backward", "backward_reduce", "backward_step", "exposed_step_over_bf16"):
        assert f"{part}/2xcpu" in names
    rows = {row["name"]: row for row in result["rows"]}
    for part in ("step", "step_clipped", "publish", "update"):
        theirs = (
            "publish_bf16"
            if part == "publish"
            else part.replace("step", "step_bf16").replace("update", "update_bf16")
        )
        ours, bf16 = rows[f"{part}/2xcpu"], rows[f"{theirs}/2xcpu"]
        expected = ours["milliseconds"] / bf16["milliseconds"]
        assert rows[f"{part}_over_bf16/2xcpu"]["ratio"] == pytest.approx(expected)
    assert len(rows) == len(result["rows"]), "a name stands for one row"
    assert rows["link/2xcpu"]["gigabytes_per_second"] > 0
    assert rows["link/2xcpu"]["rule"].startswith("an all-to-all of gloo, 1 x ")
    for phase in ("scan", "reduce", "adamw", "adamw_reducing", "publish", "publish_alone", "gather"):
        assert rows[f"floor_{phase}/2xcpu"]["milliseconds"] > 0
    for part in (*PARTS, "gather"):
        assert rows[f"{part}_over_floor/2xcpu"]["ratio"] > 0
    zero = rows["step_zero_redundancy/2xcpu"]["milliseconds"]
    expected = pytest.approx(rows["step/2xcpu"]["milliseconds"] / zero)
    assert rows["step_over_zero_redundancy/2xcpu"]["ratio"] == expected
    assert {"reduce_zero_redundancy/2xcpu", "update_zero_redundancy/2xcpu"} <= names
    assert all(row["kind"] in KINDS and row["rule"] and row["target"] is None for row in result["rows"])
    assert run.stdout.count("step_2_ranks: copy ceiling") == 1  # rank 0 alone speaks
    tables.print_tables(result)


def test_what_a_peak_has_above_the_state():
    """And what it may have: 1% of the masters, two buckets."""
    weights = [zerofp4.quantize(torch.randn(64, 64).bfloat16(), columnwise=True) for _ in range(2)]
    parameters = [torch.nn.Parameter(weight) for weight in weights]
    optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, bucket_mb=0.5)
    gradients = [torch.ones(64, 64, dtype=torch.bfloat16) for _ in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    elements = 2 * 64 * 64
    held = sum(b.nbytes for weight in weights for _, b in weight.record.buffers())
    held += elements * (2 + 3 * 4)  # gradients, masters and moments
    counted = []
    timer = SimpleNamespace(
        places="1xcuda", session=SimpleNamespace(count=lambda *a, **k: counted.append((a, k)))
    )
    count_above(timer, "memory_above", [held / 1e6 + 7.0], optimizer, gradients)
    (((name, kind, above, _), target),) = counted
    assert (name, kind) == ("memory_above/1xcuda", "megabytes") and above == pytest.approx(7.0)
    assert target["target"] == pytest.approx(0.01 * 4 * elements / 1e6 + 2 * 0.5 * 2**20 / 1e6)
    optimizer._shards.make_gradients()
    count_above(timer, "memory_above", [(held + 4 * elements) / 1e6 + 7.0], optimizer, gradients)
    assert counted.pop()[0][2] == pytest.approx(7.0)
    count_above(timer, "memory_above", [], optimizer, gradients)  # on the CPU nobody counts
    assert len(counted) == 1
