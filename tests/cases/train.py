"""Runs of examples/training, by a launcher or inside this process, and what they leave."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import torch
from distributed.processes import run_script, why_not

from examples.training import train

SMALL = ["--preset", "tiny", "--batch-size", "2", "--sequence-length", "32"]
SEEDED = ["--steps", "12", "--micro-batches", "2", "--seed", "7"]


def both(folder: Path) -> tuple[str, Path]:
    """Both kinds of weights on two ranks; with checkpoints. What was printed, and the output folder."""
    return _launch(folder, "fork", "--weights", "both", "--checkpoint-every", "8")


def again(folder: Path) -> tuple[str, Path]:
    """NVFP4 weights from the same seed, by another launcher where there is one."""
    return _launch(folder, "torchrun" if why_not("mpirun") else "mpirun")


def _launch(folder: Path, launcher: str, *options: str) -> tuple[str, Path]:
    command = ["-m", "examples.training", *SMALL, *SEEDED, "--out", str(folder), *options]
    finished = run_script(command, 2, launcher, time_limit=300.0)
    assert finished.status == 0, finished.output
    return finished.output, folder


@contextlib.contextmanager
def settings_restored() -> Iterator[None]:
    """A run sets what holds for its whole process, which it has to itself elsewhere."""
    signals = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in signals}
    fills = torch.utils.deterministic.fill_uninitialized_memory
    unset = [name for name in ("CUBLAS_WORKSPACE_CONFIG", "KINETO_LOG_LEVEL") if name not in os.environ]
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills
        for name in unset:
            os.environ.pop(name, None)


def train_here(out: Path, *options: str, world=None, status: int = 0) -> str:
    """What a run of the tiny preset printed in this process. It must exit with that status.

    world: the group whose ranks all call this; without one the run makes its own, alone.
    """
    arguments, said = [*SMALL, "--out", str(out), *options], io.StringIO()
    with settings_restored(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        if world is None:
            found = train.main(arguments)
        else:
            found = train.execute(train.parse_options(arguments), world)
    assert found == status, said.getvalue()
    return said.getvalue()


def read_rows(out: Path, kind: str = "nvfp4") -> list[dict]:
    return [json.loads(line) for line in (out / f"metrics-{kind}.jsonl").read_text().splitlines()]


def read_numbers(out: Path, kind: str = "nvfp4") -> list[tuple]:
    """The metrics that may not depend on how fast the machine is."""
    names = ("step", "loss", "lr", "grad_norm", "validation_loss")
    return [tuple(row.get(name) for name in names) for row in read_rows(out, kind)]
