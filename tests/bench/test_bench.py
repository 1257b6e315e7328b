"""python -m benchmarks: what it measures, how it counts and what it writes. Never how fast anything is."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from cases.bench import check_ratio, copy_little, measured, read_result, without_places
from early import waits_for
from helpers import assert_bytes_equal

import benchmarks.__main__ as bench
from benchmarks import checkpoints, peers, session
from benchmarks.operations import OPERATIONS
from benchmarks.rules import Moved
from benchmarks.session import Clock, Session
from benchmarks.workloads import ROOT, Tensors, chosen, square

CPU = torch.device("cpu")


@pytest.fixture
def quick_copies(monkeypatch):
    monkeypatch.setattr(session, "CPU_FLUSH_BYTES", 1 << 20)
    monkeypatch.setattr(Clock, "copy_gbps", lambda self: 10.0)


# Measuring


@pytest.mark.heavy
def test_local_step(tmp_path, monkeypatch, capsys):
    copy_little(monkeypatch)
    small = ["--device", "cpu", "--size", "64", "--scale", "200", "--repeats", "1", "--threads", "2"]
    result = measured(tmp_path, "local_step", *small, "--no-peers")
    workloads = ("64", "llama3-8b-scale200/rank1of4", "10-small")
    assert list(result["rows"]) == [f"local_step/{workload}" for workload in workloads]
    assert result["threads"] == 2 and result["settings"]["scale"] == 200
    printed = capsys.readouterr().out
    assert "local_step/10-small" in printed and "of copy   8.5n + 6 per tile of all weights" in printed


@pytest.mark.heavy
def test_checkpoint_in_a_world_of_one(tmp_path, monkeypatch, capsys):
    copy_little(monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rows = without_places(measured(tmp_path, "checkpoint", "--scale", "4096", "--repeats", "1")["rows"])
    assert list(tmp_path.glob("zerofp4-bench-*")) == []  # threads that start ranks make folders there, too
    printed = capsys.readouterr().out
    for state in ("zerofp4", "dtensors"):
        assert f"{state}_state" in rows
        for part in ("save", "load"):
            assert {f"{state}_{part}", f"{state}_{part}_host"} <= rows.keys()
            assert f"round 1 of 1: {state} {part}" in printed
    for part in ("save", "load"):
        check_ratio(rows, f"{part}_over_dtensors", f"zerofp4_{part}", f"dtensors_{part}")


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
    found = without_places(read_result(path)["rows"])
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
