"""zerofp4.launch in one process: a world of one, and what is read from the surroundings."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist

import zerofp4
from zerofp4 import launch, testing

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")
LAUNCHER_VARIABLES += ("OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALRANKID")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """No launcher before, no process group after; gloo's interface is as it was."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", ""))
    if not os.environ["GLOO_SOCKET_IFNAME"]:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


# Alone


def test_alone_is_a_world_of_one():
    world = launch.init_process_group()
    assert launch.init_process_group() is world is launch.init_process_group(world.backend)
    assert (world.rank, world.world_size, world.local_rank) == (0, 1, 0)
    assert world.backend == ("nccl" if torch.cuda.is_available() else "gloo")
    assert world.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    launch.destroy_process_group()
    assert not dist.is_initialized()


def test_destroying_what_is_not_there():
    with pytest.raises(RuntimeError, match="there is no process group"):
        launch.destroy_process_group()


def test_seconds_as_a_timeout():
    with pytest.raises(TypeError, match=r"timeout must be a datetime\.timedelta, got 20"):
        launch.init_process_group(timeout=20)


def test_another_backend_than_the_existing_one():
    launch.init_process_group("gloo")
    with pytest.raises(ValueError, match=r"backend: 'nccl' asked for, but the existing .* 'gloo'"):
        launch.init_process_group("nccl")


def test_a_group_that_somebody_else_made():
    launch.init_process_group("gloo")
    dist.destroy_process_group()  # not through launch: its record is out of date now
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert launch.init_process_group() == launch.World(0, 1, 0, torch.device("cpu"), "gloo")
    launch.destroy_process_group()
    assert not dist.is_initialized()


def test_gloo_stays_on_the_loopback_interface_when_all_ranks_are_here(monkeypatch):
    launch.init_process_group("gloo")
    assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    launch.destroy_process_group()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")  # what the user chose stays
    launch.init_process_group("gloo")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo,lo"


# Several ranks without a group


def build_an_optimizer(weight, master):
    zerofp4.optim.ZeroFP4Optimizer([torch.nn.Parameter(weight)], torch.optim.SGD, lr=0.1)


ASK_FOR_THE_GROUP = [
    build_an_optimizer,
    lambda weight, master: zerofp4.CastPlan([weight], [master], [0]),
    lambda weight, master: zerofp4.cast_master_weights_to_nvfp4([weight], [master], [0]),
    lambda weight, master: zerofp4.all_gather_nvfp4([weight], [0], [weight.numel()]),
    lambda weight, master: testing.verify_weights({"weight": weight}, [None]),
]


@pytest.mark.parametrize("ask", ASK_FOR_THE_GROUP)
@pytest.mark.parametrize("started", [{"RANK": "1", "WORLD_SIZE": "2"}, {"PMI_RANK": "1", "PMI_SIZE": "2"}])
def test_ranks_without_a_group_do_not_each_go_on_alone(monkeypatch, started, ask):
    weight, master = zerofp4.empty((16, 32)), torch.ones(512)
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        RuntimeError, match=r"started 2 ranks .*: call zerofp4\.launch\.init_process_group\(\) first"
    ):
        ask(weight, master)
    for name in started:
        monkeypatch.setenv(name, str(int(name.endswith("SIZE"))))  # a launcher of one rank
    ask(weight, master)


# Devices


def test_more_ranks_than_gpus(monkeypatch, two_gpus):
    for name, value in (("RANK", 0), ("WORLD_SIZE", 4), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 4)):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(
        RuntimeError, match=r"4 ranks on this host and 2 visible GPUs.*CUDA_VISIBLE_DEVICES=''"
    ):
        launch.init_process_group()


def test_nccl_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RuntimeError, match="backend: 'nccl' needs a GPU, and torch sees none"):
        launch.init_process_group("nccl")


# What a launcher leaves in the environment


def test_variables_set_by_hand_and_wrong(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="LOCAL_RANK is not"):
        launch.init_process_group()
    monkeypatch.setenv("LOCAL_RANK", "-1")
    with pytest.raises(ValueError, match="LOCAL_RANK: must be a whole number, got '-1'"):
        launch.init_process_group()


def test_mpirun_of_one_rank_needs_no_mpi4py(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "1")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert launch.init_process_group("gloo").world_size == 1


def test_mpirun_without_mpi4py(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(RuntimeError, match=r"importing mpi4py, .*pip install mpi4py"):
        launch.init_process_group()
