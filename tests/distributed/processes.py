"""Starts ranks in an environment of their own, and ends every one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import torch
from helpers import why_no_cuda

ROOT = Path(__file__).resolve().parents[2]

# What a launcher leaves in the environment of what it starts: a launch made from there must not see it.
_LEFT_BY_LAUNCHERS = (
    *("RANK=", "WORLD_SIZE=", "MASTER_ADDR=", "MASTER_PORT=", "GLOO_SOCKET_IFNAME="),
    *("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "MPI_LOCAL", "OMPI_COMM_", "PMI_", "PMIX_"),
)

# Both launchers put each rank into a session of its own, out of reach of killpg: this variable tells ours.
_MARK = "ZEROFP4_TEST_LAUNCH"


@dataclasses.dataclass(frozen=True)
class NotRun:
    """What a check returned that called pytest.skip."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Finished:
    """The launcher's exit status, and everything that it and the ranks printed."""

    status: int
    output: str


def run_script(
    arguments: list[str],
    world_size: int,
    launcher: str = "torchrun",
    *,
    time_limit: float = 60.0,
    env: dict[str, str] | None = None,
) -> Finished:
    """Runs `python ARGUMENTS` on every rank, from the root of the repository.

    Raises AssertionError, with all output, when it takes longer than time_limit seconds: a hang.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        processes = RankProcesses(arguments, world_size, launcher, env, cwd=ROOT, output=output)
        status = processes.wait(time_limit)
        processes.kill()
        text = output.read_text(errors="replace")
    what = f"{launcher}-{world_size} {arguments}"
    assert status is not None, f"{what} hangs: not done in {time_limit:g} s\n{text}"
    return Finished(status, text)


def find_mpirun() -> str | None:
    """The mpirun beside this Python, where a wheel puts it, or else the one on the PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def why_not(launcher: str) -> str | None:
    """Why this launcher cannot be used here, or None when it can."""
    if launcher == "mpirun" and find_mpirun() is None:
        return "no mpirun beside Python or on the PATH"
    if launcher == "mpirun" and importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return None


def device_for(world_size: int) -> str:
    """The kind of device that ranks get: "cuda" when there is a GPU for each, else "cpu"."""
    return "cuda" if why_no_cuda() is None and torch.cuda.device_count() >= world_size else "cpu"


class RankProcesses:
    """A launcher and the ranks it started, at work in folder `cwd`; what they print goes to file `output`."""

    def __init__(
        self, program: list[str], world_size: int, launcher: str, env: dict | None, *, cwd: Path, output: Path
    ):
        self._mark = uuid.uuid4().hex
        with open(output, "wb") as sink:
            self._launcher = subprocess.Popen(
                [*_launcher_command(launcher, world_size), *program],
                env={**_environment(world_size), **(env or {}), _MARK: self._mark},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )

    def wait(self, seconds: float) -> int | None:
        """The launcher's exit status; None when it still runs after that many seconds."""
        try:
            return self._launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Ends the launcher first, so that it starts nothing more, and then whatever it had started."""
        self._launcher.kill()
        self._launcher.wait()
        while pids := self._marked():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _marked(self) -> list[int]:
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # ended, or another user's
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found


def _launcher_command(launcher: str, world_size: int) -> list[str]:
    if launcher == "alone":
        return [sys.executable]
    if launcher == "fork" and device_for(world_size) == "cpu":
        return [sys.executable, "-m", "distributed.fork", str(world_size)]
    if launcher in ("fork", "torchrun"):
        # The address is for hosts whose name does not resolve, where torchrun's own ranks would not find it.
        options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={world_size}"]
        return [sys.executable, "-m", "torch.distributed.run", *options]
    return [find_mpirun(), "-n", str(world_size), sys.executable]


def _environment(world_size: int) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not f"{k}=".startswith(_LEFT_BY_LAUNCHERS)}
    env.update(
        PYTHONPATH=os.pathsep.join(filter(None, sys.path)),  # the ranks import what this process imports
        OMP_NUM_THREADS="1",
        # Open MPI (4, 4, 4, 5) runs as root, and more ranks than cores, only when told to.
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        OMPI_MCA_rmaps_base_oversubscribe="1",
        PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
    )
    return env if device_for(world_size) == "cuda" else {**env, "CUDA_VISIBLE_DEVICES": ""}
