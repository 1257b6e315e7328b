"""scripts/train.py with a text and a model of one's own."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import hugging_face
import memory
import pytest
import torch
import train
from cases.train import read_numbers, read_rows, train_here
from text import Text, TextTooShortError

from zerofp4.launch import World

LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 48,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def write_config(folder, **changes):
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return str(folder)


@pytest.fixture
def book(tmp_path):
    (tmp_path / "book.txt").write_bytes(b"All happy families are alike. " * 200)
    return str(tmp_path / "book.txt")


def test_a_file_of_text(book):
    text = Text.of_path(train.Path(book))
    assert len(text.train) == 5700 and len(text.validation) == 300
    assert bytes(text.train[:9].tolist()) == b"All happy"


def test_a_folder_of_text(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "left_out").write_text("left out")
    (tmp_path / "parts").mkdir()
    for index in range(40):
        (tmp_path / "parts" / f"{index:02}").write_text(str(index % 10))
    text = Text.of_path(tmp_path)
    assert bytes(text.validation.tolist()) == b"9\n9" and len(text.train) == 2 * 38 - 1
    for index in range(30):
        (tmp_path / "parts" / f"{index:02}").unlink()
    with pytest.raises(TextTooShortError, match=r"of 19 bytes none can be held out"):
        Text.of_path(tmp_path)
    (tmp_path / "parts" / "39").write_text("9!")
    text = Text.of_path(tmp_path)
    assert bytes(text.train.tolist()) == b"0\n1\n2\n3\n4\n5\n6\n7\n8\n9" and text.validation.tolist() == [33]


@pytest.mark.heavy
def test_training_on_a_text_of_ones_own(tmp_path, book):
    """Which may have another name when the run goes on, and not another content."""
    options = ["--corpus", book, "--steps", "2", "--checkpoint-every", "1"]
    assert train_here(tmp_path / "run", *options).status == 0
    moved = str(tmp_path / "moved.txt")
    train.Path(book).rename(moved)
    again = train_here(tmp_path / "run", "--corpus", moved, *options[2:], "--resume", "auto")
    assert again.status == 0 and "goes on from step 2" in again.output, again.output
    train.Path(moved).write_text("something else " * 400)
    other = train_here(tmp_path / "run", "--corpus", moved, *options[2:], "--resume", "auto")
    assert other.status == 1 and "is of another run: its text is" in other.output


@needs_transformers
@pytest.mark.heavy
@pytest.mark.parametrize("recipe", ["none", "nvfp4"])
def test_a_configuration_of_transformers(tmp_path, book, recipe):
    """Trains, in NVFP4 but for embedding and output layer, and goes on where it was."""
    config = write_config(tmp_path)
    options = ["--config", config, "--corpus", book, "--steps", "6", "--recipe", recipe]
    options += ["--lr", "0.01", "--checkpoint-every", "4"]
    finished = train_here(tmp_path / "run", *options)
    assert finished.status == 0, finished.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["runs"]["nvfp4"]["verified"] == {"nvfp4_weights": 7, "other_weights": 5}
    numbers = read_numbers(tmp_path / "run")
    assert numbers[-1][1] < numbers[0][1]
    (tmp_path / "run" / "checkpoints-nvfp4" / "step-00000006" / "manifest.json").unlink()
    again = train_here(tmp_path / "run", *options, "--resume", "auto")
    assert again.status == 0 and "goes on from step 4" in again.output, again.output
    assert read_numbers(tmp_path / "run") == numbers
    other = train_here(tmp_path / "run", *options, "--layers", "2", "--resume", "auto")
    assert other.status == 1 and "is of another run: its config is" in other.output
    write_config(tmp_path, hidden_size=64)
    other = train_here(tmp_path / "run", *options, "--resume", "auto")
    assert other.status == 1 and "is of another run: its config is" in other.output


@needs_transformers
@pytest.mark.heavy
def test_a_configuration_of_transformers_in_fully_shard(tmp_path, book):
    """Its layers are groups of parameters; an output layer that is the embedding too stays what it is."""
    config = write_config(tmp_path, num_hidden_layers=2, tie_word_embeddings=True)
    options = ["--config", config, "--corpus", book, "--steps", "4", "--parallel", "fsdp2", "--lr", "0.01"]
    options += ["--checkpoint-every", "2"]
    finished = train_here(tmp_path / "run", *options)
    assert finished.status == 0, finished.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["runs"]["nvfp4"]["verified"] == {"nvfp4_weights": 14, "other_weights": 6}
    assert all(
        len(parts) == 4 and min(parts) > 0 for parts in summary["runs"]["nvfp4"]["peak_memory_mb"].values()
    )
    numbers = read_numbers(tmp_path / "run")
    assert numbers[-1][1] < numbers[0][1]
    (tmp_path / "run" / "checkpoints-nvfp4" / "step-00000004" / "manifest.json").unlink()
    again = train_here(tmp_path / "run", *options, "--resume", "auto")
    assert again.status == 0 and "goes on from step 2" in again.output, again.output
    assert read_numbers(tmp_path / "run") == numbers


def test_memory_is_said_by_tenths_of_the_steps(monkeypatch):
    held = iter(range(1000, 2000))
    monkeypatch.setattr(memory, "STATM", Statm(lambda: f"9999 {next(held)} 7"))
    found = memory.Memory(torch.device("cpu"), 25)
    for step in range(1, 26):
        found.note(step)
    ends = [3, 5, 8, 10, 13, 15, 18, 20, 23, 25]
    page = os.sysconf("SC_PAGE_SIZE")
    assert found.peaks == {"host": [(999 + end) * page / 1e6 for end in ends]}
    said = memory.describe({"device": [5.0, 4.0, 4.5], "host": [1.0]})
    assert said.endswith("device 4.0 and 4.5 MB, host 1.0 and 1.0 MB")
    assert memory.describe({}).endswith("no steps")


class Statm:
    def __init__(self, read_text):
        self.read_text = read_text

    def exists(self) -> bool:
        return True


@needs_transformers
@pytest.mark.parametrize(
    ("name", "more", "billions"),
    [("llama_3_8b", [], 8.0), ("llama_20b", [], 20.0), ("llama_20b", ["--layers", "63"], 24.5)],
)
def test_configurations_of_large_models(name, more, billions):
    config = Path(train.__file__).parents[1] / "examples" / "configs" / f"{name}.json"
    options = ["--config", str(config), "--recompute", "--sequence-length", "2048", *more]
    options, meta = train.parse_options(options), torch.device("meta")
    model = hugging_face.make_model(Path(options.config), 256, meta, options.recompute, options.layers)
    assert billions * 1e9 <= sum(p.numel() for p in model.parameters()) < 1.04 * billions * 1e9
    assert all(layer.gradient_checkpointing for layer in hugging_face.layers_of(model))


@needs_transformers
@pytest.mark.heavy
@pytest.mark.parametrize("tied", [False, True])
def test_what_is_recomputed_and_updated_early_changes_no_number(tmp_path, book, tied):
    config = write_config(tmp_path, num_hidden_layers=2, tie_word_embeddings=tied)
    options = ["--config", config, "--corpus", book, "--steps", "5", "--optimizer", "compact_adamw"]
    ways = {
        "plain": ["--clip", "0"],
        "kept": ["--overlap", "update"],
        "recomputed": ["--overlap", "update", "--recompute"],
    }
    numbers = {}
    for name, more in ways.items():
        finished = train_here(tmp_path / name, *options, *more)
        assert finished.status == 0, finished.output
        rows = read_rows(tmp_path / name)
        numbers[name] = [(row["step"], row["loss"], row["lr"], row.get("validation_loss")) for row in rows]
    assert numbers["plain"] == numbers["kept"] == numbers["recomputed"]


@needs_transformers
def test_rotary_frequencies_stay_in_float32(tmp_path):
    config = write_config(tmp_path)
    options = train.parse_options(["--config", config, "--sequence-length", "32"])
    model, _ = train.build("bf16", options, 256, World(0, 1, 0, torch.device("cpu"), "gloo"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


@needs_transformers
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 100}, "a vocabulary of 100 tokens, and the text has 256"),
        ({"model_type": "no such model"}, "no such model"),
    ],
)
def test_models_that_cannot_be_made(tmp_path, book, changes, message):
    config = write_config(tmp_path, **changes)
    finished = train_here(tmp_path / "run", "--config", config, "--corpus", book)
    assert finished.status == 1 and message in finished.output


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "argument --config: there is no "),
        ("{", [], "is no JSON"),
        ("[]", [], "is no configuration: it has a list"),
        (
            json.dumps(LLAMA),
            [],
            "argument --config: needs the library transformers (pip install transformers)",
        ),
    ],
)
def test_configurations_that_cannot_be_read(tmp_path, monkeypatch, capsys, content, options, message):
    monkeypatch.setattr(hugging_face.importlib.util, "find_spec", lambda name: None)
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(SystemExit):
        train.parse_options(["--config", str(tmp_path), *options])
    assert message in capsys.readouterr().err


@needs_transformers
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sequence-length", "49"], "49 is longer than the context of"),
        (["--sequence-length", "8", "--recipe", "nvfp4", "--weights", "bf16"], "takes --weights nvfp4"),
        (["--sequence-length", "8", "--recipe", "nvfp4", "--parallel", "fsdp2"], "takes --parallel zero"),
    ],
)
def test_options_that_do_not_go_with_a_configuration(tmp_path, capsys, options, message):
    with pytest.raises(SystemExit):
        train.parse_options(["--config", write_config(tmp_path), *options])
    assert message in capsys.readouterr().err
