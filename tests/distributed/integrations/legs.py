"""Trains in one world after the other, each forked from a process that has imported the packages for all.

    python -m distributed.integrations.legs FOLDER

Leg k leaves FOLDER/k.pt, what leg_of() of test_trainers.py returned on rank 0. The status is 1 where a rank
failed, and no later leg begins.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

WORLDS = (1, 2, 1)
PACKAGES = ("transformers", "accelerate", "lightning", "safetensors")


def main(folder: str) -> int:
    from distributed import fork

    for name in (*PACKAGES, "transformers.trainer", "distributed.integrations.test_trainers"):
        importlib.import_module(name)
    for leg, ranks in enumerate(WORLDS):
        pid = os.fork()
        if pid == 0:  # ends in here
            fork.main(ranks, "distributed.integrations.legs", [folder, str(leg)])
        if os.waitpid(pid, 0)[1]:
            return 1
    return 0


def train(folder: str, leg: int) -> None:
    """On a rank."""
    import torch

    from distributed.integrations.test_trainers import leg_of
    from zerofp4 import launch

    world = launch.init_process_group()
    found = leg_of(world, folder, leg)
    if world.rank == 0:
        torch.save(found, Path(folder, f"{leg}.pt"))
    launch.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        sys.exit(main(sys.argv[1]))
    train(sys.argv[1], int(sys.argv[2]))
