"""python -m benchmarks fidelity: what docs/training.md says about the number of ranks."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks import llama
from benchmarks.arms import ARMS
from benchmarks.fidelity import SEGMENTS, Run
from distributed.run import on_ranks

CPU = torch.device("cpu")
WHOLE = llama.Preset(1, 64, 2, 128, 256, 32, 16, 2, 3e-3, 24)
"""Its step has two micro-batches in all."""
OWN = "of these ranks"


class Part:
    """The windows of one rank."""

    def __init__(self, order: llama.Order, rank: int, world_size: int):
        self.order, self.rank, self.world_size, self.windows = order, rank, world_size, order.windows

    def of_step(self, step: int) -> torch.Tensor:
        return self.order.of_step(step).chunk(self.world_size)[self.rank]


def outcome(arm: str, tokens: llama.Tokens, group: dist.ProcessGroup) -> tuple[str, dict]:
    """Of a run on the ranks of a group: the digest of its masters, and its losses."""
    size = group.size()
    part = dataclasses.replace(WHOLE, batch=WHOLE.batch // size, micro_batches=WHOLE.micro_batches // size)
    own = dataclasses.replace(ARMS[arm], optimizer=ARMS[arm].optimizer | {"process_group": group})
    with mock.patch.dict(llama.PRESETS, {OWN: part}), mock.patch.dict(ARMS, {OWN: own}):
        run = Run(OWN, 0, OWN, SEGMENTS, tokens, CPU)
        order = llama.Order(run.order.windows, WHOLE.batch, 0, CPU)
        run.order = Part(order, dist.get_rank(group), size)
        with tempfile.TemporaryDirectory() as folder:
            assert run.train(Path(folder) / "checkpoint.pt", math.inf)
    return run.record["digest"], run.record["final"]


@on_ranks(2)
@pytest.mark.parametrize("arm", ["bf16", "w16x16", "compact-w1x16-46"])
def test_the_bytes_of_two_ranks_are_those_of_one(world, arm):
    """If each rank has one micro-batch, sums have one order. On CPUs, where the world may be of GPUs."""
    tokens = llama.Tokens.of_standard_library(CPU)
    alone = [dist.new_group([rank], backend="gloo") for rank in range(world.world_size)][world.rank]
    assert outcome(arm, tokens, alone) == outcome(arm, tokens, dist.new_group(backend="gloo"))
