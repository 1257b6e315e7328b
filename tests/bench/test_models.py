"""python -m benchmarks large and small_batches: steps of language models. Never how fast anything is."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases.bench import check_ratio, measured, without_places
from torch._dynamo.utils import counters

from benchmarks import large, small_batches, states
from benchmarks.rules import TARGETS
from benchmarks.small_batches import LENGTH, MODES, SEQUENCES, WAYS

transformers = pytest.importorskip("transformers")
SHAPE = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 3}


def run(folder: Path, monkeypatch, *more: str) -> dict:
    """The result of two layers."""
    transformers.LlamaConfig(vocab_size=64, **SHAPE).save_pretrained(folder / "model")
    arguments = ["--config", str(folder / "model"), "--layers", "2", "--tokens", "4", "--repeats", "1", *more]
    return measured(folder / "results", "large", *arguments)


def test_rows_of_a_large_model(tmp_path: Path, monkeypatch, capsys):
    result = run(tmp_path, monkeypatch)
    rows = without_places(result["rows"])
    left_out = set(re.findall(r"(\w+) is left out", capsys.readouterr().out))
    assert left_out <= {"flash", "flash_release"}
    for way in large.WAYS.keys() - left_out:
        assert rows[f"{way}/tokens"]["tokens_per_second"] > 0
    assert result["settings"]["layers"] == 2


def test_rows_and_lines_of_masters_in_host_memory(tmp_path: Path, monkeypatch, capsys):
    rows = without_places(run(tmp_path, monkeypatch, "--ways", "offload_updates")["rows"])
    assert rows["offload_updates/host"]["megabytes"] > 0
    losses = [rows[f"offload_updates/loss_{n}"]["loss"] for n in (1, 2)]
    assert losses[1] < losses[0] < 5  # log(64) is 4.16
    said = capsys.readouterr().out
    assert re.search(r"offload_updates: building 0.00e9 .*\n    built in .* s, .* GB of host memory\n", said)
    assert all(f"    step {n}: loss {loss:.4f}, " in said for n, loss in enumerate(losses, 1))


def test_a_model_that_begins_on_the_meta_device():
    config = transformers.LlamaConfig(vocab_size=64, tie_word_embeddings=True, **SHAPE)
    plain = transformers.AutoModelForCausalLM.from_config(config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    large.leave_meta(model, torch.device("cpu"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for (name, buffer), (_, expected) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), name


def test_rows_of_several_micro_batches(tmp_path: Path, monkeypatch, capsys):
    ways = ["compact", "offload", "offload_half", "offload_full", "offload_sums", "updates"]
    result = run(tmp_path, monkeypatch, "--micro-batches", "2", "--ways", *ways)
    rows = without_places(result["rows"])
    assert all(rows[f"{way}/tokens"]["tokens_per_second"] > 0 for way in ways[:-1])
    assert "updates/tokens" not in rows and "updates is left out" in capsys.readouterr().out


def test_rows_of_several_ranks(tmp_path: Path, monkeypatch):
    """In a world of one, where they measure something else."""
    rows = without_places(run(tmp_path, monkeypatch, "--ways", *large.WAYS_OF_RANKS)["rows"])
    for way in ("full", "overlap"):
        for other in ("ddp", "fully_shard"):
            check_ratio(rows, f"{way}/over_{other}", f"{way}/tokens", f"{other}/tokens")


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


# Few tokens

SMALL = argparse.Namespace(scale=64, layers=3)


def test_rows_of_small_batches(tmp_path: Path, monkeypatch):
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
    step = small_batches.make_step(torch.device("cpu"), SMALL, way, "compiled", (1, 32))
    for _ in range(2):
        step()
    assert counters["stats"]["unique_graphs"] == 1


def test_states_are_of_one_rank():
    with pytest.raises(ValueError, match="states measures one rank"):
        states.states(SimpleNamespace(), SimpleNamespace(), SimpleNamespace(world_size=2))
