"""scripts/train.py, from its options to the files it leaves; runs of a few steps of the tiny preset."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from distributed.processes import ROOT, run_script, why_not

SCRIPTS = ROOT / "scripts"
SMALL = ["--preset", "tiny", "--batch-size", "2", "--sequence-length", "32"]
STEP_KEYS = {"step", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"}


@pytest.fixture(autouse=True)
def scripts_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


# What the two runs of one seed have in common; most of a run is Python starting, so one serves several tests.
SEEDED = ["--steps", "12", "--grad-accumulation", "2", "--seed", "7"]
WITH_RECIPE = ["--steps", "12", "--micro-batches", "2", "--recipe"]
RUNS = {
    "both": ([*SEEDED, "--weights", "both"], 2, "torchrun"),
    "again": (SEEDED, 2, "torchrun" if why_not("mpirun") else "mpirun"),
    "nvfp4": ([*WITH_RECIPE, "nvfp4", "--weights", "both"], 1, "alone"),
    "nvfp4-dequantized": ([*WITH_RECIPE, "nvfp4-dequantized", "--weights", "both"], 1, "alone"),
    "mxfp8": ([*WITH_RECIPE, "mxfp8", "--weights", "bf16"], 1, "alone"),
    "not finite": (["--steps", "50", "--optimizer", "sgd", "--lr", "1e30", "--clip", "0"], 1, "alone"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[dict[str, Future]]:
    """All at once. The result of each is what the launcher left, and the output folder."""

    def run(options, ranks: int, launcher: str):
        out = tmp_path_factory.mktemp("train")
        command = [str(SCRIPTS / "train.py"), *SMALL, "--out", str(out), *options]
        return run_script(command, ranks, launcher, time_limit=180.0), out

    with ThreadPoolExecutor() as pool:
        yield {name: pool.submit(run, *arguments) for name, arguments in RUNS.items()}


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(path: Path) -> list[dict]:
    """The metrics that may not depend on how fast the machine is."""
    return [{key: row[key] for key in ("step", "loss", "lr", "grad_norm")} for row in read(path)]


def check_picture(out: Path) -> None:
    if importlib.util.find_spec("matplotlib") is not None:
        assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.heavy
def test_two_ranks_and_both_kinds_of_weights(runs):
    finished, out = runs["both"].result()
    assert finished.status == 0, finished.output
    for kind in ("nvfp4", "bf16"):
        rows = read(out / f"metrics-{kind}.jsonl")
        assert [row["step"] for row in rows] == list(range(1, 13))
        assert all(row.keys() - {"validation_loss"} == STEP_KEYS for row in rows)
        assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
        assert rows[-1]["validation_loss"] < rows[0]["validation_loss"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["world_size"] == 2 and not summary["interrupted"]
    nvfp4, bf16 = summary["runs"]["nvfp4"], summary["runs"]["bf16"]
    assert nvfp4["verified"] == {"nvfp4_weights": 8, "other_weights": 8}
    assert bf16["verified"] == {"nvfp4_weights": 0, "other_weights": 16}
    assert nvfp4["parameters"] == bf16["parameters"]
    gathered = nvfp4["gathered_bytes_per_step"]
    assert gathered["nvfp4"] + gathered["high_precision"] < 0.5 * gathered["bf16_equivalent"]
    assert bf16["gathered_bytes_per_step"]["nvfp4"] == 0
    assert "the same bytes on 2 ranks; 8 NVFP4 weights equal the quantized and 8 others" in finished.output
    check_picture(out)


@pytest.mark.heavy
@pytest.mark.skipif(why_not("mpirun") is not None, reason=str(why_not("mpirun")))
def test_under_mpirun(runs):
    finished, out = runs["again"].result()
    assert finished.status == 0, finished.output
    assert json.loads((out / "summary.json").read_text())["world_size"] == 2


@pytest.mark.heavy
def test_the_same_seed_gives_the_same_run(runs):
    """Also under another launcher, and alone as well as before a second kind of weights."""
    lines = []
    for name in ("both", "again"):
        finished, out = runs[name].result()
        assert finished.status == 0, finished.output
        lines.append(numbers(out / "metrics-nvfp4.jsonl"))
    assert lines[0] == lines[1] and len(lines[0]) == 12


@pytest.mark.heavy
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-dequantized"])
def test_a_recipe_and_micro_batches(runs, recipe):
    """Both kinds of weights: bfloat16 ones are quantized for the first micro-batch of a step."""
    finished, out = runs[recipe].result()
    assert finished.status == 0, finished.output
    losses = {}
    for kind in ("nvfp4", "bf16"):
        rows = read(out / f"metrics-{kind}.jsonl")
        losses[kind] = [row["loss"] for row in rows]
        assert losses[kind][-1] < losses[kind][0] - 0.3
        assert rows[-1]["validation_loss"] < rows[0]["validation_loss"]
    assert losses["nvfp4"][0] == losses["bf16"][0]  # codes of the same weights
    summary = json.loads((out / "summary.json").read_text())
    assert summary["options"]["recipe"] == recipe
    assert summary["runs"]["nvfp4"]["verified"] == {"nvfp4_weights": 8, "other_weights": 8}


@pytest.mark.heavy
def test_mxfp8(runs):
    finished, out = runs["mxfp8"].result()
    assert finished.status == 0, finished.output
    rows = read(out / "metrics-bf16.jsonl")
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3


@pytest.mark.heavy
def test_interrupt_leaves_usable_files(tmp_path):
    metrics = tmp_path / "metrics-nvfp4.jsonl"
    program = [sys.executable, str(SCRIPTS / "train.py")]
    with subprocess.Popen(
        [*program, *SMALL, "--steps", "1000000", "--out", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") > 3):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        try:
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["interrupted"]
    assert summary["runs"]["nvfp4"]["steps"] == len(read(metrics)) > 3
    check_picture(tmp_path)


@pytest.mark.heavy
def test_a_loss_that_is_not_finite_ends_the_run(runs):
    finished, out = runs["not finite"].result()
    assert finished.status == 1, finished.output
    assert "try a lower --lr than 1e+30" in finished.output
    assert all(row["loss"] < float("inf") for row in read(out / "metrics-nvfp4.jsonl"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "huge"], "argument --preset: invalid choice: 'huge'"),
        (["--weights", "fp8"], "argument --weights: invalid choice: 'fp8'"),
        (["--optimizer", "lbfgs"], "argument --optimizer: invalid choice: 'lbfgs'"),
        (["--steps", "0"], "argument --steps: must be at least 1, got 0"),
        (["--batch-size", "many"], "argument --batch-size: invalid int value: 'many'"),
        (
            ["--grad-accumulation", "-1"],
            "argument --micro-batches/--grad-accumulation: must be at least 1, got -1",
        ),
        (["--lr", "nan"], "argument --lr: must be at least 0.0, got nan"),
        (["--clip", "inf"], "argument --clip: must be finite, got inf"),
        (
            ["--preset", "tiny", "--sequence-length", "129"],
            "argument --sequence-length: 129 is longer than the context of preset tiny, which is 128",
        ),
        (["--step", "3"], "unrecognized arguments: --step 3"),
        (["--recipe", "fp8"], "argument --recipe: invalid choice: 'fp8'"),
        (["--recipe", "mxfp8"], "argument --recipe: mxfp8 takes --weights bf16"),
        (["--tokenizer", "256"], "argument --tokenizer: must be at least 257, got 256"),
        (["--corpus", "web"], "argument --corpus: invalid choice: 'web'"),
        (["--micro-batches", "0"], "must be at least 1, got 0"),
    ],
)
def test_wrong_options(options, message, capsys):
    from train import parse_options

    with pytest.raises(SystemExit) as stopped:
        parse_options(options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_sequence_longer_than_the_text():
    from text import Text

    text = Text(bytes(100), bytes(33))
    text.check(32)
    with pytest.raises(ValueError, match=r"33 \+ 1 tokens exceed the validation text with 33 tokens"):
        text.check(33)


def test_text_holds_out_whole_files(tmp_path):
    from text import Text

    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "left_out.py").write_text("left out")
    with pytest.raises(RuntimeError, match="0 Python files"):
        Text.of_standard_library(tmp_path)
    for index in range(40):
        (tmp_path / f"{index:02}.py").write_text(str(index % 10))
    text = Text.of_standard_library(tmp_path)
    assert bytes(text.validation.tolist()) == b"9\n9"
    assert len(text.train) == 2 * 38 - 1 and bytes(text.train[:6].tolist()) == b"0\n1\n2\n"


def test_the_text_of_an_installation_has_all_of_it(tmp_path):
    from text import Text

    for folder in ("site-packages", "test", "__pycache__"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text(folder)
    for index in range(40):
        (tmp_path / f"{index:02}.py").write_text(str(index % 10))
    text = bytes(Text.of_installation(tmp_path).train.tolist())
    assert b"site-packages" in text and b"test" in text and b"__pycache__" not in text


def test_a_tokenizer_of_the_corpus():
    tokenizers = pytest.importorskip("tokenizers")
    from text import Text

    source = "def function(argument):\n    return argument\n" * 50
    text = Text(source.encode(), b"def other(argument):\n    return argument\n\xff\n")
    trained = text.tokenizer(300)
    tokens = text.tokenized(trained)
    assert tokens.vocabulary == tokenizers.Tokenizer.from_str(trained).get_vocab_size() <= 300
    assert tokens.train.dtype == torch.int32 and tokens.train.max() < tokens.vocabulary
    assert tokens.bytes_per_token == len(text.validation) / len(tokens.validation) > 2
    assert tokenizers.Tokenizer.from_str(trained).decode(tokens.train.tolist()) == source
    assert text.vocabulary == 256 and text.train.dtype == torch.uint8  # the text itself stays as it was


@pytest.mark.heavy
def test_two_ranks_share_a_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    command = [
        str(SCRIPTS / "train.py"),
        *SMALL,
        "--out",
        str(tmp_path),
        "--steps",
        "3",
        "--tokenizer",
        "300",
    ]
    finished = run_script(command, 2, "torchrun", time_limit=180.0)
    assert finished.status == 0, finished.output
    assert "tokens/s" in finished.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["text"]["vocabulary"] == 300 and summary["text"]["bytes_per_token"] > 1
    run = summary["runs"]["nvfp4"]
    expected = run["validation_loss"] / summary["text"]["bytes_per_token"]
    assert run["validation_loss_per_byte"] == pytest.approx(expected)


def test_ranks_share_the_batch_that_one_rank_would_have():
    from text import Batches

    data = torch.arange(200, dtype=torch.uint8)
    cpu = torch.device("cpu")
    alone = Batches(data, 4, 8, rank=0, world_size=1, seed=3)
    ranks = [Batches(data, 2, 8, rank=rank, world_size=2, seed=3) for rank in (0, 1)]
    for _ in range(3):
        inputs, targets = alone.next(cpu)
        parts = [batches.next(cpu) for batches in ranks]
        assert torch.equal(inputs, torch.cat([part[0] for part in parts]))
        assert torch.equal(targets, torch.cat([part[1] for part in parts]))
        assert torch.equal(targets, inputs + 1)
        assert not torch.equal(parts[0][0], parts[1][0])


def test_presets_have_the_parameters_in_their_names():
    from gpt import GPT, PRESETS

    for name in ("1m", "10m", "85m", "124m"):
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in GPT(PRESETS[name]).parameters())
        assert abs(parameters / 1e6 - int(name[:-1])) < 1.2, f"{name}: {parameters}"


def test_metrics_survive_a_killed_run(tmp_path):
    from report import read_metrics

    path = tmp_path / "metrics-nvfp4.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1, "loss": 2.5}]


def test_the_running_mean_is_one_sided_nowhere():
    from report import smoothed

    line = [float(step) for step in range(100)]
    assert smoothed(line) == line
    spike = [0.0] * 50 + [5.0] + [0.0] * 49
    assert smoothed(spike) == [0.0] * 48 + [1.0] * 5 + [0.0] * 47
