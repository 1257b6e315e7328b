"""examples/training, from its options to the files it leaves; runs of a few steps of the tiny preset."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases.train import SEEDED, again, both, read_numbers, read_rows, settings_restored, train_here
from early import waits_for

from examples.training import train
from examples.training.data import Batches, Text
from examples.training.model import GPT, PRESETS
from examples.training.report import Recorder, read_metrics
from zerofp4.distributed import PHASES

STEP_KEYS = {"step", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"}


def check_picture(out: Path) -> None:
    if importlib.util.find_spec("matplotlib") is not None:
        assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.heavy
@waits_for(both)
def test_two_ranks_and_both_kinds_of_weights(early):
    said, out = early(both)
    summary = json.loads((out / "summary.json").read_text())
    for kind in summary["runs"]:
        rows = read_rows(out, kind)
        assert [row["step"] for row in rows] == list(range(1, 13))
        assert all(row.keys() - {"validation_loss"} == STEP_KEYS for row in rows)
        assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
        assert rows[-1]["validation_loss"] < rows[0]["validation_loss"]
    assert summary["world_size"] == 2 and not summary["interrupted"]
    nvfp4, plain = summary["runs"].values()
    assert nvfp4["verified"] == {"nvfp4_weights": 8, "other_weights": 8}
    assert plain["verified"] == {"nvfp4_weights": 0, "other_weights": 16}
    assert nvfp4["parameters"] == plain["parameters"] and nvfp4["dtype"] == plain["dtype"]
    gathered, others = nvfp4["gathered_bytes_per_step"], plain["gathered_bytes_per_step"]
    assert gathered["nvfp4"] + gathered["high_precision"] < 0.5 * others["high_precision"]
    assert others["nvfp4"] == 0
    sent = nvfp4["sent_bytes_per_step"]
    assert 2 * sent["weights"] == gathered["nvfp4"] + gathered["high_precision"] and sent["gradients"] > 0
    assert plain["phases_of_step"]["weights"]["sent_bytes"] == plain["sent_bytes_per_step"]["weights"]
    phases = nvfp4["phases_of_step"]
    # On a GPU that reads no columnwise copies nothing is transposed.
    assert phases.keys() | {"transpose"} == set(PHASES)
    assert all(row["milliseconds"] > 0 for row in phases.values())
    assert {name: row["sent_bytes"] for name, row in phases.items() if row["sent_bytes"]} == sent
    table = said.partition("phases of a step")[2]
    row = next(line for line in table.splitlines() if "weights" in line)
    assert f"{sent['weights']:,}" in row
    assert "the same bytes on 2 ranks; 8 NVFP4 weights equal the quantized and 8 others" in said
    check_picture(out)


@pytest.mark.nightly
@waits_for(both, again)
def test_the_same_seed_gives_the_same_run(early):
    """Also under another launcher, and alone as well as before a second kind of weights."""
    lines = []
    for work in (both, again):
        _, out = early(work)
        lines.append(read_numbers(out))
        assert json.loads((out / "summary.json").read_text())["world_size"] == 2
    assert lines[0] == lines[1] and len(lines[0]) == 12


@pytest.mark.nightly
@waits_for(both)
def test_a_run_goes_on_with_another_number_of_ranks(early, tmp_path):
    """The same global batch, in other parts: sums in another order, so nearly the same losses."""
    _, saved = early(both)
    out = tmp_path / "out"
    shutil.copytree(saved, out)
    shutil.rmtree(out / "checkpoints-nvfp4" / "step-00000012")
    options = [*SEEDED, "--batch-size", "4", "--checkpoint-every", "8", "--resume", "auto"]
    train_here(out, *options)
    expected = read_numbers(saved)
    for mine, theirs in zip(read_numbers(out), expected, strict=True):
        assert mine[0] == theirs[0] and mine[1] == pytest.approx(theirs[1], rel=0.05)
    assert read_numbers(out)[:8] == expected[:8]


@pytest.mark.heavy
def test_updates_in_the_backward_pass(tmp_path):
    """The losses of a run without."""
    rows = []
    for overlap in ([], ["--overlap", "update"]):
        options = ["--steps", "6", "--optimizer", "compact_adamw", "--clip", "0", *overlap]
        train_here(tmp_path / str(len(rows)), *options)
        rows.append(read_rows(tmp_path / str(len(rows))))
    losses = [[(row["loss"], row.get("validation_loss")) for row in run] for run in rows]
    assert losses[0] == losses[1] and losses[0][-1][0] < losses[0][0][0]
    assert [rows[0][0]["grad_norm"] > 0, rows[1][0]["grad_norm"]] == [True, None]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("slow", "plain", "dtype"), [((), "bf16", "bfloat16"), ((torch.bfloat16,), "fp32", "float32")]
)
def test_a_cpu_without_instructions_for_bfloat16(tmp_path, monkeypatch, slow, plain, dtype):
    """It trains in float32, and says so; plain weights are float32 then."""
    monkeypatch.setattr(train, "SLOW_ON_CPU", slow)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = train_here(tmp_path, "--steps", "2", "--weights", "both")
    runs = json.loads((tmp_path / "summary.json").read_text())["runs"]
    assert {kind: run["dtype"] for kind, run in runs.items()} == {"nvfp4": dtype, plain: dtype}
    words = "this CPU has no instructions for bfloat16: what is not NVFP4 is float32\n"
    assert (words in said) == bool(slow)
    assert f"{plain.upper()} weights: loss" in said
    check_picture(tmp_path)


@pytest.mark.parametrize(("weights", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_weights_that_are_asked_for_by_name(monkeypatch, weights, dtype):
    monkeypatch.setattr(train, "SLOW_ON_CPU", (torch.bfloat16,))
    options = train.parse_options(["--weights", weights])
    assert train.kinds_of(options, torch.device("cpu")) == [weights]
    assert train.dtype_of(weights, torch.device("cpu")) == dtype
    assert train.dtype_of("nvfp4", torch.device("cuda")) == torch.bfloat16


@pytest.mark.heavy
def test_a_profiler_changes_no_number(tmp_path):
    """And a world of one sends nothing."""
    runs = []
    for most in ("2", "0"):
        options = ["--steps", "7", "--optimizer", "fused_adamw", "--overwrite", "--profile-steps", most]
        said = train_here(tmp_path, *options)
        runs.append(read_numbers(tmp_path))
        found = json.loads((tmp_path / "summary.json").read_text())["runs"]["nvfp4"]["phases_of_step"]
        assert bool(found) == (most == "2") == ("phases of a step" in said)
        assert not any(row["sent_bytes"] for row in found.values())
    assert runs[0] == runs[1]


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_leaves_usable_files(tmp_path, monkeypatch, number):
    """The step in progress is finished, recorded and saved."""
    record = Recorder.record

    def interrupted(recorder, row):
        record(recorder, row)
        if row["step"] == 4:
            signal.raise_signal(number)

    monkeypatch.setattr(Recorder, "record", interrupted)
    train_here(tmp_path, "--steps", "1000000", "--checkpoint-every", "1000000", status=128 + number)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["interrupted"]
    assert summary["runs"]["nvfp4"]["steps"] == len(read_rows(tmp_path)) == 5
    assert [path.name for path in (tmp_path / "checkpoints-nvfp4").iterdir()] == ["step-00000005"]
    check_picture(tmp_path)


def test_a_second_signal_stops_at_once():
    """Also if it was ignored, as it is in what a shell begins in the background."""
    with settings_restored():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        interrupt = train.Interrupt()
        signal.raise_signal(signal.SIGINT)
        assert interrupt.asked and interrupt.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.heavy
def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    said = train_here(tmp_path, "--steps", "50", "--lr", "1e30", status=1)
    assert "try a lower --lr than 1e+30" in said
    assert all(row["loss"] < float("inf") for row in read_rows(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "huge"], "argument --preset: invalid choice: 'huge'"),
        (["--weights", "fp8"], "argument --weights: invalid choice: 'fp8'"),
        (["--steps", "0"], "argument --steps: must be at least 1 and finite, got 0"),
        (["--batch-size", "many"], "argument --batch-size: invalid int value: 'many'"),
        (["--lr", "nan"], "argument --lr: must be at least 0 and finite, got nan"),
        (["--clip", "inf"], "argument --clip: must be at least 0 and finite, got inf"),
        (["--preset", "tiny", "--sequence-length", "129"], "129 exceeds the preset's context, 128"),
        (["--step", "3"], "unrecognized arguments: --step 3"),
        (["--overlap", "update"], "update takes --optimizer fused_adamw or compact_adamw"),
        (
            ["--overlap", "update", "--optimizer", "fused_adamw", "--clip", "1"],
            "argument --overlap: update takes --micro-batches 1 and --clip 0",
        ),
    ],
)
def test_wrong_options(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.parse_options(options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_text_holds_out_whole_files(tmp_path):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "left_out.py").write_text("left out")
    with pytest.raises(RuntimeError, match="0 Python files"):
        Text.of_standard_library(tmp_path)
    for index in range(40):
        (tmp_path / f"{index:02}.py").write_text(str(index % 10))
    text = Text.of_standard_library(tmp_path)
    assert bytes(text.validation.tolist()) == b"9\n9"
    assert len(text.train) == 2 * 38 - 1 and bytes(text.train[:6].tolist()) == b"0\n1\n2\n"


def test_ranks_share_the_batch_that_one_rank_would_have():
    def batches(size: int, rank: int, ranks: int) -> Batches:
        options = SimpleNamespace(batch_size=size, sequence_length=8, seed=3)
        world = SimpleNamespace(rank=rank, world_size=ranks, device=torch.device("cpu"))
        return Batches(torch.arange(200, dtype=torch.uint8), options, world)

    alone, ranks = batches(4, 0, 1), [batches(2, rank, 2) for rank in (0, 1)]
    for _ in range(3):
        inputs, targets = alone.next()
        parts = [own.next() for own in ranks]
        assert torch.equal(inputs, torch.cat([part[0] for part in parts]))
        assert torch.equal(targets, torch.cat([part[1] for part in parts]))
        assert torch.equal(targets, inputs + 1)
        assert not torch.equal(parts[0][0], parts[1][0])


def test_presets_have_the_parameters_in_their_names():
    for name in ("1m", "10m", "85m", "124m"):
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in GPT(PRESETS[name]).parameters())
        assert abs(parameters / 1e6 - int(name[:-1])) < 1.2, f"{name}: {parameters}"


def test_metrics_survive_a_killed_run(tmp_path):
    path = tmp_path / "metrics-nvfp4.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1, "loss": 2.5}]
