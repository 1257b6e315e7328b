"""A rank that is killed while dcp.save replaces an older save, and new ranks that load what is left.

    python -m distributed.state.killed_save FOLDER

FOLDER/save.0 and FOLDER/load.0, load.1 hold, as JSON, what these ranks raised: a type and a message.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from distributed.state.cases import contents, run, trained
from zerofp4.launch import World

SIZE = 2
VICTIM = 1
TIMEOUT = timedelta(seconds=30)


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save(world: World, path: Path) -> None:
    """After step 1 and after step 2. In the second save the victim dies before it writes its file."""
    model, optimizer = trained(world, 1, "fused")
    dcp.save({"optimizer": optimizer}, checkpoint_id=path)
    run(model, optimizer, range(1, 2))
    if world.rank == VICTIM:
        mock.patch.object(dcp.FileSystemWriter, "write_data", die).start()
    dcp.save({"optimizer": optimizer}, checkpoint_id=path)


def load(world: World, path: Path) -> None:
    model, optimizer = trained(world, 3, "fused", seed=1)
    before = contents(model, optimizer)
    try:
        dcp.load({"optimizer": optimizer}, checkpoint_id=path)
    finally:
        assert contents(model, optimizer) == before


def run_rank(function: Callable, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    name, outcome = function.__name__, ["nothing", "it ended well"]
    try:
        store = dist.FileStore(str(folder / f"store of {name}"), SIZE)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=TIMEOUT)
        function(World(rank, SIZE, rank, torch.device("cpu"), "gloo"), folder / "checkpoint")
    except BaseException as error:
        outcome = [type(error).__name__, str(error)]
    finally:
        (folder / f"{name}.{rank}").write_text(json.dumps(outcome))
        os._exit(0)  # the group may have lost a rank, and cannot end in order


def main(folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    fork = multiprocessing.get_context("fork")  # one start of Python and torch for all ranks
    for function in (save, load):
        ranks = [fork.Process(target=run_rank, args=(function, rank, folder)) for rank in range(SIZE)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
