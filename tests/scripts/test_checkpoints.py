"""The checkpoints of scripts/train.py; tests/distributed has what ranks resume from."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from cases.train import SEEDED, both, flip, read_numbers, train_here
from checkpoints import find_damage, random_state, set_random_state
from early import waits_for


@pytest.mark.nightly
@waits_for(both)
def test_a_run_goes_on_with_another_number_of_ranks(early, tmp_path):
    """The same global batch, in other parts: sums in another order, so nearly the same losses."""
    finished, saved = early(both)
    assert finished.status == 0, finished.output
    out = tmp_path / "out"
    shutil.copytree(saved, out)
    shutil.rmtree(out / "checkpoints-nvfp4" / "step-00000012")
    options = [*SEEDED, "--batch-size", "4", "--checkpoint-every", "8", "--resume", "auto"]
    finished = train_here(out, *options)
    assert finished.status == 0, finished.output
    expected = read_numbers(saved)
    for mine, theirs in zip(read_numbers(out), expected, strict=True):
        assert mine[0] == theirs[0] and mine[1] == pytest.approx(theirs[1], rel=0.05)
    assert read_numbers(out)[:8] == expected[:8]


@pytest.mark.heavy
def test_every_mutation_of_a_checkpoint_is_found(tmp_path):
    assert train_here(tmp_path, "--steps", "1", "--checkpoint-every", "1").status == 0
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


def test_the_same_random_numbers_follow():
    state = random_state(torch.device("cpu"))
    first = torch.randn(4)
    set_random_state(state, torch.device("cpu"))
    assert torch.equal(torch.randn(4), first)
