"""One rank of a launch: joins the group, runs the checks in turn and leaves what came of each in a folder.

    python -m distributed.worker FOLDER      (under torchrun, under mpirun, or alone)

FOLDER/job.pickle holds [(function "module:name", arguments, time limit in seconds)]. What check i returned on
rank r goes, pickled, to FOLDER/i.r.passed, or what it raised to FOLDER/i.r.failed; all that the rank prints
goes to FOLDER/PID.log, and PID to FOLDER/rank.r once it has joined the group.

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
import signal
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from distributed.processes import NotRun

# How long the ranks stay, after one has failed, for the others to say what they saw.
_GRACE_SECONDS = 3.0

# Of ProcessGroupGloo, as c10d and gloo name them.
_GLOO_THREADS = ("pt_gloo_", "gloo_")


def main(folder: Path) -> None:
    log = os.open(folder / f"{os.getpid()}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()  # a rank that crashes says where
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # how the test process asks where a rank hangs
    tempfile.tempdir = str(folder)  # which is deleted
    job = pickle.loads((folder / "job.pickle").read_bytes())

    from zerofp4 import launch

    gc.collect()
    gc.freeze()  # convert_model looks through what lives, and so does each gc.collect() of a test
    longest = max(time_limit for *_, time_limit in job)
    backend = os.environ.get(
        "ZEROFP4_TEST_BACKEND"
    )  # what launch chooses by itself, unless a test says another
    world = launch.init_process_group(backend, timeout=timedelta(seconds=longest))
    _leave(folder / f"rank.{world.rank}", str(os.getpid()).encode())
    for index, (function, arguments, time_limit) in enumerate(job):
        outcome, content = _run(function, arguments, world)
        _leave(folder / f"{index}.{world.rank}.{outcome}", content)
        if not _all_passed(folder, index, world.world_size, 2 * time_limit):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # no orderly end: a rank that is stuck in a collective would hold it up
    _leave_group(launch.destroy_process_group)


def _leave_group(destroy: Callable[[], None]) -> None:
    """Destroys the group, and sees that its threads have ended.

    destroy_process_group() only drops torch's references. Where another one is left the threads live until
    the interpreter is torn down, and one that wants the GIL by then, to drop the last reference to a tensor
    of a finished collective, is ended by pthread_exit in a destructor: "terminate called without an active
    exception", once in many runs. An error that a frame of its own traceback holds, such as what a test keeps
    of pytest.raises, is such a reference: error, traceback and frames are a cycle, and a frame has an
    optimizer, a plan or a group of its own. DTensor's caches are another.
    """
    _forget_meshes()
    if any(type(o).__name__ == "CheckpointException" for o in gc.get_objects()):
        gc.collect()  # a local of the frame of torch's own that raised it: a cycle
    destroy()
    deadline = time.monotonic() + 10  # a thread of gloo may hold its last work until it runs again
    while left := _gloo_threads():
        if time.monotonic() > deadline:
            raise RuntimeError(f"a group outlived destroy_process_group(): its threads still run: {left}")
        time.sleep(0.02)


def _gloo_threads() -> list[str]:
    """Names of those of this process."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append(path.read_text().strip())
    return [name for name in names if name.startswith(_GLOO_THREADS)]


def _forget_meshes() -> None:
    """Empties the caches in which DTensor keeps, by mesh and so by group, how tensors are sharded, and frees
    the models of fully_shard.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    debug = importlib.import_module("torch.distributed.tensor.debug")
    for cache in ("", "python_", "fast_path_"):
        getattr(debug, f"_clear_{cache}sharding_prop_cache", lambda: None)()
    redistribute = sys.modules["torch.distributed.tensor._redistribute"]
    getattr(redistribute, "clear_redistribute_planner_cache", lambda: None)()
    getattr(getattr(redistribute, "_gen_transform_infos", None), "cache_clear", lambda: None)()
    topology = sys.modules["torch.distributed.tensor._collective_utils"].MeshTopoInfo
    getattr(topology.build_from_mesh, "cache_clear", lambda: None)()
    mesh_type = sys.modules["torch.distributed.device_mesh"].DeviceMesh
    if any(type(one) is mesh_type for one in gc.get_objects()):
        # torch's own cycles hold meshes. fully_shard makes one: a model's hooks are methods of an FSDPState,
        # whose parameters know their module and the mesh. (fsdp2.attach hooks an Attachment to such a model.)
        # The frames in which torch registers operators for the first DTensor of a process are another.
        # init_device_mesh alone makes none.
        gc.collect()
    if _schemas_leak():
        for mesh in gc.get_objects():
            if type(mesh) is mesh_type:
                mesh._pg_registry.clear()


def _schemas_leak() -> bool:
    """Whether this torch, as 2.11 does, never frees what an operator on DTensors looked at, its mesh too."""
    import torch
    from torch.distributed.tensor._op_schema import OpSchema, OpStrategy

    strategy = OpStrategy([])
    freed = weakref.ref(strategy)
    OpSchema(torch.ops.aten.clone.default, (strategy,), {})
    del strategy
    return freed() is not None


def _run(function: str, arguments: dict, world) -> tuple[str, bytes]:
    module, _, name = function.partition(":")
    try:
        body = getattr(importlib.import_module(module), name)
        body = getattr(body, "on_each_rank", body)  # a test made by on_ranks carries the function to run here
        return "passed", pickle.dumps(body(world, **arguments))
    except pytest.skip.Exception as skipped:
        return "passed", pickle.dumps(NotRun(skipped.msg))
    except BaseException:  # also what pytest.raises and pytest.fail raise
        return "failed", traceback.format_exc().encode()


def _leave(path: Path, content: bytes) -> None:
    draft = path.with_name(f"{path.name}.draft")
    draft.write_bytes(content)
    draft.rename(path)  # at once: a reader sees all of it or nothing


def _all_passed(folder: Path, index: int, world_size: int, seconds: float) -> bool:
    """Waits for all ranks. False when one failed, or is not done long after the test gave up on it."""
    deadline = time.monotonic() + seconds
    somebody_failed = False
    while time.monotonic() < deadline:
        passed = sum((folder / f"{index}.{rank}.passed").exists() for rank in range(world_size))
        failed = sum((folder / f"{index}.{rank}.failed").exists() for rank in range(world_size))
        if passed + failed == world_size:
            return failed == 0
        if failed and not somebody_failed:
            somebody_failed = True
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(0.005)
    return False


if __name__ == "__main__":
    main(Path(sys.argv[1]))
