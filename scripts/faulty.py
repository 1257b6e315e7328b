#!/usr/bin/env python3
"""train.py under torchrun's own agent, for scripts/faults.py: ranks that fail when a signal tells them to.

    scripts/faulty.py RANKS RESTARTS ARGUMENTS...       (the arguments are those of train.py)

The agent forks its ranks, and starts them again as torchrun does when one has failed; nothing but this
process imports torch. SIGUSR1 makes a rank raise and SIGUSR2 makes it exit, wherever its Python code is;
SIGQUIT has it print where that is.
"""

import faulthandler
import os
import signal
import sys

# Before any thread: a forked rank must not find a pool of threads that is not there.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import train
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


class ToldToFailError(Exception):
    pass


def run_rank(arguments: list[str]) -> None:
    def fail(*_) -> None:
        raise ToldToFailError("told to raise")

    faulthandler.register(signal.SIGQUIT, all_threads=True)
    signal.signal(signal.SIGUSR1, fail)
    signal.signal(signal.SIGUSR2, lambda *_: sys.exit(3))
    sys.argv = ["train.py", *arguments]
    status = train.main()
    if status != 0:
        sys.exit(status)


def main() -> None:
    ranks, restarts, *arguments = sys.argv[1:]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(ranks),
        max_restarts=int(restarts),
        monitor_interval=0.1,
        start_method="fork",
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
    )
    elastic_launch(config, run_rank)(arguments)


if __name__ == "__main__":
    main()
