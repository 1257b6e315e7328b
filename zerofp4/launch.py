"""Process groups: one call that works alone, under torchrun and under mpirun, by NCCL or else gloo."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import socket
import sys
import time
import weakref
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

# Imported before there is a group: its functions have the default group as a default argument, and would keep
# it, and its threads, until the interpreter is torn down.
import torch.distributed.nn.functional

DEFAULT_TIMEOUT = timedelta(minutes=10)
_LEAVE_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Place:
    """A process among the ranks of a job, and among those of its host."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int  # ranks on this host


@dataclasses.dataclass(frozen=True)
class World:
    """This process's place among the ranks of the default process group, and the device of its tensors."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str


_worlds: weakref.WeakKeyDictionary[dist.ProcessGroup, World] = weakref.WeakKeyDictionary()
"""Of the groups made here. A strong reference would keep a group's connections open after it is destroyed."""

_groups = 0
"""Made so far: each has keys of its own in the store, or gloo would find the last one's addresses."""

_mpi_job: tuple[Place, dist.Store] | None = None
"""Of ranks that mpirun started. The store is in rank 0's process; MPI cannot be initialized a second time."""


def init_process_group(backend: str | None = None, timeout: timedelta = DEFAULT_TIMEOUT) -> World:
    """Join the default process group of torch.distributed; make it if there is none.

    Under torchrun (RANK and WORLD_SIZE are set) this is torch's `env://`. So it is under mpirun, by the
    variables of Open MPI and MPICH, if MASTER_ADDR and MASTER_PORT are set; else the ranks meet by mpi4py.
    (A program that uses MPI itself imports mpi4py.MPI first, or we finalize MPI here.) Otherwise the process
    is alone, in a world of one. If a group exists already, its record is returned.

    backend: None for "nccl" if torch sees a GPU, else "gloo"; or any backend string of torch.
    timeout: how long a collective may wait for another rank before it raises.

    NCCL gets a high-priority stream, so that collectives do not wait behind queued kernels.

    Raises TypeError unless the timeout is a timedelta, ValueError if the existing group has another backend
    than the one asked for, RuntimeError if a host has more ranks than GPUs (NCCL needs one each), and if
    mpi4py is missing or of another MPI than mpirun.
    """
    global _groups
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, got {timeout!r}")
    if dist.is_initialized():
        return _existing_world(backend)
    place, store = _meet(backend, timeout)
    backend, device = choose_device(backend, place)
    if place.local_size == place.world_size:
        _use_loopback()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _groups += 1
    # torchrun keeps its store when it restarts ranks: those that were killed left their addresses in it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"zerofp4/{attempt}/{_groups}", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
            pg_options=_nccl_options(timeout) if "nccl" in backend else None,
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"joining the process group failed on rank {place.rank} of {place.world_size}: {error}"
        ) from error
    _worlds[dist.group.WORLD] = world = World(place.rank, place.world_size, place.local_rank, device, backend)
    return world


def _meet(backend: str | None, timeout: timedelta) -> tuple[Place, dist.Store]:
    """This rank's place, and the store by which ranks find each other."""
    global _mpi_job
    if _mpi_job is not None:
        return _mpi_job
    is_mpi = not {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    started = ranks_started(os.environ)
    if is_mpi and started == 1:
        return Place(0, 1, 0, 1), dist.HashStore()
    if is_mpi and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        _mpi_job = ask_mpi(started, timeout)
        return _mpi_job
    place = find_place(os.environ)
    choose_device(backend, place)  # raises before this rank waits for others
    store, _, _ = next(dist.rendezvous("env://", place.rank, place.world_size, timeout=timeout))
    store.set_timeout(timeout)
    if is_mpi:
        _mpi_job = place, store
    return place, store


def _nccl_options(timeout: timedelta) -> dist.ProcessGroup.Options:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # torch warns where the two differ
    return options


def destroy_process_group() -> None:
    """Leave the default process group. Raises RuntimeError if there is none.

    Under mpirun rank 0 waits up to 10 seconds for the others: its process holds the store, and a slower rank
    may still be connecting to its peers.
    """
    if not dist.is_initialized():
        raise RuntimeError("destroy_process_group: there is no process group")
    ours = dist.group.WORLD in _worlds
    gc.collect()  # a wrapper of DDP in a cycle keeps gloo's threads, in which torch may abort at exit
    dist.destroy_process_group()
    if not ours or _mpi_job is None:
        return
    (place, store), deadline = _mpi_job, time.monotonic() + _LEAVE_SECONDS
    # The store is gone if rank 0 failed: nobody is waiting then.
    with contextlib.suppress(RuntimeError):
        left = store.add(f"zerofp4/{_groups}/left", 1)
        while place.rank == 0 and left < place.world_size and time.monotonic() < deadline:
            time.sleep(0.01)
            left = store.add(f"zerofp4/{_groups}/left", 0)


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The backend of the group's collectives on this device; None without one."""
    try:
        return group._get_backend(device).name()
    except RuntimeError:
        return None


def _existing_world(backend: str | None) -> World:
    group = dist.group.WORLD
    world = _worlds.get(group)
    device = torch.device("cpu") if world is None else world.device
    if world is None and torch.cuda.is_available() and backend_for(group, torch.device("cuda")) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    found = backend_for(group, device)
    if backend not in (None, found, dist.get_backend(), dist.get_backend_config()):
        raise ValueError(f"backend: {backend!r} asked for, but the existing process group uses {found!r}")
    if world is not None:
        return world
    local_rank, world_size = read_variable(os.environ, "LOCAL_RANK"), dist.get_world_size()
    if local_rank is None and world_size > 1:
        raise RuntimeError(
            f"the existing process group has {world_size} ranks, and LOCAL_RANK is not set: this rank's "
            "place on its host is unknown"
        )
    return World(dist.get_rank(), world_size, local_rank or 0, device, found)


def _use_loopback() -> None:
    """With all ranks on one host gloo talks over loopback, whatever the host's name resolves to."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


# The place of a process

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
    """This rank's place by mpi4py, and a store in rank 0's process. MPI is finalized again, unless the
    program started it: else ranks would wait in MPI_Finalize for one that fails.
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
