"""What examples/ holds runs, alone and on several ranks."""

from __future__ import annotations

import runpy

import torch
import torch.distributed as dist

from distributed.processes import ROOT
from distributed.run import on_ranks
from zerofp4 import launch


@on_ranks(1, 2)
def test_own_optimizer_step(world):
    """It compares its bytes itself. Its group is that of the ranks, and ends with it."""
    names = runpy.run_path(str(ROOT / "examples" / "own_optimizer_step.py"))
    assert names["world"] == world and not dist.is_initialized()
    assert names["y"].shape == (4, 256) and names["y"].dtype == torch.bfloat16
    launch.init_process_group()
