"""scripts/train.py on ranks that share their start with other tests: checkpoints, and a tokenizer."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from train_cases import flip, read_numbers, train_here

from distributed.cases import shared_folder
from distributed.run import on_ranks
from zerofp4.distributed import PHASES


def train(world, out: Path, *options: str, status: int = 0) -> str:
    """A run of all ranks, and what this one printed: nothing but on rank 0."""
    finished = train_here(out, *options, world=world)
    assert finished.status == status, finished.output
    return finished.output


def damage(folder: Path) -> None:
    """A byte of the last checkpoint is another one, and a draft is left over."""
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000008", "step-00000012"]
    flip(folder / "step-00000012" / "__1_0.distcp", 1000)
    shutil.copytree(folder / "step-00000008", folder / "draft-00000010")


@pytest.mark.heavy
@on_ranks(2, time_limit=120.0)
@pytest.mark.parametrize("optimizer", ["fused_adamw", "sgd"])
def test_a_resumed_run_is_the_same_run(world, optimizer):
    """Its last checkpoint damaged, it goes on from the one before; with a whole one it has nothing to do."""
    out, first = shared_folder(world), world.rank == 0
    options = ["--steps", "12", "--checkpoint-every", "4", "--optimizer", optimizer]
    train(world, out, *options)
    if first:  # the others wait for it in the next run
        expected = read_numbers(out)
        damage(out / "checkpoints-nvfp4")
    said = train(world, out, *options, "--resume", "auto")
    if first:
        assert "step-00000012 is passed over: __1_0.distcp is not as it was saved" in said
        assert "step     9/12" in said and "step     8/12" not in said
        assert read_numbers(out) == expected
    said = train(world, out, *options, "--resume", "auto")
    if first:
        assert "after 12 steps" in said and "step     9/12" not in said
        assert read_numbers(out) == expected


@pytest.mark.heavy
@on_ranks(2, time_limit=120.0)
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--optimizer", "fused_adamw"),
        ("--optimizer", "fused_adamw", "--overlap", "both", "--micro-batches", "2"),
        ("--overlap", "forward", "--transport", "collective", "--clip", "0"),
        ("--overlap", "backward", "--accumulate", "sharded", "--micro-batches", "2"),
        ("--optimizer", "fused_adamw", "--hosts", "2"),  # of one rank each, which makes no difference
    ],
    ids=lambda options: " ".join(options).replace("--", "") or "defaults",
)
def test_the_phases_of_a_step(world, options):
    """Whatever travels when, each has its time, and the bytes that describe() says."""
    out, first = shared_folder(world), world.rank == 0
    said = train(world, out, "--steps", "6", "--profile-steps", "1", *options)
    if not first:
        return
    run = json.loads((out / "summary.json").read_text())["runs"]["nvfp4"]
    found, sent = run["phases_of_step"], run["sent_bytes_per_step"]
    assert found["steps"] == 1 and found["step_milliseconds"] > found["optimizer_milliseconds"] > 0
    assert found["phases"].keys() == {*PHASES, "other"}
    assert all(found["phases"][name]["milliseconds"] > 0 for name in PHASES)
    assert min(sent.values()) > 0
    assert {name: row["sent_bytes"] for name, row in found["phases"].items() if row["sent_bytes"]} == sent
    row = next(line for line in said.splitlines() if PHASES["weights"] in line)
    assert f"{sent['weights']:,}" in row


@pytest.mark.heavy
@on_ranks(2)
def test_hosts_that_are_not_those_of_the_ranks(world):
    with pytest.raises(SystemExit, match="argument --hosts: 2 ranks are not those of 3 hosts"):
        train(world, shared_folder(world), "--hosts", "3")


@pytest.mark.heavy
@on_ranks(2, time_limit=120.0)
def test_a_run_of_fully_shard_is_verified_and_goes_on(world):
    out, first = shared_folder(world), world.rank == 0
    options = ["--parallel", "fsdp2", "--steps", "4", "--checkpoint-every", "2", "--optimizer", "fused_adamw"]
    said = train(world, out, *options)
    if first:
        assert "8 NVFP4 weights equal the quantized and 8 others the rounded FP32 masters" in said
        assert "49,152 of them NVFP4 codes" in said
        assert "no phases of a step: they are those of fully_shard, and not told apart" in said
        expected = read_numbers(out)
        shutil.rmtree(out / "checkpoints-nvfp4" / "step-00000004")
    said = train(world, out, *options, "--resume", "auto")
    if first:
        assert "goes on from step 2" in said
        assert read_numbers(out) == expected


@pytest.mark.heavy
@on_ranks(2, time_limit=120.0)
def test_a_folder_in_use(world):
    out, first = shared_folder(world), world.rank == 0
    metrics = out / "metrics-nvfp4.jsonl"
    train(world, out, "--steps", "2", "--checkpoint-every", "1")
    before = metrics.read_bytes()
    said = train(world, out, "--steps", "3", status=1)
    assert not first or "--resume auto goes on with it, --overwrite deletes it" in said
    said = train(world, out, "--steps", "2", "--seed", "3", "--resume", "auto", status=1)
    assert not first or "is of another run: its seed is 0 and this run's 3" in said
    assert metrics.read_bytes() == before
    dist.barrier()  # the next run deletes it
    train(world, out, "--steps", "1", "--overwrite")
    assert len(read_numbers(out)) == 1 and not (out / "checkpoints-nvfp4").exists()


@pytest.mark.heavy
@pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="tokenizers is not installed")
@on_ranks(2, time_limit=120.0)
def test_ranks_share_a_tokenizer(world):
    out = shared_folder(world)
    said = train(world, out, "--steps", "3", "--tokenizer", "300")
    if world.rank == 0:
        assert "tokens/s" in said
        summary = json.loads((out / "summary.json").read_text())
        assert summary["text"]["vocabulary"] == 300 and summary["text"]["bytes_per_token"] > 1
        run = summary["runs"]["nvfp4"]
        expected = run["validation_loss"] / summary["text"]["bytes_per_token"]
        assert run["validation_loss_per_byte"] == pytest.approx(expected)


@pytest.mark.heavy
@on_ranks(2, time_limit=120.0)
def test_what_travels_in_backward_and_forward_passes_makes_the_same_run(world):
    """Of two micro-batches; sums in FP32 slices are another one."""
    runs = []
    for options in (
        [],
        ["--overlap", "backward"],
        ["--overlap", "both"],
        ["--overlap", "both", "--accumulate", "sharded", "--gradient-dtype", "float32"],
    ):
        out = shared_folder(world)
        train(world, out, "--steps", "4", "--micro-batches", "2", *options)
        runs.append(read_numbers(out) if world.rank == 0 else None)
    if world.rank == 0:
        assert runs[0] == runs[1] == runs[2]
        assert len(runs[3]) == len(runs[0])
