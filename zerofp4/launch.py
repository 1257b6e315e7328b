"""Process groups: one call that works alone, under torchrun and under mpirun.

NCCL is used where there are GPUs (one for each rank of a host) and gloo where there are none. MPI only starts
the ranks and carries the address of a TCP store. It is finalized before training begins, so that a rank that
fails later cannot leave the others waiting for it in MPI_Finalize.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import sys
import time
import weakref
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

# Imported before there is a group: its functions have the default group as a default argument. Where
# something else (torch.optim) imports it later, they keep that group, and its threads, until the interpreter
# is torn down.
import torch.distributed.nn.functional

DEFAULT_TIMEOUT = timedelta(minutes=10)

# Under mpirun the store is in rank 0's process: how long rank 0 waits for the others to leave the group.
_LEAVE_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class World:
    """This process's place among the ranks of the default process group, and the device of its tensors."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str


@dataclasses.dataclass(frozen=True)
class _Place:
    rank: int
    world_size: int
    local_rank: int
    local_size: int  # ranks on this host


# A strong reference would keep the group's connections open after it is destroyed.
_joined: tuple[weakref.ref[dist.ProcessGroup], World] | None = None
# What MPI told us. It outlives the process group, because MPI cannot be initialized a second time.
_mpi_job: tuple[_Place, dist.Store] | None = None
_groups = 0  # made so far: each has keys of its own in the store, or gloo would find the last one's addresses


def init_process_group(backend: str | None = None, timeout: timedelta = DEFAULT_TIMEOUT) -> World:
    """Joins the default process group of torch.distributed, making it where there is none.

    Under torchrun (RANK and WORLD_SIZE are set) this is torch's `env://`. Under mpirun of MPICH or Open MPI,
    mpi4py says who is who; a program that uses MPI itself imports mpi4py.MPI first, or we finalize MPI here.
    Otherwise the process is alone: a world of one over a store inside the process, with every collective.
    When a group exists already, its record is returned.

    backend: None for "nccl" where torch sees a GPU and "gloo" where not, or any backend string of torch.
    timeout: how long a collective may wait for another rank before it raises.

    Raises ValueError when the existing group has another backend than the one asked for. Raises RuntimeError
    when a host has more ranks than GPUs (NCCL needs one each), when mpi4py is missing or is not of mpirun's
    MPI, and when the ranks choose different backends; under mpirun every rank raises the same.
    """
    global _joined, _groups
    if not dist.is_available():
        raise RuntimeError("this torch was built without torch.distributed")
    if dist.is_initialized():
        return _existing_world(backend)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        place = _place_from_environment(os.environ)
        backend, device = _choose_device(backend, place)
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
    elif _mpirun_size(os.environ) != 1:
        place, backend, device, store = _join_mpi_job(backend, timeout)
    else:
        place, store = _Place(0, 1, 0, 1), dist.HashStore()
        backend, device = _choose_device(backend, place)

    if place.local_size == place.world_size:
        _use_loopback()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _groups += 1
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"zerofp4/{_groups}", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    world = World(place.rank, place.world_size, place.local_rank, device, backend)
    _joined = (weakref.ref(dist.group.WORLD), world)
    return world


def destroy_process_group() -> None:
    """Leaves the default process group. Raises RuntimeError when there is none.

    Under mpirun rank 0 waits here, 10 seconds at most, until the others have left: its process holds the
    store, and a slower rank may still be connecting to its peers.
    """
    global _joined
    if not dist.is_initialized():
        raise RuntimeError("destroy_process_group: there is no process group")
    ours = _own_world() is not None
    dist.destroy_process_group()
    if ours and _mpi_job is not None:
        _leave_mpi_job(*_mpi_job)
    _joined = None


def _own_world() -> World | None:
    """The record of the default process group, if it was made here."""
    if _joined is None or _joined[0]() is not dist.group.WORLD:
        return None
    return _joined[1]


def _existing_world(backend: str | None) -> World:
    world = _own_world()
    found = dist.get_backend() if world is None else world.backend
    if backend not in (None, found):
        raise ValueError(f"backend: {backend!r} asked for, but the existing process group uses {found!r}")
    if world is not None:
        return world
    # A group that somebody else made. LOCAL_RANK is torchrun's name; the others are MPICH's and Open MPI's.
    names = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK")
    local_rank = next((os.environ[name] for name in names if name in os.environ), None)
    world_size = dist.get_world_size()
    if local_rank is None and world_size > 1:
        raise RuntimeError(
            f"the existing process group has {world_size} ranks, and none of {', '.join(names)} is set: "
            "this rank's place on its host is unknown"
        )
    on_gpu = "nccl" in found
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return World(dist.get_rank(), world_size, int(local_rank or 0), device, found)


def _place_from_environment(environment: Mapping[str, str]) -> _Place:
    """The place that torchrun, or a person who sets its variables by hand, gave this process."""
    values = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        text = environment.get(name)
        if text is None and name == "LOCAL_RANK":
            raise RuntimeError("RANK and WORLD_SIZE are set and LOCAL_RANK is not: set it, or use torchrun")
        if text is not None and not text.isdecimal():
            raise ValueError(f"{name}: must be a whole number, got {text!r}")
        values[name] = int(text or 0)
    # Without LOCAL_WORLD_SIZE the ranks known to be on this host are those up to our own.
    local_size = max(values["LOCAL_WORLD_SIZE"], values["LOCAL_RANK"] + 1)
    return _Place(values["RANK"], values["WORLD_SIZE"], values["LOCAL_RANK"], local_size)


def _choose_device(backend: str | None, place: _Place) -> tuple[str, torch.device]:
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


def _use_loopback() -> None:
    """With all ranks on one host gloo talks over loopback, whatever the host's name resolves to."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _mpirun_size(environment: Mapping[str, str]) -> int | None:
    """The number of ranks that mpirun started: 1 without mpirun, None where only MPI knows it (PMIx)."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if name in environment:
            return int(environment[name])
    return None if "PMIX_RANK" in environment or "PMI_RANK" in environment else 1


def _join_mpi_job(backend: str | None, timeout: timedelta) -> tuple[_Place, str, torch.device, dist.Store]:
    global _mpi_job
    if _mpi_job is None:
        place, backend, device, store = _ask_mpi(backend, timeout)
        _mpi_job = (place, store)
    else:
        place, store = _mpi_job
        backend, device = _choose_device(backend, place)
    return place, backend, device, store


def _ask_mpi(backend: str | None, timeout: timedelta) -> tuple[_Place, str, torch.device, dist.Store]:
    """Learns this rank's place, agrees with the others on the backend, and connects to rank 0's store."""
    MPI, finalize = _start_mpi()
    problem = device = store = address = None
    try:
        comm = MPI.COMM_WORLD
        _check_same_mpi(MPI)
        local = comm.Split_type(MPI.COMM_TYPE_SHARED)
        place = _Place(comm.rank, comm.size, local.rank, local.size)
        local.Free()
        try:
            backend, device = _choose_device(backend, place)
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
    expected, size = _mpirun_size(os.environ), MPI.COMM_WORLD.size
    if expected not in (None, size):
        library = " ".join(re.split(r"[,\n\0]", MPI.Get_library_version())[0].split())
        raise RuntimeError(
            f"mpirun started {expected} ranks and mpi4py ({library}) sees {size}: they belong to different "
            "MPIs. Use the mpirun of mpi4py's MPI, or start the ranks with torchrun"
        )


def _serve_store(place: _Place, timeout: timedelta) -> tuple[dist.Store, tuple[str, int]]:
    """Rank 0's store and the (host, port) to reach it at; the system picks a free port as it binds it."""
    host = "127.0.0.1" if place.local_size == place.world_size else _reachable_address()
    store = dist.TCPStore(host, 0, place.world_size, is_master=True, timeout=timeout, wait_for_workers=False)
    return store, (host, store.port)


def _reachable_address() -> str:
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


def _leave_mpi_job(place: _Place, store: dist.Store) -> None:
    key = f"zerofp4/{_groups}/left"
    deadline = time.monotonic() + _LEAVE_SECONDS
    try:
        left = store.add(key, 1)
        while place.rank == 0 and left < place.world_size and time.monotonic() < deadline:
            time.sleep(0.01)
            left = store.add(key, 0)
    except RuntimeError:
        return  # rank 0 failed, and the store ended with its process: nobody is waiting
