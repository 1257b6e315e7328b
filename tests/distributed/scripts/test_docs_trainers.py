"""The programs of docs/trainers.md on two ranks of torchrun, which are in no process group yet."""

import pytest
import torch
import torch.distributed as dist
from cases.docs import ROOT, Brought, Ran, programs, run
from cases.trainers import CHECKS, PACKAGES, causal_loss, with_fsdp_on_cpus

from distributed.cases import shared_folder
from distributed.run import on_ranks
from zerofp4 import launch


@on_ranks(2, time_limit=120.0, new_group=True)
@pytest.mark.heavy
@pytest.mark.parametrize("number", range(len(CHECKS)), ids=[check.__name__ for check in CHECKS])
def test_the_program_runs_on_two_ranks(world, number):
    """It joins them by itself, or its framework does, and leaves one model."""
    for package in PACKAGES:
        pytest.importorskip(package, reason=f"{package} is not installed")
    if world.device.type != "cpu":
        pytest.skip("the model of these programs is on the CPU")
    brought = Brought(shared_folder(world) / "folder")
    launch.destroy_process_group()
    torch.manual_seed(world.rank)
    with pytest.MonkeyPatch.context() as patch, with_fsdp_on_cpus(patch):
        ran = Ran(run(programs(ROOT / "docs" / "trainers.md")[number], brought), brought)
        dist.barrier()  # rank 0 has written its files
        CHECKS[number](ran)
        losses = [None] * world.world_size
        dist.all_gather_object(losses, causal_loss(ran))
    assert len(losses) == 2 and losses[0] == losses[1]
    dist.destroy_process_group()
    launch.init_process_group()
