"""python -m benchmarks large: its rows, and what is left out. Never how fast anything is."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases.bench import measured, without_places

from benchmarks import large
from benchmarks.session import Clock

transformers = pytest.importorskip("transformers")
SHAPE = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 3}


def run(folder: Path, monkeypatch, *more: str) -> dict:
    """The result of two layers."""
    transformers.LlamaConfig(vocab_size=64, **SHAPE).save_pretrained(folder / "model")
    monkeypatch.setattr(Clock, "copy_gbps", lambda self: 10.0)
    arguments = ["--config", str(folder / "model"), "--layers", "2", "--tokens", "4", "--repeats", "1", *more]
    return measured(folder / "results", "large", *arguments)


def test_rows(tmp_path: Path, monkeypatch, capsys):
    result = run(tmp_path, monkeypatch)
    rows = without_places(result["rows"])
    left_out = set(re.findall(r"(\w+) is left out", capsys.readouterr().out))
    assert left_out <= {"flash", "flash_release"}
    for way in large.WAYS.keys() - left_out:
        assert rows[f"{way}/tokens"]["tokens_per_second"] > 0
    assert result["settings"]["layers"] == 2 and result["settings"]["ways"] == list(large.WAYS)


def test_a_way_without_memory_is_left_out_and_the_others_run(tmp_path: Path, monkeypatch, capsys):
    make = large.make_step

    def refuse(model, way, tokens):
        if way == "bf16":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return make(model, way, tokens)

    monkeypatch.setattr(large, "make_step", refuse)
    rows = run(tmp_path, monkeypatch, "--ways", "bf16", "compact")["rows"]
    assert "bf16 is left out: CUDA out of memory\n" in capsys.readouterr().out
    assert {name.split("/")[0] for name in rows} == {"compact"}


def test_the_ways_train_one_model():
    """Each has parameters of the same names, and its step changes them."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=64, **SHAPE)
    tokens = torch.randint(64, (1, 4))
    for way in ("bf16", "compact", "updates"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        embedding = model.get_input_embeddings().weight
        before = embedding.detach().clone()
        large.make_step(model, way, tokens)()
        assert not torch.equal(embedding, before) and embedding.grad is None


def test_one_rank():
    with pytest.raises(ValueError, match="large measures one rank"):
        large.large(SimpleNamespace(), SimpleNamespace(), SimpleNamespace(world_size=2))
