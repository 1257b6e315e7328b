"""The default process group, joined or made, and left again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

# Imported before there is a group: its functions have the default group as a default argument, and would keep
# it, and its threads, until the interpreter is torn down.
import torch.distributed.nn.functional

from zerofp4.launch.place import Place, ask_mpi, choose_device, find_place, ranks_started, read_variable

DEFAULT_TIMEOUT = timedelta(minutes=10)
_LEAVE_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class World:
    """This process's place among the ranks of the default process group, and the device of its tensors."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str


# A strong reference would keep the group's connections open after it is destroyed.
_joined: tuple[weakref.ref[dist.ProcessGroup], World] | None = None
_groups = 0  # made so far: each has keys of its own in the store, or gloo would find the last one's addresses
# Of ranks that mpirun started. The store is in rank 0's process and outlives the groups: other ranks may join
# the next one while rank 0 leaves the last. MPI cannot be initialized a second time.
_mpi_job: tuple[Place, dist.Store] | None = None


def init_process_group(backend: str | None = None, timeout: timedelta = DEFAULT_TIMEOUT) -> World:
    """Join the default process group of torch.distributed; make it if there is none.

    Under torchrun (RANK and WORLD_SIZE are set) this is torch's `env://`. So it is under mpirun, by the
    variables of Open MPI and MPICH, if MASTER_ADDR and MASTER_PORT are set; else the ranks meet by mpi4py.
    (A program that uses MPI itself imports mpi4py.MPI first, or we finalize MPI here.) Otherwise the process
    is alone, in a world of one. If a group exists already, its record is returned.

    backend: None for "nccl" if torch sees a GPU, else "gloo"; or any backend string of torch.
    timeout: how long a collective may wait for another rank before it raises.

    NCCL gets a high-priority stream, so that collectives do not wait behind queued kernels.

    Raises ValueError if the existing group has another backend than the one asked for, RuntimeError if a host
    has more ranks than GPUs (NCCL needs one each), and if mpi4py is missing or of another MPI than mpirun.
    """
    global _joined, _groups
    if not dist.is_available():
        raise RuntimeError("this torch was built without torch.distributed")
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
    world = World(place.rank, place.world_size, place.local_rank, device, backend)
    _joined = (weakref.ref(dist.group.WORLD), world)
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

    Under mpirun rank 0 waits until the others have left, 10 seconds at most: its process holds the store, and
    a slower rank may still be connecting to its peers.
    """
    global _joined
    if not dist.is_initialized():
        raise RuntimeError("destroy_process_group: there is no process group")
    ours = _own_world() is not None
    dist.destroy_process_group()
    _joined = None
    if not ours or _mpi_job is None:
        return
    (place, store), deadline = _mpi_job, time.monotonic() + _LEAVE_SECONDS
    # The store is gone if rank 0 failed: nobody is waiting then.
    with contextlib.suppress(RuntimeError):
        left = store.add(f"zerofp4/{_groups}/left", 1)
        while place.rank == 0 and left < place.world_size and time.monotonic() < deadline:
            time.sleep(0.01)
            left = store.add(f"zerofp4/{_groups}/left", 0)


def _own_world() -> World | None:
    """The record of the default process group, if it was made here."""
    if _joined is None or _joined[0]() is not dist.group.WORLD:
        return None
    return _joined[1]


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The backend of the group's collectives of tensors on this device, "nccl" or "gloo"; None without one.
    dist.get_backend() names only one of a group that has several.
    """
    try:
        return group._get_backend(device).name()
    except RuntimeError:
        return None


def _existing_world(backend: str | None) -> World:
    world, group = _own_world(), dist.group.WORLD
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
