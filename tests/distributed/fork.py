"""Starts the ranks of one host as torchrun does, but by fork, so that they import torch once for all of them.

    python -m distributed.fork RANKS -m MODULE ARGUMENT...

A rank finds in its environment what torchrun leaves there. When one fails, the others are ended. All have the
hashes of one interpreter: sets of strings have the same order on every rank, as they have not under torchrun.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import signal
import sys

import torch.distributed as dist

# What nearly every test imports, and none changes. None of it uses a thread or a GPU yet.
_IMPORTED = ("pytest", "zerofp4", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp")

_PORT_BYTES = 8


def main(ranks: int, module: str, arguments: list[str]) -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a rank would copy all of that
    reading, writing = os.pipe()
    pids = set()
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            _become(rank, ranks, int(os.read(reading, _PORT_BYTES)))
            sys.argv = [module, *arguments]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            _end(0)
        pids.add(pid)
    # Only now: its threads would be missing in a process that was forked later.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writing, f"{store.port:{_PORT_BYTES}}".encode() * ranks)
    _end(_wait_for(pids))


def _become(rank: int, ranks: int, port: int) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    job = {"TORCHELASTIC_RUN_ID": "none"}  # by which Lightning knows torchrun
    os.environ.update({name: str(value) for name, value in (places | store | job).items()})


def _wait_for(pids: set[int]) -> int:
    """The status of all: 1 where one failed."""
    status = 0
    while pids:
        pid, ended = os.wait()
        pids.remove(pid)
        if ended and not status:
            status = 1
            for other in pids:
                os.kill(other, signal.SIGTERM)
    return status


def _end(status: int) -> None:
    """Without the end of the interpreter: to free what was imported, a rank would copy all of it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[3], sys.argv[4:])
