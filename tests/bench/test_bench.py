"""python -m benchmarks: what it measures, how it counts and what it writes. Never how fast anything is."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from cases.bench import copy_little
from early import waits_for
from helpers import assert_bytes_equal, needs_gpu

import benchmarks.__main__ as bench
from benchmarks import checkpoints, output, peers, session
from benchmarks.operations import OPERATIONS, SHOWN
from benchmarks.rules import KINDS, Moved
from benchmarks.session import Clock, Session
from benchmarks.workloads import ROOT, Tensors, chosen, llama, square

CPU = torch.device("cpu")
SMALL = ["--device", "cpu", "--size", "64", "--scale", "200", "--repeats", "1", "--threads", "1"]


@pytest.fixture
def quick_copies(monkeypatch):
    """Copy ceilings of 10 GB/s before and 20 GB/s after, at no cost, and caches that are soon cold."""
    monkeypatch.setattr(session, "CPU_FLUSH_BYTES", 1 << 20)
    ceilings = iter([10.0, 20.0] * len(OPERATIONS))
    monkeypatch.setattr(Clock, "copy_gbps", lambda self: next(ceilings))


# Measuring


def check_result(result: dict, benchmark: str) -> dict[str, dict]:
    """Check what every result file has; returns its rows by name."""
    assert result["benchmark"] == benchmark
    assert result["device"] and result["date"] and "commit" in result
    assert {"zerofp4", "torch", "python", "build"} == result["versions"].keys()
    assert result["copy_gbps"] == max(result["copy_gbps_before"], result["copy_gbps_after"]) > 0
    for row in result["rows"]:
        assert row["kind"] in KINDS and row["rule"] and "target" in row
        if "ms" in row:
            assert row["gbps"] == pytest.approx(row["bytes"] / row["ms"] / 1e6)
            assert row["percent_of_copy"] == pytest.approx(100 * row["gbps"] / result["copy_gbps"])
            assert row["runs"] >= 1 and row["elements"] >= 1
        else:
            assert isinstance(row[row["kind"]], int | float)
    rows = {row["name"]: row for row in result["rows"]}
    assert len(rows) == len(result["rows"]), "a name stands for one row"
    return rows


@pytest.mark.heavy
def test_local_step(tmp_path, monkeypatch, capsys):
    copy_little(monkeypatch)
    bench.main(["local_step", *SMALL[:-1], "2", "--no-peers", "--output", str(tmp_path)])
    result = json.loads((tmp_path / "local_step_cpu.json").read_text())
    rows = check_result(result, "local_step")
    workloads = ("64", "llama3-8b-scale200/rank1of4", "10-small")
    assert list(rows) == [f"local_step/{workload}" for workload in workloads]
    assert result["threads"] == 2 and result["settings"]["scale"] == 200
    assert all(row["target"] is None for row in rows.values())
    printed = capsys.readouterr().out
    assert "local_step/10-small" in printed and "of copy   8.5n + 6 per tile of all weights" in printed


@pytest.mark.heavy
def test_checkpoint_in_a_world_of_one(tmp_path, monkeypatch, capsys):
    copy_little(monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    bench.main(["checkpoint", "--scale", "4096", "--repeats", "1", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    (path,) = tmp_path.glob("checkpoint_1_ranks_*.json")
    assert list(tmp_path.glob("zerofp4-bench-*")) == []  # threads that start ranks make folders there, too
    rows = check_result(json.loads(path.read_text()), "checkpoint_1_ranks")
    names = {name.split("/")[0] for name in rows}
    for state in ("zerofp4", "dtensors"):
        assert {f"{state}_{what}" for what in ("state", "save", "load", "save_host", "load_host")} <= names
        for part in ("save", "load"):
            assert f"round 1 of 1: {state} {part}" in printed
    assert {"save_over_dtensors", "load_over_dtensors"} <= names


def export_run(folder: Path) -> tuple[subprocess.CompletedProcess, Path]:
    command = [sys.executable, "-m", "benchmarks", "export", "--repeats", "1"]
    command += ["--scale", "64", "--output", str(folder)]
    environment = os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    how = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(command, **how), folder


@pytest.mark.heavy
@waits_for(export_run)
def test_export_in_a_world_of_one(early):
    for package in ("transformers", "safetensors"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    run, folder = early(export_run)
    assert run.returncode == 0, run.stderr
    (path,) = folder.glob("export_1_ranks_*.json")
    assert [entry.name for entry in folder.iterdir() if entry.is_dir()] == []
    rows = check_result(json.loads(path.read_text()), "export_1_ranks")
    found = {name.split("/")[0]: row for name, row in rows.items()}
    assert {"size", "save", "host_memory"} <= found.keys()
    hidden, inputs, layers, vocabulary = 64, 224, 32, 2004
    quantized = layers * (2 * hidden * hidden + 2 * hidden * 64 + 3 * hidden * inputs)
    others = 2 * (2 * vocabulary * hidden + (2 * layers + 1) * hidden)
    scalars = 4 * 7 * layers
    assert found["size"]["megabytes"] == (quantized * 9 / 16 + others + scalars) / 1e6
    assert "export 1 of 1" in run.stdout and "2 of 2 MB" in run.stdout


def test_help_of_checkpoint_says_what_it_takes(capsys):
    with pytest.raises(SystemExit):
        bench.main(["checkpoint", "--help"])
    assert "21 GB on the host" in capsys.readouterr().out


def test_a_folder_that_checkpoints_cannot_be_written_to(monkeypatch):
    monkeypatch.setattr(checkpoints, "TMPFS", "/nonexistent")
    with pytest.raises(OSError, match="set another TMPDIR"):
        bench.main(["checkpoint", "--scale", "4096", "--storage", "tmpfs"])


@pytest.mark.heavy
def test_all_writes_a_file_per_operation(tmp_path, monkeypatch, quick_copies):
    """Without compiling anything."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    assert bench.main(["all", *SMALL, "--output", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("*.json")} == {f"{name}_cpu.json" for name in SHOWN}
    rows = {}
    for path, result in output.load(tmp_path):
        rows |= check_result(result, path.name.removesuffix("_cpu.json"))
        assert (result["copy_gbps_before"], result["copy_gbps_after"]) == (10.0, 20.0)
    peers = ("bf16_copy", "reference_eager_local_step", "reference_compile_local_step")
    for name in (*(f"{peer}/64" for peer in peers), "bf16_copy/10-small"):
        assert rows[name]["times_ours"] > 0
    assert rows["reference_eager_local_step/64"]["bytes"] == rows["local_step/64"]["bytes"]
    llama_name = "llama3-8b-scale200"
    assert rows[f"transpose/{llama_name}"]["bytes"] == llama(200).elements
    assert rows[f"adamw_compact/{llama_name}"]["bytes"] == 12.25 * (llama(200).owned // 4096 * 4096)
    both, theirs = rows[f"adamw_then_cast/{llama_name}"], rows[f"torch_adamw_then_cast/{llama_name}"]
    assert both["speedup"] == theirs["times_ours"] == pytest.approx(theirs["ms"] / both["ms"])
    assert both["bytes"] == theirs["bytes"]
    assert rows["host_step/10"]["host_us"] > 0 and "host_us_per_weight" in rows["host_function/10"]
    for name in ("post/1", "all_gather/1", "quantize_rht_swizzled", "swizzle_scales_new/448"):
        assert rows[f"host_{name}"]["host_us"] > 0
    assert rows["host_linear"]["plain_us"] > 0 and rows["host_zero_step/1"]["inner_us"] > 0


@needs_gpu
def test_launches_and_memory_on_a_gpu(tmp_path):
    options = ["--device", "cuda", "--scale", "16", "--repeats", "5", "--output", str(tmp_path)]
    bench.main(["host", *options])
    rows = check_result(json.loads((tmp_path / "host_cuda.json").read_text()), "host")
    for count in (1, 14, 125):
        for name in ("local_step", "transpose"):
            row = rows[f"launches/{name}/{count}"]
            assert row["launches"] == sum(row["kernels"].values()) >= 1
    assert rows["device_memory/llama3-8b-scale16"]["percent_of_shard"] >= 0
    bench.main(["local_step", *options, "--workload", "square", "--size", "64"])
    rows = check_result(json.loads((tmp_path / "local_step_cuda.json").read_text()), "local_step")
    assert {f"{stage}/64" for stage in ("begin", "amax", "scale", "cast")} <= rows.keys()


@pytest.mark.parametrize(("device", "target"), [("cpu", None), ("cuda", 60)])
def test_targets_are_those_of_a_gpu(device, target, monkeypatch, quick_copies):
    measured = Session("host", CPU, 1)
    monkeypatch.setattr(measured.clock, "is_cuda", device == "cuda")
    measured.count("host_step/10", "host_us", 50.0, "one step")
    assert measured.rows[0]["target"] == target and measured.rows[0]["kind"] == "host_us"


def test_kernels_of_a_call_by_a_word_in_their_names(monkeypatch, capsys, quick_copies):
    measured = Session("local_step", CPU, 1)
    kernels = {"void amax_kernel<1>": [2e-3, 1e-3, 4e-3], "cast": [1.0], "cast_begin": [1.0]}
    monkeypatch.setattr(measured.clock, "kernels", lambda run, runs, moved: kernels)
    words = {"amax/64": "amax_kernel", "cast/64": "cast", "scale/64": "scale"}
    measured.time_kernels(lambda: None, {row: (word, Moved(1e6, "n", 1)) for row, word in words.items()})
    assert [(row["name"], row["ms"], row["gbps"]) for row in measured.rows] == [("amax/64", 2.0, 0.5)]
    said = capsys.readouterr().out
    assert "cast/64 is left out: 2 kernels are called cast\n" in said
    assert "scale/64 is left out: 0 kernels are called scale\n" in said


def test_the_reference_that_is_timed_does_what_the_plan_does():
    tensors = Tensors(square(64), CPU)
    tensors.plan().step()
    codes, scale, amax = peers.cast(tensors.flat.view(64, 64))
    weight = tensors.weights[0]
    assert_bytes_equal(weight.rowwise_data, codes, "codes")
    assert_bytes_equal(weight.rowwise_scale, scale, "scales")
    assert_bytes_equal(weight.amax, amax, "amax")


def test_a_peer_that_cannot_be_compiled_is_left_out(monkeypatch, capsys, quick_copies):
    def refuse(function, **options):
        def compiled(*args):
            raise RuntimeError("no compiler\nand a long explanation")

        return compiled

    monkeypatch.setattr(torch, "compile", refuse)
    measured = Session("local_step", CPU, 1)
    ours = {"name": "local_step/32", "ms": 1.0, "bytes": 1000, "elements": 1024}
    peers.references(measured, Tensors(square(32), CPU), ours)
    assert [row["name"] for row in measured.rows] == ["reference_eager_local_step/32"]
    assert "reference_compile_local_step/32 is left out: no compiler\n" in capsys.readouterr().out


def test_every_operation_has_a_summary_and_workloads_that_exist():
    for name, (run, workloads) in OPERATIONS.items():
        assert run.__doc__, name
        options = argparse.Namespace(workload=workloads, size=64, scale=64)
        assert len(list(chosen(options))) == len(workloads) > 0


# Options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: SUBCOMMAND"),
        (["local_stepp"], "invalid choice: 'local_stepp'"),
        (["local_step", "--size", "63"], "argument --size: must be even, got 63"),
        (["local_step", "--size", "0"], "argument --size: must be at least 2 and finite, got 0"),
        (["local_step", "--size", "big"], "argument --size: invalid int value: 'big'"),
        (["local_step", "--scale", "0"], "argument --scale: must be at least 1 and finite, got 0"),
        (["local_step", "--repeats", "0"], "argument --repeats: must be at least 1 and finite, got 0"),
        (["local_step", "--threads", "0"], "argument --threads: must be at least 1 and finite, got 0"),
        (["local_step", "--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["local_step", "--workload", "llama"], "argument --workload: invalid choice: 'llama'"),
        (["adamw", "--workload", "square"], "argument --workload: invalid choice: 'square'"),
        (["all", "--siz", "64"], "unrecognized arguments: --siz 64"),
        (["docs", "--size", "64"], "unrecognized arguments: --size 64"),
    ],
)
def test_wrong_options(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.parse_options(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_cuda_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench.parse_options(["local_step", "--device", "cuda"])
    assert "argument --device: cuda, but torch sees no GPU" in capsys.readouterr().err
