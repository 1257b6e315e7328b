"""Every kind of fault in every stage of a training loop, each in a world of forked ranks of its own.

    python -m distributed.scripts.fault_driver FOLDER

FOLDER/outcomes.json says what came of each rank. One start of Python for all of them: this process imports
all that they use, runs nothing with it, and forks.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import zerofp4
from examples.training import checkpoints
from zerofp4 import distributed
from zerofp4.engine import CollectiveExchange, GradientMemory, OffloadedExchange
from zerofp4.launch import World
from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer, piece, state_dict, zero

SIZE = 3
TIMEOUT = timedelta(seconds=6)
HANGS = 60.0
VICTIM = 1
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}
KINDS = ("raise", *SIGNALS)
UPDATES = ("update", "host update", "host sum")
STAGES = ("backward", "reduce", "norm", "cast", "gather", "save", "load", *UPDATES)
CASES = [(stage, kind) for kind in KINDS for stage in (UPDATES if kind == "interrupt" else STAGES)]


def fail(kind: str) -> None:
    if kind == "raise":
        raise ValueError("told to raise")
    os.kill(os.getpid(), SIGNALS[kind])


def failing(function: Callable, kind: str, call: int) -> Callable:
    """The function, with a fault before the call of that number."""
    calls = itertools.count(1)

    def replacement(*args, **kwargs):
        if next(calls) == call:
            fail(kind)
        return function(*args, **kwargs)

    return replacement


def place_fault(stage: str, kind: str, model: nn.Module, optimizer: ZeroFP4Optimizer) -> None:
    """In the middle of the stage: the first bucket of gradients travels, the first pieces are written."""
    targets = {
        "reduce": (GradientMemory, "take", 2),
        "norm": (zero, "global_norm", 1),
        "cast": (distributed, "start_reduce_max", 1),
        "gather": (CollectiveExchange, "gather", 1),
        "save": (piece.Piece, "__get_tensor_shard__", 3),
        "load": (state_dict, "_read_parameter", 2),
        "host update": (optimizer.inner, "update_bucket", 1),
        "host sum": (OffloadedExchange, "average", 2),
    }
    if stage == "backward":
        model[1].weight.register_hook(lambda _: fail(kind))
    elif stage == "update":
        optimizer.inner.register_step_pre_hook(lambda *_: fail(kind))
    else:
        owner, name, call = targets[stage]
        mock.patch.object(owner, name, failing(getattr(owner, name), kind, call)).start()


def loop(rank: int, folder: Path, stage: str, kind: str) -> None:
    """A step and a checkpoint; then another of both, and a resume, in which the fault comes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)).bfloat16()
    zerofp4.convert_model(model, filter_fn=lambda *_: True)
    model[1].float()
    dist.barrier()  # starting may take longer than a stage
    dist.distributed_c10d._set_pg_timeout(TIMEOUT, dist.group.WORLD)  # that of a checkpoint
    group = dist.new_group(timeout=TIMEOUT)
    options = {"process_group": group, "communication": Communication(bucket_mb=0.01)}
    if stage in ("host update", "host sum"):
        options |= {"optimizer_class": FusedAdamW, "offload": 1.0, "offload_gradients": stage == "host sum"}
    optimizer = ZeroFP4Optimizer(model.named_parameters(), **options)
    world = World(rank, SIZE, rank, torch.device("cpu"), "gloo")
    saved = checkpoints.Checkpoints(folder / "checkpoints", 2, {}, world)
    for step in (1, 2):
        if step == 2 and rank == VICTIM:
            place_fault(stage, kind, model, optimizer)
        hidden = model[1](model[0](torch.ones(4, 32).bfloat16()).float())
        model[2](hidden.bfloat16()).float().square().sum().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        saved.save(step, model, optimizer, {"step": step})
    saved.resume(model, optimizer)


def run_rank(rank: int, folder: Path, stage: str, kind: str) -> None:
    outcome, driver = ["nothing", "it ended well"], os.getppid()
    try:
        store, hangs = dist.FileStore(str(folder / "store"), SIZE), timedelta(seconds=HANGS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=hangs)
        loop(rank, folder, stage, kind)
    except BaseException as error:
        outcome = [type(error).__name__, str(error)]
    finally:
        (folder / f"draft.{rank}").write_text(json.dumps(outcome))
        (folder / f"draft.{rank}").rename(folder / f"rank.{rank}")
        # Until the driver kills it, or is gone: the others are to find the one gone that failed, not this.
        while rank != VICTIM and os.getppid() == driver:
            time.sleep(0.1)
        os._exit(1)  # as a process that ends: its connections close


def start(folder: Path, stage: str, kind: str) -> list[multiprocessing.Process]:
    folder.mkdir()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(rank, folder, stage, kind)) for rank in range(SIZE)]
    for process in ranks:
        process.start()
    return ranks


def wait(folder: Path, ranks: list[multiprocessing.Process]) -> dict[int, list[str]]:
    """What the ranks left once those without the fault have ended, or long after they should have."""
    paths = {rank: folder / f"rank.{rank}" for rank in range(SIZE)}
    others = [path for rank, path in paths.items() if rank != VICTIM]
    deadline = time.monotonic() + HANGS
    while not all(path.exists() for path in others) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in ranks:
        process.kill()
        process.join()
    return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}


def main(folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    outcomes = {}
    for kind in KINDS:  # side by side, since most of a fault is waiting
        stages = [stage for stage, of_stage in CASES if of_stage == kind]
        started = {stage: start(folder / f"{stage}-{kind}", stage, kind) for stage in stages}
        for stage, pids in started.items():
            outcomes[f"{stage}-{kind}"] = wait(folder / f"{stage}-{kind}", pids)
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
