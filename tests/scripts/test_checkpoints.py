"""What scripts/train.py saves and resumes from; runs of a few steps of the tiny preset."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from distributed.processes import ROOT, run_script

SCRIPTS = ROOT / "scripts"
SMALL = ["--preset", "tiny", "--batch-size", "2", "--sequence-length", "32", "--steps", "12"]


@pytest.fixture(autouse=True)
def scripts_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def run_train(out: Path, *options: str, ranks: int = 1):
    launcher = "alone" if ranks == 1 else "torchrun"
    return run_script([str(SCRIPTS / "train.py"), *SMALL, "--out", str(out), *options], ranks, launcher)


def losses(out: Path) -> list[tuple]:
    rows = [json.loads(line) for line in (out / "metrics-nvfp4.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"], r["lr"], r["grad_norm"], r.get("validation_loss")) for r in rows]


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1 << place % 8
    path.write_bytes(content)


@pytest.mark.heavy
@pytest.mark.parametrize("optimizer", ["adamw", "fused_adamw", "sgd"])
def test_a_resumed_run_is_the_same_run(tmp_path, optimizer):
    """Its last checkpoint damaged and a draft left over, it goes on from the one before."""
    options = ["--checkpoint-every", "4", "--optimizer", optimizer, "--weights", "nvfp4"]
    finished = run_train(tmp_path, *options, ranks=2)
    assert finished.status == 0, finished.output
    folder = tmp_path / "checkpoints-nvfp4"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000008", "step-00000012"]
    expected = losses(tmp_path)
    flip(folder / "step-00000012" / "__1_0.distcp", 1000)
    shutil.copytree(folder / "step-00000008", folder / "draft-00000010")
    again = run_train(tmp_path, *options, "--resume", "auto", ranks=2)
    assert again.status == 0, again.output
    assert "step-00000012 is passed over: __1_0.distcp is not as it was saved" in again.output
    assert "step     9/12" in again.output and "step     8/12" not in again.output
    assert losses(tmp_path) == expected
    whole = run_train(tmp_path, *options, "--resume", "auto", ranks=2)
    assert whole.status == 0 and "after 12 steps" in whole.output and losses(tmp_path) == expected


@pytest.mark.heavy
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    """The same global batch, in other parts: sums in another order, so nearly the same losses."""
    assert run_train(tmp_path, "--checkpoint-every", "8", ranks=2).status == 0
    expected = losses(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints-nvfp4" / "step-00000012")
    options = ["--batch-size", "4", "--checkpoint-every", "8", "--resume", "auto"]
    finished = run_train(tmp_path, *options)
    assert finished.status == 0, finished.output
    for mine, theirs in zip(losses(tmp_path), expected, strict=True):
        assert mine[0] == theirs[0] and mine[1] == pytest.approx(theirs[1], rel=0.05)
    assert losses(tmp_path)[:8] == expected[:8]


@pytest.mark.heavy
def test_a_folder_in_use(tmp_path):
    assert run_train(tmp_path, "--steps", "2", "--checkpoint-every", "1").status == 0
    before = (tmp_path / "metrics-nvfp4.jsonl").read_bytes()
    refused = run_train(tmp_path, "--steps", "3")
    assert refused.status == 1 and "--resume auto goes on with it, --overwrite deletes it" in refused.output
    assert (tmp_path / "metrics-nvfp4.jsonl").read_bytes() == before
    other = run_train(tmp_path, "--steps", "2", "--seed", "3", "--resume", "auto")
    assert other.status == 1 and "is of another run: its seed is 0 and this run's 3" in other.output
    assert run_train(tmp_path, "--steps", "1", "--overwrite").status == 0
    assert len(losses(tmp_path)) == 1 and not (tmp_path / "checkpoints-nvfp4").exists()


@pytest.mark.heavy
def test_sigterm_saves(tmp_path):
    metrics = tmp_path / "metrics-nvfp4.jsonl"
    options = [*SMALL[:-1], "1000000", "--out", str(tmp_path), "--checkpoint-every", "1000000"]
    with subprocess.Popen(
        [sys.executable, str(SCRIPTS / "train.py"), *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") > 3):
            time.sleep(0.1)
        process.terminate()
        try:
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM, output
    steps = len(losses(tmp_path))
    assert [p.name for p in (tmp_path / "checkpoints-nvfp4").iterdir()] == [f"step-{steps:08d}"]
    assert json.loads((tmp_path / "summary.json").read_text())["interrupted"]


@pytest.mark.heavy
def test_every_mutation_of_a_checkpoint_is_found(tmp_path):
    from checkpoints import find_damage

    assert run_train(tmp_path, "--steps", "1", "--checkpoint-every", "1").status == 0
    (path,) = (tmp_path / "checkpoints-nvfp4").iterdir()
    assert find_damage(path) is None
    generator = random.Random(0)
    files = sorted(path.iterdir())
    for _ in range(600):
        file = generator.choice(files)
        content = file.read_bytes()
        change, place = generator.choice(["flip", "cut", "add", "remove"]), generator.randrange(len(content))
        if change == "flip":
            flip(file, place)
        elif change == "cut":
            file.write_bytes(content[:place])
        elif change == "add":
            file.write_bytes(content[:place] + b"x" + content[place:])
        else:
            file.unlink()
        # Whitespace in the manifest says nothing else.
        found = find_damage(path)
        assert found or (file.name == "manifest.json" and same_json(file, content)), (change, place)
        file.write_bytes(content)
    assert find_damage(path) is None
    (path / "stray").write_text("")
    assert find_damage(path) == "stray was not saved with it"


def same_json(file: Path, content: bytes) -> bool:
    return json.loads(file.read_text()) == json.loads(content)


@pytest.mark.heavy
def test_killed_ranks_are_restarted_and_go_on_with_the_same_bytes(tmp_path):
    """scripts/faults.py --kills 200 does it for longer."""
    arguments = ["--kills", "2", "--ranks", "2", "--out", str(tmp_path / "faults")]
    finished = run_script([str(SCRIPTS / "faults.py"), *arguments], 1, "alone", time_limit=600.0)
    assert finished.status == 0, finished.output
    assert "2 kills in" in finished.output and "every run ended with the same bytes" in finished.output


def test_the_same_random_numbers_follow():
    from checkpoints import random_state, set_random_state

    state = random_state(torch.device("cpu"))
    first = torch.randn(4)
    set_random_state(state, torch.device("cpu"))
    assert torch.equal(torch.randn(4), first)
