"""torchtitan's own Trainer with gather_in_nvfp4, on two ranks of a CPU."""

from __future__ import annotations

import importlib.util
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.fsdp2 import Collectives

from distributed.run import run_ranks
from zerofp4.integrations import fsdp2

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks train on the CPU, and there is a GPU"),
]


def config_of(folder, steps, optimizer, degrees=None, **options) -> Any:
    """optimizer: that of gather_in_nvfp4, or "bf16" for torchtitan alone. degrees: of parallelism."""
    from torchtitan_on_cpu import debug_config

    from zerofp4.integrations.torchtitan import gather_in_nvfp4

    config = debug_config(folder, steps, **options)
    for name, degree in (degrees or {}).items():
        setattr(config.parallelism, name, degree)
    return config if optimizer == "bf16" else gather_in_nvfp4(config, optimizer)


def trained(world, folder, steps, optimizer=None, **options) -> tuple[list[float], dict, dict]:
    """The loss of each step, and this rank's masters and optimizer state before and after, as checksums. Goes
    on from the last checkpoint in the folder.
    """
    from torchtitan_on_cpu import started

    losses: list[float] = []
    with started(config_of(folder, steps, optimizer, **options), losses) as trainer:
        trainer.checkpointer.load()
        begun = checksums(trainer)
        trainer.train()
        return losses, begun, checksums(trainer)


def checksums(trainer) -> dict[str, int]:
    (model,) = trainer.model_parts
    values = {**model.state_dict(), **trainer.optimizers.state_dict()}
    local = {name: getattr(v, "_local_tensor", v) for name, v in values.items()}
    tensors = {name: v.float() for name, v in local.items() if isinstance(v, torch.Tensor)}
    return {name: zlib.crc32(tensor.numpy().tobytes()) for name, tensor in tensors.items()}


def ran(folder, steps, optimizer=None, **options) -> list[tuple[list[float], dict, dict]]:
    """trained() of both ranks, which have the same losses."""
    given = {"folder": folder, "steps": steps, "optimizer": optimizer, **options}
    found = run_ranks(trained, 2, time_limit=240.0, **given)
    assert found[0][0] == found[1][0]
    return found


def gathers_of_a_step(world, folder, optimizer) -> tuple[list[int], int, int]:
    """The bytes of each all-gather of weights in the first step, and this rank's elements of linear weights
    and of other parameters in each of the model's layers.
    """
    from torchtitan_on_cpu import started

    with started(config_of(folder, 1, optimizer), []) as trainer, Collectives() as calls:
        trainer.train()
    (model,) = trainer.model_parts
    converted = [weight.name for *_, weight in fsdp2.prepared_weights(model)]
    assert len(converted) == (0 if optimizer == "bf16" else 30)
    assert all(name.startswith("layers.") for name in converted)
    sizes = [size for _, size, _ in calls.named("allgather_base")]
    counts = set()
    for layer in model.layers.values():
        numels = [(p.to_local().numel(), p.dim()) for p in layer.parameters()]
        counts.add(
            tuple(sum(numel for numel, dim in numels if (dim == 2) == linear) for linear in (True, False))
        )
    return sizes, *counts.pop()


def seed(world, folder) -> None:
    """As torchtitan's train.py does with --checkpoint.create_seed_checkpoint."""
    from torchtitan_on_cpu import started

    config = config_of(folder, 4, "FusedAdamW", save_every=4)
    config.checkpoint.create_seed_checkpoint = True
    with started(config, []) as trainer:
        assert trainer.optimizers.attachments == []
        trainer.checkpointer.save(curr_step=0, last_step=True)


RUNS = ("bf16", None, "FusedAdamW")
"""Optimizers of config_of."""
STEPS, SAVED = 20, 10


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str | None, tuple[Path, list]]:
    """By optimizer, the folder of a run that saved in the middle, and what it returned."""
    folders = {optimizer: tmp_path_factory.mktemp(str(optimizer)) for optimizer in RUNS}
    return {how: (folder, ran(folder, STEPS, how, save_every=SAVED)) for how, folder in folders.items()}


def copy_of(source: Path, step: int, target: Path) -> Path:
    """A folder with one checkpoint of another one."""
    shutil.copytree(source / "checkpoint" / f"step-{step}", target / "checkpoint" / f"step-{step}")
    return target


def test_losses_fall_as_in_bf16(runs):
    plain, *ours = (runs[optimizer][1][0][0] for optimizer in RUNS)
    assert plain[0] > 8 and plain[-1] < 0.05
    for losses in ours:
        assert abs(losses[0] - plain[0]) < 0.01 and abs(losses[-1] - plain[-1]) < 0.01
        assert all(abs(loss / expected - 1) < 0.25 for loss, expected in zip(losses, plain, strict=True))


def test_layers_are_gathered_in_a_quarter_of_the_bytes(tmp_path):
    """In the forward and in the backward pass. Embeddings, norms and the head are gathered as before."""
    sizes, linear, other = run_ranks(gathers_of_a_step, 2, folder=tmp_path, optimizer="bf16")[0]
    found, *_ = run_ranks(gathers_of_a_step, 2, folder=tmp_path, optimizer=None)[0]
    layer = 2 * (linear + other)
    assert sizes.count(layer) == 12
    assert found == [linear // 2 + 2 * other if size == layer else size for size in sizes]


@pytest.mark.parametrize("optimizer", [None, "FusedAdamW"])
def test_a_run_goes_on_with_the_same_losses(runs, tmp_path, optimizer):
    source, whole = runs[optimizer]
    for mine, theirs in zip(
        ran(copy_of(source, SAVED, tmp_path), STEPS, optimizer, save_every=SAVED), whole, strict=True
    ):
        assert mine[0] == theirs[0][SAVED:]
        assert mine[2] == theirs[2]


@pytest.mark.parametrize(("saver", "loader"), [("bf16", "FusedAdamW"), ("FusedAdamW", "bf16")])
def test_checkpoints_of_adamw_in_bf16_and_of_fusedadamw_are_exchanged(runs, tmp_path, saver, loader):
    """Masters and moments are those that were saved."""
    source, whole = runs[saver]
    found = ran(copy_of(source, STEPS, tmp_path), STEPS + 2, loader, save_every=STEPS)
    for (losses, begun, _), (_, _, ended) in zip(found, whole, strict=True):
        assert begun == ended and max(losses) < 0.05


def test_a_run_begins_with_a_seed_checkpoint(tmp_path):
    run_ranks(seed, 1, folder=tmp_path / "seed")
    both = [
        ran(copy_of(tmp_path / "seed", 0, tmp_path / how), 2, how, save_every=2)[0][0]
        for how in ("bf16", "FusedAdamW")
    ]
    assert abs(both[0][0] - both[1][0]) < 0.01 and both[1][1] < both[1][0]


def test_slices_of_tensor_parallelism_are_converted(tmp_path):
    degrees = {"tensor_parallel_degree": 2}
    one, other = (ran(tmp_path, 5, how, degrees=degrees)[0][0] for how in ("bf16", "FusedAdamW"))
    assert abs(one[0] - other[0]) < 0.01 and abs(one[-1] / other[-1] - 1) < 0.05
