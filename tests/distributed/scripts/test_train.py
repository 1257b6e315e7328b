"""scripts/train.py on ranks that share their start with other tests: checkpoints, and a tokenizer."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from cases.train import flip, read_numbers, train_here

from distributed.cases import shared_folder
from distributed.run import on_ranks
from zerofp4.distributed import PHASES

pytestmark = pytest.mark.nightly


def train(world, out: Path, *options: str, status: int = 0) -> str:
    """A run of all ranks, behind what each of them did before; what rank 0 printed, others print nothing."""
    dist.barrier()
    finished = train_here(out, *options, world=world)
    assert finished.status == status, finished.output
    said = [finished.output]
    dist.broadcast_object_list(said)
    return said[0]


@on_ranks(2, time_limit=120.0)
@pytest.mark.parametrize("optimizer", ["fused_adamw", "compact_adamw", "sgd"])
def test_a_resumed_run_is_the_same_run(world, optimizer):
    """Its last checkpoint damaged, it goes on from the one before; with a whole one it has nothing to do."""
    out = shared_folder(world)
    options = ["--steps", "6", "--checkpoint-every", "2", "--optimizer", optimizer]
    train(world, out, *options)
    expected, folder = read_numbers(out), out / "checkpoints-nvfp4"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000006"]
    dist.barrier()
    if world.rank == 0:
        flip(folder / "step-00000006" / "__1_0.distcp", 1000)
        shutil.copytree(folder / "step-00000004", folder / "draft-00000005")
    said = train(world, out, *options, "--resume", "auto")
    assert "step-00000006 is passed over: __1_0.distcp is not as it was saved" in said
    assert "step     5/6" in said and "step     4/6" not in said
    assert read_numbers(out) == expected
    said = train(world, out, *options, "--resume", "auto")
    assert "after 6 steps" in said and "step     5/6" not in said
    assert read_numbers(out) == expected


@on_ranks(2, time_limit=120.0)
def test_a_run_of_fully_shard_is_verified_and_goes_on(world):
    out = shared_folder(world)
    options = ["--parallel", "fsdp2", "--steps", "4", "--checkpoint-every", "2", "--optimizer", "fused_adamw"]
    said = train(world, out, *options)
    assert "8 NVFP4 weights equal the quantized and 8 others the rounded FP32 masters" in said
    assert "49,152 of them NVFP4 codes" in said
    assert "no phases of a step: they are those of fully_shard, and not told apart" in said
    expected = read_numbers(out)
    dist.barrier()
    if world.rank == 0:
        shutil.rmtree(out / "checkpoints-nvfp4" / "step-00000004")
    assert "goes on from step 2" in train(world, out, *options, "--resume", "auto")
    assert read_numbers(out) == expected


@on_ranks(2, time_limit=120.0)
@pytest.mark.parametrize(
    "options",
    [
        "",
        "--optimizer fused_adamw --overlap both --micro-batches 2",
        "--overlap backward --accumulate sharded --micro-batches 2",
    ],
)
def test_the_phases_of_a_step(world, options):
    """Whatever travels when, each has its time, and the bytes that describe() says."""
    out = shared_folder(world)
    said = train(world, out, "--steps", "6", "--profile-steps", "1", *options.split())
    run = json.loads((out / "summary.json").read_text())["runs"]["nvfp4"]
    found, sent = run["phases_of_step"], run["sent_bytes_per_step"]
    assert found["steps"] == 1 and found["step_milliseconds"] > found["optimizer_milliseconds"] > 0
    assert found["phases"].keys() == {*PHASES, "other"}
    assert all(found["phases"][name]["milliseconds"] > 0 for name in PHASES)
    assert min(sent.values()) > 0
    assert {name: row["sent_bytes"] for name, row in found["phases"].items() if row["sent_bytes"]} == sent
    row = next(line for line in said.splitlines() if PHASES["weights"] in line)
    assert f"{sent['weights']:,}" in row


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
    assert "goes on from step 2, with the learning rates of 3 steps in place of 2" in said
    assert len(read_numbers(out)) == 3
    train(world, out, "--steps", "1", "--overwrite")
    assert len(read_numbers(out)) == 1 and not (out / "checkpoints-nvfp4").exists()


@pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="tokenizers is not installed")
@on_ranks(2, time_limit=120.0)
def test_ranks_share_a_tokenizer(world):
    out = shared_folder(world)
    assert "tokens/s" in train(world, out, "--steps", "2", "--tokenizer", "300")
    summary = json.loads((out / "summary.json").read_text())
    assert summary["text"]["vocabulary"] == 300 and summary["text"]["bytes_per_token"] > 1
    run = summary["runs"]["nvfp4"]
    expected = run["validation_loss"] / summary["text"]["bytes_per_token"]
    assert run["validation_loss_per_byte"] == pytest.approx(expected)
