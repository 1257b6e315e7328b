"""Runs functions on ranks and returns, for each, what every rank returned or what went wrong."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from distributed.processes import RankProcesses, device_for

_START_SECONDS = 120.0  # many ranks import torch at once, on a small machine
_DUMP_SECONDS = 1.0  # a rank that hangs prints its stacks at the limit, and the test waits for them
_LOG_LINES = 60


class RanksFailed(AssertionError):
    """What went wrong on which rank, with the end of what it printed."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """How the ranks are started. Tests of one setting share a launch.

    launcher: "fork" starts ranks as torchrun does, but faster; ranks on GPUs get torchrun in its place.
    """

    world_size: int
    launcher: str = "fork"

    def __str__(self) -> str:
        return f"{self.launcher}-{self.world_size}"


@dataclasses.dataclass(frozen=True)
class Check:
    """function(world, **arguments) on every rank; `function` is "module:name", arguments can be pickled."""

    name: str
    function: str
    arguments: dict[str, Any]
    time_limit: float


def on_ranks(
    *world_sizes: int,
    nightly: Sequence[int] = (),
    launcher: str = "fork",
    time_limit: float = 60.0,
    new_group: bool = False,
) -> Callable:
    """Makes a pytest test of function(world, ...) that runs on every rank of each of these world sizes.

    nightly: further world sizes, for the nightly run alone.
    new_group: the test ends the process group and makes another, and so runs after all that do not: later,
        torch 2.11 crashes in init_device_mesh (https://github.com/pytorch/pytorch/pull/192109).

    `world` is the record of the process group. Other parameters come from pytest.mark.parametrize below this
    decorator, not from fixtures. A check that takes longer than time_limit seconds has failed. Tests of one
    world size share a launch and its process group: a test must leave the group usable.
    """

    def decorate(function: Callable) -> Callable:
        function.time_limit, function.new_group = time_limit, new_group
        settings = [Setting(world_size, launcher) for world_size in world_sizes]
        settings += [pytest.param(Setting(size, launcher), marks=pytest.mark.nightly) for size in nightly]
        return pytest.mark.parametrize("world", settings, ids=str)(function)  # conftest.py puts ranks there

    return decorate


def run_ranks(
    function: Callable,
    world_size: int,
    *,
    time_limit: float = 60.0,
    env: dict[str, str] | None = None,
    **arguments: Any,
) -> list[Any]:
    """What function(world, **arguments), of a module, returns on each of some ranks of its own.

    env: what to change in their environment.
    Raises RanksFailed when a rank raises, does not finish in time_limit seconds, or ends badly.
    """
    name = f"{function.__module__}:{function.__name__}"
    launch = Launch(Setting(world_size), [Check(name, name, arguments, time_limit)], env)
    try:
        return launch.outcome(name)
    finally:
        launch.stop()


class Launch:
    """The checks of one setting. The ranks start at the first question, unless run_ahead() was called before,
    and run ahead of the later ones.

    A check that fails or hangs ends its ranks; the checks after it get new ones.
    """

    def __init__(self, setting: Setting, checks: list[Check], env: dict[str, str] | None = None):
        self._setting = setting
        self._left = list(checks)
        self._env = env
        self._outcomes: dict[str, list[Any] | RanksFailed] = {}
        self._ranks: _Ranks | None = None
        self._starting = threading.Lock()

    def run_ahead(self, _: Path) -> None:
        """In another thread: starts the ranks, unless somebody has, and waits until they have ended."""
        ranks = self._start()
        while ranks is not None and ranks.processes.wait(1.0) is None:
            pass

    def _start(self) -> _Ranks | None:
        """The ranks, if they were started here: there were none, and there is something left for them."""
        with self._starting:
            if self._ranks is not None or not self._left:
                return None
            self._ranks = _Ranks(self._setting, self._left, self._env)
            return self._ranks

    def outcome(self, name: str) -> list[Any]:
        """What each rank returned from the check of that name. Waits; raises RanksFailed if it failed."""
        while name not in self._outcomes:
            self._start()
            check = self._left.pop(0)
            found = self._outcomes[check.name] = self._ranks.wait_for_check(check)
            if not self._ranks.have_joined():  # no check could run, nor would another try end otherwise
                self._outcomes.update({check.name: found for check in self._left})
                self._left.clear()
            if isinstance(found, RanksFailed) or not self._left:
                self.stop()
        found = self._outcomes[name]
        if isinstance(found, RanksFailed):
            raise found
        return found

    def stop(self) -> None:
        """Ends the ranks, if there are any. Checks that are left get new ones when they are asked for."""
        if self._ranks is not None:
            self._ranks.stop()
            self._ranks = None


class _Ranks:
    """One start of the ranks for a list of checks. worker.py says which files they leave."""

    def __init__(self, setting: Setting, checks: list[Check], env: dict[str, str] | None):
        self._setting, self._checks = setting, list(checks)
        self._folder = Path(tempfile.mkdtemp(prefix="zerofp4-ranks-"))
        (self._folder / "job.pickle").write_bytes(pickle.dumps(self._checks))
        program = ["-m", "distributed.worker", str(self._folder)]
        # Not in the root of the repository: python -m would import an unbuilt zerofp4 from there.
        places = {"cwd": self._folder, "output": self._folder / "launcher.log"}
        self.processes = RankProcesses(program, setting.world_size, setting.launcher, env, **places)

    def have_joined(self) -> bool:
        return all((self._folder / f"joined.{rank}").exists() for rank in range(self._setting.world_size))

    def wait_for_check(self, check: Check) -> list[Any] | RanksFailed:
        index, seconds = self._checks.index(check), _START_SECONDS
        begin, status, paths, has_joined = time.monotonic(), None, [None], False
        while not all(paths) and status is None and time.monotonic() < begin + seconds:
            if not has_joined and self.have_joined():
                has_joined, begin, seconds = True, time.monotonic(), check.time_limit + _DUMP_SECONDS
            status = self.processes.wait(0.01)  # before looking: what was left before the end is seen
            paths = outcome_paths(self._folder, index, self._setting.world_size)
        ended = f"hangs: not done in {check.time_limit:g} s"
        if status is not None:
            ended = f"ended early (status of the launcher: {status})"
        if all(path and path.suffix == ".passed" for path in paths):
            return [pickle.loads(path.read_bytes()) for path in paths]
        lines = [f"{check.name} on {self._setting} ({device_for(len(paths))})"]
        for rank, path in enumerate(paths):
            if path is None:
                lines.append(f"rank {rank}: {ended}. It printed:\n{self._tail(rank)}")
            else:
                lines.append(f"rank {rank}: {'passed' if path.suffix == '.passed' else path.read_text()}")
        return RanksFailed("\n".join(lines))

    def stop(self) -> None:
        self.processes.kill()
        shutil.rmtree(self._folder)

    def _tail(self, rank: int) -> str:
        """The end of what it printed; before it could, of what the launcher did."""
        own = self._folder / f"{rank}.log"
        text = (own if own.exists() else self._folder / "launcher.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-_LOG_LINES:])


def outcome_paths(folder: Path, index: int, world_size: int) -> list[Path | None]:
    """For each rank, the file that it has left about a check, if there is one."""
    paths = [[folder / f"{index}.{rank}.{how}" for how in ("passed", "failed")] for rank in range(world_size)]
    return [next((path for path in both if path.exists()), None) for both in paths]
