"""What a launcher leaves in the environment: this process's place among the ranks, and the device it gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class Place:
    """A process among the ranks of a job, and among those of its host."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int  # ranks on this host


def place_from_environment(environment: Mapping[str, str]) -> Place:
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
    return Place(values["RANK"], values["WORLD_SIZE"], values["LOCAL_RANK"], local_size)


def mpirun_size(environment: Mapping[str, str]) -> int | None:
    """The number of ranks that mpirun started: 1 without mpirun, None where only MPI knows it (PMIx)."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if name in environment:
            return int(environment[name])
    return None if "PMIX_RANK" in environment or "PMI_RANK" in environment else 1


def ranks_started(environment: Mapping[str, str]) -> int:
    """How many ranks a launcher started, this one among them: 1 without one, and where only MPI knows."""
    if "WORLD_SIZE" in environment:
        return place_from_environment({"RANK": "0", "LOCAL_RANK": "0", **environment}).world_size
    return mpirun_size(environment) or 1


def has_gpu_for_each(ranks: int) -> bool:
    """Would each of so many ranks on this host get a GPU, as NCCL needs it? Where not, who starts them sets
    CUDA_VISIBLE_DEVICES='' for them, and they run on the CPU with gloo.
    """
    return torch.cuda.is_available() and dist.is_nccl_available() and torch.cuda.device_count() >= ranks


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
