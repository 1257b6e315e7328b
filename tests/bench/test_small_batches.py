"""python -m benchmarks small_batches: its rows, and what it compiles. Never how fast anything is."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from cases.bench import check_ratio, measured
from torch._dynamo.utils import counters

from benchmarks import small_batches
from benchmarks.rules import TARGETS
from benchmarks.session import Clock
from benchmarks.small_batches import LENGTH, MODES, SEQUENCES, WAYS

pytest.importorskip("transformers")
SMALL = argparse.Namespace(scale=64, layers=3)
SHAPE = (1, 32)


def test_rows(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(Clock, "copy_gbps", lambda self: 10.0)
    arguments = ["--scale", "64", "--layers", "1", "--repeats", "1", "--modes", "eager"]
    rows = measured(tmp_path, "small_batches", *arguments)["rows"]
    for name in (f"eager/{sequences}x32" for sequences in SEQUENCES):
        for way in ("weights", "layers"):
            check_ratio(rows, f"{name}/{way}_over_bf16", f"{name}/{way}", f"{name}/bf16")


def test_targets_are_those_of_rows():
    shapes = [f"{mode}/{n}x{LENGTH}" for mode in MODES for n in SEQUENCES]
    names = {f"{shape}/{way}_over_bf16" for shape in shapes for way in WAYS}
    targets = [name for name in TARGETS if name.startswith(tuple(f"{mode}/" for mode in MODES))]
    assert targets and names.issuperset(targets)


@pytest.mark.heavy
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("way", WAYS)
def test_all_decoder_layers_are_one_graph(way, monkeypatch):
    compile_layer = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda layer, **more: compile_layer(layer, backend="aot_eager", **more)
    )
    counters.clear()
    step = small_batches.make_step(torch.device("cpu"), SMALL, way, "compiled", SHAPE)
    for _ in range(2):
        step()
    assert counters["stats"]["unique_graphs"] == 1
