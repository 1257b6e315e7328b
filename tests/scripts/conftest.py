"""The processes that tests of the scripts start: all at once, and each serves several tests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from distributed.processes import ROOT, run_script, why_not
from train_cases import SMALL

SEEDED = [*SMALL, "--steps", "12", "--micro-batches", "2", "--seed", "7"]
# Of each, by its name: the script and its options, on how many ranks it is started, and by what.
RUNS = {
    "killed": ("faults.py", ["--kills", "2", "--kinds", "kill,raise", "--ranks", "2"], 1, "alone"),
    "both": ("train.py", [*SEEDED, "--weights", "both", "--checkpoint-every", "8"], 2, "torchrun"),
    "again": ("train.py", SEEDED, 2, "torchrun" if why_not("mpirun") else "mpirun"),
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Iterator[dict[str, Future]]:
    """The result of each is what the launcher left, and the output folder."""

    def run(script: str, options: list[str], ranks: int, launcher: str):
        out = tmp_path_factory.mktemp("run")
        command = [str(ROOT / "scripts" / script), *options, "--out", str(out)]
        return run_script(command, ranks, launcher, time_limit=300.0), out

    with ThreadPoolExecutor() as pool:
        yield {name: pool.submit(run, *arguments) for name, arguments in RUNS.items()}
