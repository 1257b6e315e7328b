"""Checkpoints of a run: each is complete or absent, and the last few are kept."""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from zerofp4.distributed import Stage
from zerofp4.launch import World
from zerofp4.optim import ZeroFP4Optimizer

IN_USE = ("metrics-*.jsonl", "summary.json", "checkpoints-*")
"""What a run leaves in its output folder."""


class CheckpointError(RuntimeError):
    """A checkpoint, or the output folder, cannot be used. Raised by every rank."""


def prepare_folder(options: argparse.Namespace, world: World) -> None:
    """Make the output folder. Collective. Raises CheckpointError for a folder that another run has used."""

    def make() -> None:
        options.out.mkdir(parents=True, exist_ok=True)
        left = [path for pattern in IN_USE for path in sorted(options.out.glob(pattern))]
        if left and not options.resume and not options.overwrite:
            raise CheckpointError(
                f"--out {options.out} has {left[0].name} of an earlier run: --resume auto goes on with it, "
                "--overwrite deletes it, another --out leaves it alone"
            )
        for path in left if options.overwrite and not options.resume else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    from_rank_0(make, world)


def from_rank_0(function: Callable[[], Any], world: World) -> Any:
    """What `function` returns on rank 0, on every rank; every rank raises CheckpointError if it raises."""
    told = [None, None]
    if world.rank == 0:
        try:
            told[0] = function()
        except (OSError, CheckpointError) as error:
            told[1] = str(error)
    if world.world_size > 1:
        dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise CheckpointError(told[1])
    return told[0]


class Checkpoints:
    """Those of one model: `folder`/step-00000012, written after step 12. Any world size loads what any saved.

    identity: what must be the same for a run to go on, by name.
    """

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any], world: World):
        self.folder, self.keep, self.identity, self.world = folder, keep, identity, world

    def save(
        self, step: int, model: nn.Module, optimizer: ZeroFP4Optimizer, progress: dict[str, Any]
    ) -> None:
        """Collective. progress: the same on every rank."""
        path = self.folder / f"step-{step:08d}"
        state = {"model": model, "optimizer": optimizer}
        state["progress"] = (progress | {"identity": self.identity},)  # a tuple is saved as one value
        try:
            with Stage(f"writing checkpoint {path.name}", dist.group.WORLD):
                dcp.save(state, checkpoint_id=path)
        except dcp.CheckpointException as error:
            raise CheckpointError(f"{path} cannot be written: {error}") from error

        def remove_older() -> None:
            for old in self._found()[self.keep :]:
                shutil.rmtree(old)

        from_rank_0(remove_older, self.world)

    def resume(self, model: nn.Module, optimizer: ZeroFP4Optimizer) -> dict[str, Any] | None:
        """Load the last checkpoint and return its progress, or None if there is none. Collective.

        Raises CheckpointError, before anything is loaded, for a checkpoint of another run.
        """
        path = from_rank_0(lambda: next(iter(self._found()), None), self.world)
        if path is None:
            return None
        state: dict[str, Any] = {"progress": None}
        self._load(state, path)
        (progress,) = state["progress"]
        for name, value in self.identity.items():
            found = progress["identity"].get(name)
            if found != value:
                raise CheckpointError(
                    f"{path} is of another run: its {name} is {found!r} and this run's {value!r}"
                )
        self._load({"model": model, "optimizer": optimizer}, path)
        return progress

    def _load(self, state: dict[str, Any], path: Path) -> None:
        try:
            with Stage(f"loading checkpoint {path.name}", dist.group.WORLD):
                dcp.load(state, checkpoint_id=path)
        except (dcp.CheckpointException, ValueError) as error:
            raise CheckpointError(f"{path} cannot be loaded: {error}") from error

    def _found(self) -> list[Path]:
        """The complete ones, the last one first: torch writes .metadata when all else is there."""
        return sorted((path.parent for path in self.folder.glob("step-*/.metadata")), reverse=True)
