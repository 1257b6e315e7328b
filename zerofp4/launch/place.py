"""A process's place among the ranks, as the variables of a launcher say, and the device it gets."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class Place:
    """A process among the ranks of a job, and among those of its host."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int  # ranks on this host


_VARIABLES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
"""By torch's variable, as torchrun sets it, those of Open MPI, MPICH and PMIx."""


def read_variable(environment: Mapping[str, str], name: str) -> int | None:
    """A variable of torch, or of MPI if torch's is not set; None without either."""
    for called in (name, *_VARIABLES[name]):
        text = environment.get(called)
        if text is not None:
            if not text.isdecimal():
                raise ValueError(f"{called}: must be a whole number, got {text!r}")
            return int(text)
    return None


def ranks_started(environment: Mapping[str, str]) -> int | None:
    """How many ranks a launcher started, this one among them: 1 without one, None where only MPI knows."""
    rank, size = read_variable(environment, "RANK"), read_variable(environment, "WORLD_SIZE")
    if size is None:
        return None if environment.keys() & {"PMI_RANK", "PMIX_RANK"} else 1
    return 1 if rank is None else size


def find_place(environment: Mapping[str, str]) -> Place:
    """The place that a launcher, or a person who sets torch's variables by hand, gave this process."""
    rank, size, local_rank, local_size = (read_variable(environment, name) for name in _VARIABLES)
    if local_rank is None:
        raise RuntimeError("RANK and WORLD_SIZE are set and LOCAL_RANK is not: set it, or use torchrun")
    # Without LOCAL_WORLD_SIZE the ranks known to be on this host are those up to our own.
    return Place(rank, size, local_rank, max(local_size or 0, local_rank + 1))


def ask_mpi(expected: int | None, timeout: timedelta) -> tuple[Place, dist.Store]:
    """This rank's place by mpi4py, and a store in rank 0's process.

    MPI is finalized again, unless the program started it: else a rank that fails later would leave the others
    waiting in MPI_Finalize. expected: the number of ranks that mpirun started, if it is known.
    """
    ours = "mpi4py.MPI" not in sys.modules
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there and finds no MPI library
        raise RuntimeError(
            f"mpirun started this process, and importing mpi4py, which the ranks meet by, fails: {error}. "
            "Install it (pip install mpi4py), set MASTER_ADDR and MASTER_PORT, or start the ranks by torchrun"
        ) from error
    if MPI.Is_finalized():
        raise RuntimeError("init_process_group() needs MPI, and MPI was finalized before: call it earlier")
    if not MPI.Is_initialized():
        MPI.Init()
        ours = True
    store = address = None
    try:
        comm = MPI.COMM_WORLD
        if expected not in (None, comm.size):  # each would be a world of one
            raise RuntimeError(
                f"mpirun started {expected} ranks and mpi4py sees {comm.size}: they belong to different "
                "MPIs. Use the mpirun of mpi4py's MPI, or start the ranks with torchrun"
            )
        local = comm.Split_type(MPI.COMM_TYPE_SHARED)
        place = Place(comm.rank, comm.size, local.rank, local.size)
        local.Free()
        if place.rank == 0:
            host = _own_address(place)
            store = dist.TCPStore(host, 0, place.world_size, True, timeout, wait_for_workers=False)
            address = host, store.port
        host, port = comm.bcast(address)
    finally:
        if ours:
            MPI.Finalize()
    if store is None:
        store = dist.TCPStore(host, port, place.world_size, False, timeout)
    return place, store


def _own_address(place: Place) -> str:
    """An address of this host that the other ranks can reach."""
    if "MASTER_ADDR" in os.environ or place.local_size == place.world_size:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 1))  # sends nothing: connecting a UDP socket looks up its route
        return probe.getsockname()[0]


def choose_device(backend: str | None, place: Place) -> tuple[str, torch.device]:
    """The backend, and this rank's device: GPU number local_rank for NCCL, the CPU for any other."""
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if "nccl" not in backend:
        return backend, torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise RuntimeError(f"backend: {backend!r} needs a GPU, and torch sees none")
    if place.local_size > gpus:
        raise RuntimeError(
            f"{place.local_size} ranks on this host and {gpus} visible GPU{'s' * (gpus > 1)}: NCCL needs one "
            f"each. Start at most {gpus} here, or set CUDA_VISIBLE_DEVICES='' to run on the CPU with gloo"
        )
    return backend, torch.device("cuda", place.local_rank)
