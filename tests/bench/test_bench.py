"""python -m benchmarks: what it measures, how it counts and what it writes. Never how fast anything is."""

from __future__ import annotations

import tempfile

import pytest
import torch
from cases.bench import check_ratio, measured, without_places

import benchmarks.__main__ as bench
from benchmarks import checkpoints
from benchmarks.rules import Moved
from benchmarks.session import Session
from examples.training.checkpoints import CheckpointError

CPU = torch.device("cpu")


# Measuring


@pytest.mark.heavy
def test_local_step(tmp_path, monkeypatch, capsys):
    small = ["--device", "cpu", "--size", "64", "--scale", "200", "--repeats", "1", "--threads", "2"]
    result = measured(tmp_path, "local_step", *small, "--no-peers")
    workloads = ("64", "llama3-8b-scale200/rank1of4", "10-small")
    assert list(result["rows"]) == [f"local_step/{workload}" for workload in workloads]
    assert result["threads"] == 2 and result["settings"]["scale"] == 200
    printed = capsys.readouterr().out
    assert "local_step/10-small" in printed and "of copy   8.5n + 6 per tile of all weights" in printed


@pytest.mark.heavy
def test_checkpoint_in_a_world_of_one(tmp_path, monkeypatch, capsys):
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


@pytest.mark.heavy
def test_export_in_a_world_of_one(tmp_path, monkeypatch, capsys):
    for package in ("transformers", "safetensors"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = without_places(measured(tmp_path, "export", "--scale", "64", "--repeats", "1")["rows"])
    assert list(tmp_path.glob("zerofp4-bench-*")) == []
    assert {"size", "save", "host_memory"} <= found.keys()
    hidden, inputs, layers, vocabulary = 64, 224, 32, 2004
    quantized = layers * (2 * hidden * hidden + 2 * hidden * 64 + 3 * hidden * inputs)
    others = 2 * (2 * vocabulary * hidden + (2 * layers + 1) * hidden)
    scalars = 4 * 7 * layers
    assert found["size"]["megabytes"] == (quantized * 9 / 16 + others + scalars) / 1e6
    printed = capsys.readouterr().out
    assert "export 1 of 1" in printed and "2 of 2 MB" in printed


@pytest.mark.heavy
def test_load_in_a_world_of_one(tmp_path, monkeypatch):
    for package in ("transformers", "safetensors"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(checkpoints, "FILE_BYTES", 500_000)  # several files
    found = without_places(measured(tmp_path, "load", "--scale", "64", "--repeats", "1")["rows"])
    assert list(tmp_path.glob("zerofp4-bench-*")) == []
    assert {"load", "host_memory"} <= found.keys()
    assert 9 / 16 < found["weights"]["bytes_per_parameter"] < 0.57
    assert 0.57 < found["parameters"]["bytes_per_parameter"] < 1


def test_a_folder_that_checkpoints_cannot_be_written_to(monkeypatch):
    monkeypatch.setattr(checkpoints, "TMPFS", "/nonexistent")
    with pytest.raises(CheckpointError, match="/nonexistent"):
        bench.main(["checkpoint", "--scale", "4096", "--storage", "tmpfs"])


@pytest.mark.parametrize(("device", "target"), [("cpu", None), ("cuda", 60)])
def test_targets_are_those_of_a_gpu(device, target, monkeypatch):
    measured = Session("host", CPU, 1)
    monkeypatch.setattr(measured.clock, "is_cuda", device == "cuda")
    measured.count("host_step/10", "host_us", 50.0, "one step")
    assert measured.rows[0]["target"] == target and measured.rows[0]["kind"] == "host_us"


def test_kernels_of_a_call_by_a_word_in_their_names(monkeypatch, capsys):
    measured = Session("local_step", CPU, 1)
    kernels = {"void amax_kernel<1>": [2e-3, 1e-3, 4e-3], "cast": [1.0], "cast_begin": [1.0]}
    monkeypatch.setattr(measured.clock, "kernels", lambda run, runs, moved: kernels)
    words = {"amax/64": "amax_kernel", "cast/64": "cast", "scale/64": "scale"}
    measured.time_kernels(lambda: None, {row: (word, Moved(1e6, "n", 1)) for row, word in words.items()})
    assert [(row["name"], row["ms"], row["gbps"]) for row in measured.rows] == [("amax/64", 2.0, 0.5)]
    said = capsys.readouterr().out
    assert "cast/64 is left out: 2 kernels are called cast\n" in said
    assert "scale/64 is left out: 0 kernels are called scale\n" in said


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
        (["local_step", "--device", "cuda"], "argument --device: cuda, but torch sees no GPU"),
        (["local_step", "--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["local_step", "--workload", "llama"], "argument --workload: invalid choice: 'llama'"),
        (["adamw", "--workload", "square"], "argument --workload: invalid choice: 'square'"),
        (["all", "--siz", "64"], "unrecognized arguments: --siz 64"),
        (["docs", "--size", "64"], "unrecognized arguments: --size 64"),
    ],
)
def test_wrong_options(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        bench.parse_options(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
