"""One rank of a launch: joins the group, runs the checks in turn and leaves what came of each in a folder.

    python -m distributed.worker FOLDER      (under torchrun, under fork.py, under mpirun, or alone)

FOLDER/job.pickle holds the list of Checks. All that rank r prints goes to FOLDER/r.log. It leaves
FOLDER/joined.r in the group, and, for check i, what it returned in FOLDER/i.r.passed, pickled, or what it
raised in FOLDER/i.r.failed.

After each check the ranks wait for each other. When one has failed, the others may be waiting for it in a
collective, and the group is of no more use: all ranks end, and the test process starts new ones for the rest.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from distributed.processes import NotRun
from distributed.run import Check, outcome_paths

# How long the ranks stay, after one has failed, for the others to say what they saw.
_GRACE_SECONDS = 3.0

_RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")


def main(folder: Path) -> None:
    rank = next((os.environ[name] for name in _RANK if name in os.environ), "0")
    log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()  # a rank that crashes says where
    tempfile.tempdir = str(folder)  # which is deleted
    job: list[Check] = pickle.loads((folder / "job.pickle").read_bytes())

    from zerofp4 import launch

    gc.collect()
    # A collection that drops the last reference to a group holds the GIL, which a thread of gloo may want
    # before it ends: cycles of earlier checks stay.
    gc.disable()
    gc.freeze()
    longest = timedelta(seconds=max(check.time_limit for check in job))
    # What launch chooses by itself, unless a test says another.
    world = launch.init_process_group(os.environ.get("ZEROFP4_TEST_BACKEND"), timeout=longest)
    (folder / f"joined.{world.rank}").touch()
    for index, check in enumerate(job):
        faulthandler.dump_traceback_later(check.time_limit)  # a rank that hangs says where
        outcome, content = _run(check, world)
        faulthandler.cancel_dump_traceback_later()
        gc.disable()  # a check may have enabled it
        gc.freeze()
        sys.stdout.flush()  # a reader of the outcome reads what the check printed, too
        sys.stderr.flush()
        draft = folder / f"draft.{world.rank}"
        draft.write_bytes(content)
        draft.rename(folder / f"{index}.{world.rank}.{outcome}")  # at once: a reader sees all of it
        if not _all_passed(folder, index, world.world_size, 2 * check.time_limit):
            _end(1)
        _end_groups()
    _end(0)


def _end_groups() -> None:
    """End what groups a check has made. NCCL keeps some 300 MB of a GPU for each, and ranks that are in more
    groups than others cannot share memory with them. gloo has threads for each, one of which takes a core
    from then on where a rank has sent what another never receives. DTensor goes with them, for it keeps by
    the ranks of a mesh what tensors it has made, with that mesh and its groups.
    """
    from torch.distributed.tensor import debug

    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _end(status: int) -> None:
    """Without the end of the interpreter, which a collective or a thread of gloo may hold up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(check: Check, world) -> tuple[str, bytes]:
    module, _, name = check.function.partition(":")
    try:
        value = getattr(importlib.import_module(module), name)(world, **check.arguments)
        return "passed", pickle.dumps(value)
    except pytest.skip.Exception as skipped:
        return "passed", pickle.dumps(NotRun(skipped.msg))
    except BaseException:  # also what pytest.raises and pytest.fail raise
        return "failed", traceback.format_exc().encode()


def _all_passed(folder: Path, index: int, world_size: int, seconds: float) -> bool:
    """Waits for all ranks. False when one failed, or is not done long after the test gave up on it."""
    deadline = time.monotonic() + seconds
    has_failed = False
    while time.monotonic() < deadline:
        kinds = [path.suffix if path else None for path in outcome_paths(folder, index, world_size)]
        if None not in kinds:
            return ".failed" not in kinds
        if ".failed" in kinds and not has_failed:
            has_failed, deadline = True, min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(0.005)
    return False


if __name__ == "__main__":
    main(Path(sys.argv[1]))
