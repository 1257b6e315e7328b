"""Runs functions on ranks and brings back, for each, what every rank returned or what went wrong."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pickle
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.processes import RankProcesses, device_for

_START_SECONDS = 120.0  # many ranks import torch at once, on a small machine
_END_SECONDS = 30.0
_GRACE_SECONDS = 6.0  # for the other ranks, once one has failed
_LOG_LINES = 60


class RanksFailed(AssertionError):
    """What went wrong on which rank, with the end of what it printed."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """How the ranks are started. Tests of one setting share a launch."""

    world_size: int
    launcher: str = "torchrun"

    def __str__(self) -> str:
        return f"{self.launcher}-{self.world_size}"


@dataclasses.dataclass(frozen=True)
class Check:
    """function(world, **arguments) on every rank; `function` is "module:name", arguments can be pickled."""

    name: str
    function: str
    arguments: dict[str, Any]
    time_limit: float


@dataclasses.dataclass
class Outcome:
    """What each rank returned, what each printed since it started, and what went wrong."""

    values: list[Any]
    outputs: list[str]
    problem: str | None = None


def on_ranks(*world_sizes: int, launcher: str = "torchrun", time_limit: float = 60.0) -> Callable:
    """Makes a pytest test of function(world, ...) that runs on every rank of each of these world sizes.

    `world` is the record of the process group. Other parameters come from pytest.mark.parametrize below this
    decorator, not from fixtures. A check that takes longer than time_limit seconds has failed. Tests of one
    world size share a launch and its process group: a test must leave the group usable.
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def test(run_on_ranks, **_):
            run_on_ranks()

        names = ["run_on_ranks", "setting", *list(inspect.signature(function).parameters)[1:]]
        test.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        )
        test.on_each_rank = function
        test.time_limit = time_limit
        settings = [Setting(world_size, launcher) for world_size in world_sizes]
        return pytest.mark.parametrize("setting", settings, ids=str)(test)

    return decorate


def run_ranks(
    function: Callable | str,
    world_size: int,
    launcher: str = "torchrun",
    *,
    time_limit: float = 60.0,
    env: dict[str, str] | None = None,
    **arguments: Any,
) -> Outcome:
    """function(world, **arguments) on ranks of its own: a module's function, or its "module:name".

    launcher: "torchrun", "mpirun", or "alone" for a world of one. env: what to change in their environment.
    Raises RanksFailed when a rank raises, does not finish in time_limit seconds, or ends badly.
    """
    if not isinstance(function, str):
        function = f"{function.__module__}:{function.__name__}"
    launch = Launch(Setting(world_size, launcher), [Check(function, function, arguments, time_limit)], env)
    try:
        return launch.outcome(function)
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
        self._outcomes: dict[str, Outcome] = {}
        self._ranks: _Ranks | None = None
        self._have_joined = False
        self._starting = threading.Lock()

    def run_ahead(self, _: Path) -> None:
        """In another thread: starts the ranks, unless somebody has, and waits until they have ended."""
        ranks = self._start()
        while ranks is not None and ranks.are_running():
            time.sleep(0.05)

    def _start(self) -> _Ranks | None:
        """The ranks, if they were started here: there were none, and there is something left for them."""
        with self._starting:
            if self._ranks is not None or not self._left:
                return None
            self._ranks, self._have_joined = _Ranks(self._setting, self._left, self._env), False
            return self._ranks

    def outcome(self, name: str) -> Outcome:
        """Waits for the check of that name. Raises RanksFailed if it failed."""
        while name not in self._outcomes:
            self._next()
        outcome = self._outcomes[name]
        if outcome.problem is not None:
            raise RanksFailed(outcome.problem)
        return outcome

    def stop(self) -> None:
        """Ends the ranks, if there are any. Checks that are left get new ones when they are asked for."""
        if self._ranks is not None:
            self._ranks.stop()
            self._ranks = None

    def _next(self) -> None:
        self._start()
        if not self._have_joined:
            problem = self._ranks.wait_for_start()
            self._have_joined = problem is None
            if problem is not None:  # no check could run, nor would another try end otherwise
                self._outcomes.update({check.name: Outcome([], [], problem) for check in self._left})
                self.stop()
                return
        check = self._left.pop(0)
        outcome = self._outcomes[check.name] = self._ranks.wait_for_check(check)
        if outcome.problem is None and not self._left:
            outcome.problem = self._ranks.wait_for_end()
        if outcome.problem is not None or not self._left:
            self.stop()


class _Ranks:
    """One start of the ranks for a list of checks. worker.py says which files they leave."""

    def __init__(self, setting: Setting, checks: list[Check], env: dict[str, str] | None):
        self._setting = setting
        self._names = [check.name for check in checks]
        self._folder = Path(tempfile.mkdtemp(prefix="zerofp4-ranks-"))
        job = [(check.function, check.arguments, check.time_limit) for check in checks]
        (self._folder / "job.pickle").write_bytes(pickle.dumps(job))
        program = ["-m", "distributed.worker", str(self._folder)]
        # Not in the root of the repository: python -m would import an unbuilt zerofp4 from there.
        self._processes = RankProcesses(
            program,
            setting.world_size,
            setting.launcher,
            env,
            cwd=self._folder,
            output=self._folder / "launcher.log",
        )

    def are_running(self) -> bool:
        return self._processes.poll() is None

    def wait_for_start(self) -> str | None:
        """None once every rank has joined the process group, else what happened."""
        ended = self._wait("rank.{}", _START_SECONDS)
        if ended is None:
            return None
        texts = [f"{path.name}:\n{_tail(path.read_text())}" for path in sorted(self._folder.glob("*.log"))]
        return "\n".join([f"{self._setting}: not every rank joined the process group: {ended}", *texts])

    def wait_for_check(self, check: Check) -> Outcome:
        index = self._names.index(check.name)
        ended = self._wait(f"{index}.{{}}.passed", check.time_limit, f"{index}.{{}}.failed")
        ranks = range(self._setting.world_size)
        passed, failed = self._read(f"{index}.{{}}.passed"), self._read(f"{index}.{{}}.failed")
        outputs = [self._log(rank) for rank in ranks]
        if len(passed) == len(ranks):
            return Outcome([pickle.loads(passed[rank]) for rank in ranks], outputs)
        lines = [f"{check.name} on {self._setting} ({device_for(len(ranks))})"]
        for rank in ranks:
            if rank in failed:
                lines.append(f"rank {rank}: {failed[rank].decode()}")
            elif rank in passed:
                lines.append(f"rank {rank}: passed")
            else:
                lines.append(f"rank {rank}: {ended}. It printed:\n{_tail(outputs[rank])}")
        return Outcome([], outputs, "\n".join(lines))

    def wait_for_end(self) -> str | None:
        """None when the ranks end by themselves and well, else what happened."""
        status = self._processes.wait(_END_SECONDS)
        if status == 0:
            return None
        if status is None:
            self._processes.dump_stacks(self._pids())
            status = f"still running after {_END_SECONDS:g} s"
        logs = [f"rank {rank}: {_tail(self._log(rank))}" for rank in range(self._setting.world_size)]
        return "\n".join(
            [f"{self._setting}: every check passed, then the launcher's status was {status}", *logs]
        )

    def stop(self) -> None:
        self._processes.kill()
        shutil.rmtree(self._folder)

    def _wait(self, done: str, seconds: float, failed: str | None = None) -> str | None:
        """Waits until each rank has left one of the files; None then, else why that will not happen."""
        deadline = time.monotonic() + seconds
        count = self._setting.world_size
        somebody_failed = False
        while True:
            status = self._processes.poll()  # before looking: what was left before the end is seen
            failures = len(self._read(failed)) if failed else 0
            if len(self._read(done)) + failures == count:
                return None
            if status is not None:
                return f"ended early (status of the launcher: {status})"
            if failures and not somebody_failed:
                somebody_failed = True
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            if time.monotonic() > deadline:
                self._processes.dump_stacks(self._pids())
                return (
                    "still running after another failed" if failures else f"hangs: not done in {seconds:g} s"
                )
            time.sleep(0.01)

    def _read(self, name: str) -> dict[int, bytes]:
        paths = {rank: self._folder / name.format(rank) for rank in range(self._setting.world_size)}
        return {rank: path.read_bytes() for rank, path in paths.items() if path.exists()}

    def _pids(self) -> list[int]:
        return [int(path.stem) for path in self._folder.glob("[0-9]*.log")]

    def _log(self, rank: int) -> str:
        pid = (self._folder / f"rank.{rank}").read_text()
        return (self._folder / f"{pid}.log").read_text(errors="replace")


def _tail(text: str) -> str:
    lines = text.splitlines()
    return "\n".join(lines[-_LOG_LINES:])
