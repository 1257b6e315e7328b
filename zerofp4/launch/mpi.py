"""The ranks that mpirun started: MPI says who is who and carries the address of a TCP store, no more.

It is finalized before training begins, so that a rank that fails later cannot leave the others waiting for it
in MPI_Finalize.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from zerofp4.launch.place import Place, choose_device, mpirun_size

# The store is in rank 0's process: how long rank 0 waits for the others to leave the group.
_LEAVE_SECONDS = 10.0

# What MPI told us. It outlives the process group, because MPI cannot be initialized a second time.
_job: tuple[Place, dist.Store] | None = None


def join_job(backend: str | None, timeout: timedelta) -> tuple[Place, str, torch.device, dist.Store]:
    """This rank's place, the backend, this rank's device, and the store. Asks MPI once, the first time."""
    global _job
    if _job is None:
        place, backend, device, store = _ask_mpi(backend, timeout)
        _job = (place, store)
    else:
        place, store = _job
        backend, device = choose_device(backend, place)
    return place, backend, device, store


def leave_job(group: int) -> None:
    """Rank 0 waits until the others have left group number `group`, if MPI started this process."""
    if _job is None:
        return
    place, store = _job
    key = f"zerofp4/{group}/left"
    deadline = time.monotonic() + _LEAVE_SECONDS
    try:
        left = store.add(key, 1)
        while place.rank == 0 and left < place.world_size and time.monotonic() < deadline:
            time.sleep(0.01)
            left = store.add(key, 0)
    except RuntimeError:
        return  # rank 0 failed, and the store ended with its process: nobody is waiting


def _ask_mpi(backend: str | None, timeout: timedelta) -> tuple[Place, str, torch.device, dist.Store]:
    """Learns this rank's place, agrees with the others on the backend, and connects to rank 0's store."""
    MPI, finalize = _start_mpi()
    problem = device = store = address = None
    try:
        comm = MPI.COMM_WORLD
        _check_same_mpi(MPI)
        local = comm.Split_type(MPI.COMM_TYPE_SHARED)
        place = Place(comm.rank, comm.size, local.rank, local.size)
        local.Free()
        try:
            backend, device = choose_device(backend, place)
            if place.rank == 0:
                store, address = _serve_store(place, timeout)
        except Exception as error:
            # Raised below: the other ranks are on their way into the allgather, and all must learn of it.
            problem = f"rank {place.rank}: {error}"
        reports = comm.allgather((problem, backend, address))
    finally:
        if finalize:
            MPI.Finalize()
    for rank, (problem, other, _) in enumerate(reports):
        if problem is not None:
            raise RuntimeError(problem)
        if other != reports[0][1]:
            raise RuntimeError(
                "backend: must be the same on all ranks, but "
                f"rank 0 has {reports[0][1]!r} and rank {rank} has {other!r}"
            )
    if store is None:
        host, port = reports[0][2]
        store = dist.TCPStore(host, port, place.world_size, is_master=False, timeout=timeout)
    return place, backend, device, store


def _start_mpi():
    """mpi4py's MPI module, initialized, and whether it was initialized here and so is ours to finalize."""
    ours = "mpi4py.MPI" not in sys.modules
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there and finds no MPI library
        raise RuntimeError(
            f"mpirun started this process, and importing mpi4py, which the ranks meet by, fails: {error}. "
            "Install it (pip install mpi4py), or start the ranks with torchrun"
        ) from error
    if MPI.Is_finalized():
        raise RuntimeError(
            "init_process_group() needs MPI once, and MPI was finalized before: call it earlier"
        )
    if not MPI.Is_initialized():
        MPI.Init()
        ours = True
    return MPI, ours


def _check_same_mpi(MPI) -> None:
    # Under another MPI's mpirun every process is its own world of one: training would run N times, unshared.
    expected, size = mpirun_size(os.environ), MPI.COMM_WORLD.size
    if expected not in (None, size):
        library = " ".join(re.split(r"[,\n\0]", MPI.Get_library_version())[0].split())
        raise RuntimeError(
            f"mpirun started {expected} ranks and mpi4py ({library}) sees {size}: they belong to different "
            "MPIs. Use the mpirun of mpi4py's MPI, or start the ranks with torchrun"
        )


def _serve_store(place: Place, timeout: timedelta) -> tuple[dist.Store, tuple[str, int]]:
    """Rank 0's store and the (host, port) to reach it at; the system picks a free port as it binds it."""
    host = "127.0.0.1" if place.local_size == place.world_size else reachable_address()
    store = dist.TCPStore(host, 0, place.world_size, is_master=True, timeout=timeout, wait_for_workers=False)
    return store, (host, store.port)


def reachable_address() -> str:
    """This host's address for other hosts: MASTER_ADDR, else its name's, else its default route's."""
    if "MASTER_ADDR" in os.environ:
        return os.environ["MASTER_ADDR"]
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        found = []
    for *_, (address, _) in found:
        if not address.startswith("127."):  # some systems map their own name to 127.0.1.1
            return address
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("10.255.255.255", 1))  # sends nothing: connecting a UDP socket looks up its route
            return probe.getsockname()[0]
    except OSError as error:
        raise RuntimeError(
            f"host {socket.gethostname()!r} has no address for other hosts ({error}): set MASTER_ADDR to one"
        ) from error
