"""zerofp4 memory: what it predicts is what an optimizer and its model keep."""

from __future__ import annotations

import gc
import json
import re
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from cases.docs import ROOT
from helpers import collect_garbage
from torch import nn

import zerofp4
from zerofp4.inspect import main, memory
from zerofp4.inspect.memory import WAYS, memory_kept
from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer

LARGER = 1.02
"""What is there over what is predicted, at most: slices are aligned, and plans have descriptors."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(256, 512), nn.LayerNorm(512)
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        self.lm_head = nn.Linear(512, 250, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(self.layers(self.embedding(x))))


def bytes_alive() -> int:
    """Of all tensors: addresses, since tensors of one memory may have storages of their own."""
    collect_garbage()
    plain = (torch.Tensor, nn.Parameter)
    storages = [each.untyped_storage() for each in gc.get_objects() if type(each) in plain]
    total = end = 0
    for first, last in sorted((each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages):
        total, end = total + max(last - max(first, end), 0), max(last, end)
    return total


@pytest.mark.parametrize("state", ["full", "compact"])
@pytest.mark.parametrize("nvfp4", [True, False], ids=["nvfp4", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_is_what_training_keeps(dtype, nvfp4, state):
    before = bytes_alive()
    model = Model().to(dtype)
    predicted = memory_kept(model, nvfp4=nvfp4, state=state)
    if nvfp4:
        zerofp4.convert_model(model)
    optimizer = ZeroFP4Optimizer(model.named_parameters(), FusedAdamW, lr=1e-3, state=state)
    model(torch.arange(16)).float().square().mean().backward()
    optimizer.step()
    total = sum(predicted.values())
    assert total <= bytes_alive() - before <= LARGER * total


@pytest.mark.parametrize("state", ["full", "compact"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sums", [False, True])
def test_what_is_in_host_memory(dtype, state, sums):
    model, options = Model().to(dtype), {"state": state, "offload_gradients": sums}
    whole, predicted = memory_kept(model, state=state), memory_kept(model, offload=True, **options)
    zerofp4.convert_model(model)
    named = model.named_parameters()
    optimizer = ZeroFP4Optimizer(named, FusedAdamW, lr=1e-3, offload=1.0, **options)
    model(torch.arange(16)).float().square().mean().backward()
    optimizer.step()
    host = predicted.pop("host")
    assert host <= optimizer.describe()["host_bytes"] <= LARGER * host
    assert predicted == {name: whole[name] for name in ("weights", "gradients")}


def test_early_updates_keep_the_gradients_of_a_bucket():
    with torch.device("meta"):
        large = nn.Sequential(*(nn.Linear(2**13, 2**13, bias=False) for _ in range(8))).bfloat16()
    model = Model()
    compact = {"state": "compact", "overlap": "update"}
    communication = Communication(overlap="update")
    optimizer = ZeroFP4Optimizer(model.parameters(), FusedAdamW, lr=1e-3, communication=communication)
    bucket = optimizer.describe()["bucket_mb"] * 2**20
    whole = memory_kept(large, state="compact")
    assert memory_kept(large, **compact) == {**whole, "gradients": bucket} and bucket < whole["gradients"]
    assert memory_kept(model, **compact) == memory_kept(model, state="compact"), "all are in one bucket"


def test_a_table_of_a_configuration(capsys, tmp_path):
    pytest.importorskip("transformers")
    assert main(["memory", str(ROOT / "examples/configs/llama_3_8b.json"), "--card", "80"]) == 0
    first, _, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("8.03e9 parameters;")
    full, compact = rows[1], rows[3]
    assert full.startswith("NVFP4 ") and "does not fit" in full
    assert compact.startswith('NVFP4, state="compact", overlap="update" ')
    kept, left = map(float, compact.split()[-5:-3])
    assert kept + left == pytest.approx(80)


def test_the_largest_model_of_a_card(capsys):
    """It fits with activations that grow with it, and one layer more does not."""
    pytest.importorskip("transformers")
    config, card = str(ROOT / "examples/configs/llama_20b.json"), ["--card", "149"]

    def table(*more):
        assert main(["memory", config, *card, *more]) == 0
        first, _, *rows = capsys.readouterr().out.splitlines()
        count = float(first.split("e9")[0])
        cells = [re.split(r"  +", row) for row in rows]
        return count, {name: (left, largest) for name, *_, left, largest in cells}

    count, whole = table("--activations", "5")
    assert list(whole) == list(WAYS)
    for name in ("bf16 weights", 'NVFP4, state="compact", overlap="update"'):
        layers, size = map(float, re.fullmatch(r"(\d+) layers, (.*)e9", whole[name][1]).groups())
        for more, fits in ((0, True), (1, False)):
            beyond = max(5, 5 / count * (size + more * 0.39))
            options = "--layers", str(int(layers) + more), "--activations", f"{beyond:.3f}"
            found, rows = table(*options)
            assert found == pytest.approx(size + more * 0.39, abs=0.1)
            assert (rows[name][0] != "does not fit") == fits, (name, options, rows[name])
    assert table("--card", "2")[1]["bf16 weights"] == ("does not fit", "none")


def test_a_model_that_reads_its_number_of_layers_elsewhere(capsys, tmp_path, monkeypatch):
    model = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=2))
    monkeypatch.setattr(memory, "model_of", lambda *_: model)
    monkeypatch.setattr(memory, "memory_kept", lambda *_, **__: {"weights": 10**9})
    monkeypatch.setattr(memory, "elements", lambda _: 10**9)
    assert main(["memory", str(tmp_path), "--card", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[-3:] == ["1.0", "1.0", "-"]


def test_without_transformers(capsys, tmp_path):
    with mock.patch.dict(sys.modules, transformers=None):
        assert main(["memory", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith(": pip install zerofp4[serving]\n")


def test_what_is_no_configuration(capsys, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such model"}))
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert main(["memory", str(folder)]) == 2
        assert f"zerofp4 memory: {folder}: " in capsys.readouterr().err
    assert main(["memory", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: no such file or folder" in capsys.readouterr().err
    assert main(["memory", str(tmp_path), "--layers", "0"]) == 2
    assert "--layers must be at least 1, got 0" in capsys.readouterr().err
