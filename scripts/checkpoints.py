"""The checkpoints of scripts/train.py: each whole or not there, verified before it is loaded, the last few
kept.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from zerofp4.distributed import CollectiveError, OwnError, Stage, exchange
from zerofp4.launch.process_group import World
from zerofp4.optim import ZeroFP4Optimizer

MANIFEST = "manifest.json"
IN_USE = ("metrics-*.jsonl", "summary.json", "checkpoints-*")
"""What a run leaves in its output folder."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used, or the output folder cannot. Raised by every rank."""


def add_checkpoint_options(parser: argparse.ArgumentParser, at_least: Callable) -> None:
    add = parser.add_argument
    add("--checkpoint-every", type=at_least(int, 0), default=0, help="steps; 0: never (default: 0)")
    add("--keep", type=at_least(int, 1), default=2, help="checkpoints that are kept (default: 2)")
    add("--resume", choices=["auto"], help="go on from the last whole checkpoint in --out, if there is one")
    add("--overwrite", action="store_true", help="delete what an earlier run left in --out")


def prepare_folder(options: argparse.Namespace, world: World) -> None:
    """Make the output folder. Raises CheckpointError, on every rank, for one that another run has used."""

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

    on_rank_0(make, f"preparing {options.out}", world)


def on_rank_0(function: Callable, stage: str, world: World) -> Any:
    """What it returns, on every rank; where it raises, every rank raises CheckpointError."""
    value, error = None, None
    if world.rank == 0:
        try:
            value = function()
        except CheckpointError as failure:
            error = OwnError(failure)
        except Exception as failure:  # whatever it is, the other ranks must hear of it
            error = OwnError(RuntimeError(f"{stage}: {type(failure).__name__}: {failure}"))
    try:
        return exchange(value, error, torch.distributed.group.WORLD, stage)[0]
    except CollectiveError:
        raise
    except Exception as failure:
        raise CheckpointError(str(failure).removeprefix("rank 0: ")) from failure


class Checkpoints:
    """Those of one model: `folder`/step-00000012, written after step 12.

    identity: what must be the same for a run to go on, by name. world: any size may load what any size saved.
    """

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any], world: World):
        self.folder, self.keep, self.identity, self.world = folder, keep, identity, world

    def save(
        self, step: int, model: nn.Module, optimizer: ZeroFP4Optimizer, progress: dict[str, Any]
    ) -> None:
        """Collective. progress: the same on every rank. Until all of it is written the folder has another
        name.
        """
        final = self.folder / f"step-{step:08d}"
        draft = self.folder / f"draft-{step:08d}"
        stage = f"writing checkpoint {final.name}"
        on_rank_0(lambda: shutil.rmtree(draft, ignore_errors=True), stage, self.world)
        state = {"model": model, "optimizer": optimizer}
        state["progress"] = (progress | {"identity": self.identity},)  # a tuple is saved as one value
        state["random"] = {self._rank_key(): random_state(self.world.device)}
        try:
            with Stage(stage, torch.distributed.group.WORLD):
                dcp.save(state, checkpoint_id=draft)
        except dcp.CheckpointException as error:
            raise CheckpointError(f"{final} cannot be written: {error}") from error

        def publish() -> None:
            text = json.dumps({path.name: digest(path) for path in sorted(draft.iterdir())}, indent=2)
            with (draft / MANIFEST).open("w") as file:
                file.write(text)
                os.fsync(file.fileno())
            if final.exists():  # damaged, or it would have been resumed from
                shutil.rmtree(final)
            draft.rename(final)
            for old in self._found()[self.keep :]:
                shutil.rmtree(old)

        on_rank_0(publish, stage, self.world)

    def resume(self, model: nn.Module, optimizer: ZeroFP4Optimizer) -> dict[str, Any] | None:
        """Load the last whole checkpoint and return its progress; None where there is none. Collective.

        Files that are not those that were saved are passed over, which is said; so are drafts. Raises
        CheckpointError, before anything is loaded, for a checkpoint of another run.
        """
        path = on_rank_0(self._last_whole, f"reading {self.folder}", self.world)
        if path is None:
            return None
        metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        state = {"progress": None}
        self._load(state, path)
        (progress,) = state["progress"]
        different = [name for name, value in self.identity.items() if progress["identity"].get(name) != value]
        if different:
            name = different[0]
            raise CheckpointError(
                f"{path} is of another run: its {name} is {progress['identity'].get(name)!r} and this run's "
                f"{self.identity[name]!r}"
            )
        state = {"model": model, "optimizer": optimizer}
        key = f"random.{self._rank_key()}.cpu"
        if key in metadata:  # saved in a world with such a rank
            state["random"] = {self._rank_key(): random_state(self.world.device)}
        self._load(state, path)
        if key in metadata:
            set_random_state(state["random"][self._rank_key()], self.world.device)
        return progress

    def _load(self, state: dict[str, Any], path: Path) -> None:
        try:
            with Stage(f"loading checkpoint {path.name}", torch.distributed.group.WORLD):
                dcp.load(state, checkpoint_id=path)
        except (dcp.CheckpointException, ValueError) as error:
            raise CheckpointError(f"{path} cannot be loaded: {error}") from error

    def _rank_key(self) -> str:
        return f"{self.world.rank} of {self.world.world_size}"

    def _found(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"), reverse=True)

    def _last_whole(self) -> Path | None:
        for path in self._found():
            problem = find_damage(path)
            if problem is None:
                return path
            print(f"{path} is passed over: {problem}", file=sys.stderr, flush=True)
        return None


def digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            found.update(block)
    return found.hexdigest()


def find_damage(path: Path) -> str | None:
    """Why the files of a checkpoint are not those that were saved; None where they are."""
    try:
        expected = json.loads((path / MANIFEST).read_text())
        for name, value in expected.items():
            if digest(path / name) != value:
                return f"{name} is not as it was saved"
        extra = {file.name for file in path.iterdir()} - expected.keys() - {MANIFEST}
        return f"{min(extra)} was not saved with it" if extra else None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Of the generators that stochastic rounding and dropout draw from."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
