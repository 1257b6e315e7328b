"""One rank of a launch: joins the group, runs the checks in turn and leaves what came of each in a folder.

    python -m distributed.worker FOLDER      (under torchrun, under fork.py, under mpirun, or alone)

FOLDER/job.pickle holds the list of Checks. All that rank r prints goes to FOLDER/r.log. It leaves
FOLDER/joined.r in the group, and, for check i, what it returned in FOLDER/i.r.passed, pickled, or what it
raised in FOLDER/i.r.failed.

After each check the ranks wait for each other. When one has failed, the others may be waiting for it in a
collective, and the group is of no more use: all ranks end, and the test process starts new ones for the rest.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from distributed.processes import NotRun
from distributed.run import END_SECONDS, Check, outcome_paths

# How long the ranks stay, after one has failed, for the others to say what they saw.
_GRACE_SECONDS = 3.0

_RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")

# Of ProcessGroupGloo, as c10d and gloo name them.
_GLOO_THREADS = ("pt_gloo_", "gloo_")

# Of torch, which keeps them in reference cycles: models of fully_shard have a mesh, and dcp.save and dcp.load
# raise an exception from a local variable.
_CYCLIC = ("DeviceMesh", "CheckpointException")

# Packages that keep what refers to a group in reference cycles, some of it until the next call.
_CYCLIC_PACKAGES = {"megatron", "transformers", "lightning"}


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
    gc.freeze()  # convert_model looks through what lives, and so does each gc.collect() of a test
    gc.disable()
    longest = timedelta(seconds=max(check.time_limit for check in job))
    # What launch chooses by itself, unless a test says another.
    world = launch.init_process_group(os.environ.get("ZEROFP4_TEST_BACKEND"), timeout=longest)
    (folder / f"joined.{world.rank}").touch()
    for index, check in enumerate(job):
        faulthandler.dump_traceback_later(check.time_limit)  # a rank that hangs says where
        outcome, content = _run(check, world)
        faulthandler.cancel_dump_traceback_later()
        _collect_cycles_of_others()
        sys.stdout.flush()  # a reader of the outcome reads what the check printed, too
        sys.stderr.flush()
        draft = folder / f"draft.{world.rank}"
        draft.write_bytes(content)
        draft.rename(folder / f"{index}.{world.rank}.{outcome}")  # at once: a reader sees all of it
        if not _all_passed(folder, index, world.world_size, 2 * check.time_limit):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # no orderly end: a rank that is stuck in a collective would hold it up
    faulthandler.dump_traceback_later(END_SECONDS)
    _leave_group(launch.destroy_process_group)


def _run(check: Check, world) -> tuple[str, bytes]:
    module, _, name = check.function.partition(":")
    try:
        value = getattr(importlib.import_module(module), name)(world, **check.arguments)
        return "passed", pickle.dumps(value)
    except pytest.skip.Exception as skipped:
        return "passed", pickle.dumps(NotRun(skipped.msg))
    except BaseException:  # also what pytest.raises and pytest.fail raise
        return "failed", traceback.format_exc().encode()


def _collect_cycles_of_others() -> None:
    """Collects after a check that used what torch or a package keeps in reference cycles, and after no other.

    Any other check may leave no cycle that holds a process group. gc.freeze() hides its cycles from the
    collections of later checks, so that _leave_group() finds the group alive.
    """
    if _are_cyclic_packages_here() or any(type(found).__name__ in _CYCLIC for found in gc.get_objects()):
        gc.collect()
    gc.freeze()
    gc.disable()  # a check may have enabled it


def _are_cyclic_packages_here() -> bool:
    return not _CYCLIC_PACKAGES.isdisjoint(sys.modules)


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


def _leave_group(destroy: Callable[[], None]) -> None:
    """Destroys the group, and sees that its threads have ended.

    destroy_process_group() only drops torch's references. Where another one is left the threads live until
    the interpreter is torn down, and one that wants the GIL by then, to drop the last reference to a tensor
    of a finished collective, is ended by pthread_exit in a destructor: "terminate called without an active
    exception", once in many runs.

    The collector stays off, unless a check used a package with cycles: an error that a frame of its own
    traceback holds is in a reference cycle, and so are the groups that these frames refer to.
    """
    gc.unfreeze()
    if _are_cyclic_packages_here():
        gc.collect()
    _forget_groups_of_meshes()
    destroy()
    deadline = time.monotonic() + 5  # a thread of gloo may hold its last work until it runs again
    while left := _gloo_threads():
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"a group outlived destroy_process_group(): its threads still run: {left}\n"
                f"Errors in reference cycles:\n{_errors_in_cycles()}"
            )
        time.sleep(0.02)


def _forget_groups_of_meshes() -> None:
    """DTensor's caches keep meshes. A function, whose end lets go of the last object that it looked at."""
    for found in gc.get_objects():
        if type(found).__name__ == "DeviceMesh":
            found._pg_registry.clear()


def _errors_in_cycles() -> str:
    """Tracebacks of the errors that a collection would free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    errors = [found for found in gc.garbage if issubclass(type(found), BaseException) and found.__traceback__]
    return "\n".join("".join(traceback.format_exception(error)) for error in errors)


def _gloo_threads() -> list[str]:
    """Names of those of this process."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append(path.read_text().strip())
    return [name for name in names if name.startswith(_GLOO_THREADS)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
