"""zerofp4.launch on several ranks, under torchrun and under mpirun."""

import subprocess
import time

import pytest
import torch
import torch.distributed as dist
from early import waits_for

from distributed.processes import device_for, find_mpirun, run_script, why_not
from distributed.run import on_ranks
from zerofp4 import launch

needs_mpirun = pytest.mark.skipif(why_not("mpirun") is not None, reason=str(why_not("mpirun")))


def check_world(world):
    """The record is right, and a collective reaches every rank; NCCL does not wait behind other kernels."""
    on_gpu = device_for(world.world_size) == "cuda"
    assert (world.backend, world.device.type) == (("nccl", "cuda") if on_gpu else ("gloo", "cpu"))
    if on_gpu:
        assert dist.group.WORLD._get_backend(world.device).options.is_high_priority_stream
    assert launch.init_process_group() == world
    assert (world.rank, world.world_size) == (dist.get_rank(), dist.get_world_size())
    places = [None] * world.world_size
    dist.all_gather_object(places, (world.rank, world.local_rank, world.device.index))
    assert places == [(rank, rank, rank if on_gpu else None) for rank in range(world.world_size)]
    total = torch.ones(1, device=world.device)
    dist.all_reduce(total)
    assert total.item() == world.world_size


def check_more_groups(world):
    """When two groups shared keys in the store, gloo connected to the addresses of the one before."""
    check_world(world)
    for _ in range(5):
        launch.destroy_process_group()
        check_world(launch.init_process_group())


@on_ranks(1, 2, 4, new_group=True)
def test_groups_one_after_the_other(world):
    check_more_groups(world)


@on_ranks(2, new_group=True)
@pytest.mark.parametrize("has_backend", [True, False])
def test_a_group_that_torch_made(world, has_backend):
    """With a backend for each kind of device, as torch recommends, or with none: ranks get their GPUs."""
    launch.destroy_process_group()
    backend = "cpu:gloo,cuda:nccl" if has_backend and world.device.type == "cuda" else None
    store = dist.PrefixStore(f"torch/{has_backend}", next(dist.rendezvous("env://"))[0])
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size)
    try:
        assert launch.init_process_group() == launch.init_process_group(world.backend) == world
    finally:
        dist.destroy_process_group()
        launch.init_process_group()


@on_ranks(2, launcher="mpirun")
def test_mpirun(world):
    """MPI is finalized before training, and rank 0, whose process holds the store, leaves last."""
    from mpi4py import MPI

    assert MPI.Is_finalized()
    check_more_groups(world)
    before = time.monotonic()
    if world.rank == 1:
        time.sleep(0.5)
    launch.destroy_process_group()
    took = time.monotonic() - before
    launch.init_process_group()
    assert took > 0.4


def program(text, **env):
    """Two ranks of it under mpirun, as work that begins early. env: what to change in their environment."""

    def run(folder):
        script = folder / "script.py"
        script.write_text(text)
        return run_script([str(script)], 2, "mpirun", time_limit=60, env=env)

    return run


HAS_MPI_OF_ITS_OWN = program(
    """
import os
import torch
from mpi4py import MPI
from zerofp4 import launch

rank = MPI.COMM_WORLD.rank
name = "PMI_SIZE" if "PMI_SIZE" in os.environ else "OMPI_COMM_WORLD_SIZE"
os.environ[name] = "3"  # as under the mpirun of an MPI other than mpi4py's
try:
    launch.init_process_group("gloo")
except RuntimeError as error:
    print(f"{error}\\n", end="", flush=True)
os.environ[name] = "2"
launch.init_process_group("gloo")
total = torch.ones(1)
torch.distributed.all_reduce(total)
print(f"local rank {launch.init_process_group().local_rank} of {total.item()}\\n", end="", flush=True)
launch.destroy_process_group()
print(f"sum {MPI.COMM_WORLD.allreduce(rank + 1)}\\n", end="", flush=True)
""",
    MPIR_CVAR_NOLOCAL="1",  # MPICH: as if each rank had a host of its own
    MASTER_ADDR="127.0.0.1",
)
TRIED_AGAIN = ["mpirun started 3 ranks and mpi4py sees 2: they belong to different MPIs", "sum 3"]


@pytest.mark.heavy
@needs_mpirun
@waits_for(HAS_MPI_OF_ITS_OWN)
def test_a_program_with_mpi_of_its_own(early):
    """It can try again: MPI is still there after errors, and after the group."""
    finished = early(HAS_MPI_OF_ITS_OWN)
    for message in TRIED_AGAIN:
        assert finished.output.count(message) == 2, finished.output
    assert finished.status == 0


@pytest.mark.heavy
@needs_mpirun
@waits_for(HAS_MPI_OF_ITS_OWN)
def test_ranks_on_several_hosts(early):
    version = subprocess.run([find_mpirun(), "--version"], capture_output=True, text=True).stdout
    if "HYDRA" not in version:
        pytest.skip("only MPICH can pretend that each rank has a host of its own")
    assert early(HAS_MPI_OF_ITS_OWN).output.count("local rank 0 of 2.0") == 2


WITHOUT_MPI4PY = program(
    """
import os, sys
sys.modules["mpi4py"] = None
import torch
from zerofp4 import launch

os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(20000 + os.getppid() % 10000)
for _ in range(3):
    world = launch.init_process_group("gloo")
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    launch.destroy_process_group()
print(f"local rank {world.local_rank} of {total.item()}\\n", end="", flush=True)
"""
)


@pytest.mark.heavy
@needs_mpirun
@waits_for(WITHOUT_MPI4PY)
def test_the_variables_of_mpi_suffice(early):
    """With MASTER_ADDR and MASTER_PORT."""
    finished = early(WITHOUT_MPI4PY)
    assert finished.status == 0, finished.output
    assert all(f"local rank {rank} of 2.0" in finished.output for rank in (0, 1)), finished.output


FAILS_LATER = program(
    """
import torch.distributed as dist
from zerofp4 import launch
world = launch.init_process_group("gloo")
if world.rank == 1:
    raise ValueError("rank 1 has had enough")
dist.barrier()
"""
)


@pytest.mark.heavy
@needs_mpirun
@waits_for(FAILS_LATER)
def test_a_rank_that_fails_later_does_not_leave_the_job_hanging(early):
    finished = early(FAILS_LATER)
    assert finished.status != 0
    assert "rank 1 has had enough" in finished.output
