"""examples/training on ranks that share their start with other tests: checkpoints and folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from cases.train import read_numbers, train_here

from distributed.cases import shared_folder
from distributed.run import on_ranks
from zerofp4.distributed import PHASES

pytestmark = pytest.mark.nightly


def train(world, out: Path, *options: str, status: int = 0) -> str:
    """A run of all ranks, behind what each of them did before; what rank 0 printed, others print nothing."""
    dist.barrier()
    said = [train_here(out, *options, world=world, status=status)]
    dist.broadcast_object_list(said)
    return said[0]


@on_ranks(2, time_limit=120.0)
def test_phases_that_overlap_passes(world):
    """Whatever travels when, each has its time, and the bytes that describe() says."""
    out, more = shared_folder(world), ["--overlap", "both", "--micro-batches", "2"]
    train(world, out, "--steps", "6", "--profile-steps", "1", "--optimizer", "fused_adamw", *more)
    run = json.loads((out / "summary.json").read_text())["runs"]["nvfp4"]
    found, sent = run["phases_of_step"], run["sent_bytes_per_step"]
    assert found.keys() == PHASES.keys() and min(sent.values()) > 0
    assert all(row["milliseconds"] > 0 for row in found.values())
    assert {name: row["sent_bytes"] for name, row in found.items() if row["sent_bytes"]} == sent


@on_ranks(2, time_limit=120.0)
def test_a_folder_in_use(world):
    out = shared_folder(world)
    train(world, out, "--steps", "2", "--checkpoint-every", "1")
    metrics = out / "metrics-nvfp4.jsonl"
    before = metrics.read_bytes()
    said = train(world, out, "--steps", "3", status=1)
    assert "--resume auto goes on with it, --overwrite deletes it" in said
    said = train(world, out, "--steps", "2", "--seed", "3", "--resume", "auto", status=1)
    assert "is of another run: its seed is 0 and this run's 3" in said
    assert metrics.read_bytes() == before
    said = train(world, out, "--steps", "3", "--resume", "auto")
    assert "goes on from step 2, with the learning rates of 3 steps instead of 2" in said
    assert len(read_numbers(out)) == 3
    train(world, out, "--steps", "1", "--overwrite")
    assert len(read_numbers(out)) == 1 and not (out / "checkpoints-nvfp4").exists()
