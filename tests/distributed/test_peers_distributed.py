"""Ranks that share memory: on two GPUs where there are two, else as two processes on one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from early import waits_for

from distributed import peer_checks
from distributed.early_peer_checks import on_gpu as early_check
from distributed.overlap_cases import SMALL, TINY
from distributed.processes import device_for
from distributed.run import Check, Launch, Setting, on_ranks
from zerofp4.engine import peers
from zerofp4.engine.peers import Seat, find_obstacle

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
FINE = Seat("a", 0, [1, 2], None)
CHECKS = {
    "barriers": (peer_checks.barriers, {}),
    "fused": (peer_checks.equal_steps, {"inner": "fused", "bucket_mb": 0.003}),
    "one bucket": (peer_checks.equal_steps, {"inner": "fused", "bucket_mb": None}),
    "in sequence": (peer_checks.equal_steps, {"inner": "in sequence", "bucket_mb": 0.003}),
    "rounded": (peer_checks.equal_steps, {"inner": "fused", "bucket_mb": 0.01, "wire": torch.float32}),
    "torch's": (peer_checks.an_optimizer_of_torch, {"fused": False}),
    "torch's fused": (peer_checks.an_optimizer_of_torch, {"fused": True}),
    "backward": (peer_checks.backward_passes, {}),
    "early": (early_check, {"check": "whole_steps", "bucket_mb": SMALL}),
    "early, clipped": (early_check, {"check": "whole_steps", "clip": True, "bucket_mb": SMALL}),
    "early, torch's": (early_check, {"check": "whole_steps", "name": "AdamW", "bucket_mb": TINY}),
    "early, one bucket": (early_check, {"check": "whole_steps", "bucket_mb": None}),
    "early micro-batches": (early_check, {"check": "micro_batches", "bucket_mb": SMALL}),
    "early, rounded": (
        early_check,
        {"check": "micro_batches", "bucket_mb": TINY, "gradient_wire": torch.float16},
    ),
    "early, not taken": (early_check, {"check": "nothing_comes_of_it", "bucket_mb": TINY}),
    "early, not taken by torch's": (early_check, {"check": "nothing_comes_of_it", "name": "AdamW"}),
    "early, rounded, not taken": (
        early_check,
        {"check": "nothing_comes_of_it", "bucket_mb": TINY, "gradient_wire": torch.float16},
    ),
    "early, one after another": (early_check, {"check": "one_after_another", "bucket_mb": SMALL}),
    "late": (peer_checks.a_rank_that_does_not_come, {}),
}


SHARED_GPU = {
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
    "ZEROFP4_TEST_BACKEND": "gloo",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}


def environment() -> dict[str, str]:
    """Of two ranks: with one GPU both use it, and gloo, since NCCL wants one each."""
    if device_for(2) == "cuda":
        return {}
    return SHARED_GPU


def done(setting: Setting, cases: dict, env: dict[str, str]) -> Launch:
    checks = [
        Check(name, f"{body.__module__}:{body.__name__}", arguments, 90.0)
        for name, (body, arguments) in cases.items()
    ]
    launch = Launch(setting, checks, env)
    launch.run_ahead(Path())
    return launch


def all_checks(_) -> Launch:
    """The checks on two ranks, done."""
    return done(Setting(2), CHECKS, environment())


@needs_gpu
@waits_for(all_checks)
@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks(early, name):
    assert early(all_checks).outcome(name).values == [None, None]


HOSTS = {f"hosts, {mb}": (peer_checks.hosts, {"bucket_mb": mb}) for mb in (None, 1e-4)}


def checks_of_hosts(_) -> Launch:
    """Those of four ranks, whatever GPUs there are."""
    return done(Setting(4), HOSTS, SHARED_GPU)


@needs_gpu
@waits_for(checks_of_hosts)
@pytest.mark.parametrize("name", HOSTS)
def test_hosts_of_two_ranks(early, name):
    assert early(checks_of_hosts).outcome(name).values == [None] * 4


def one_dies(folder: Path) -> tuple[list[str], list[int]]:
    """What each of two ranks printed, and how it ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment(), **place}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "distributed.peer_checks"],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return printed, [rank.returncode for rank in ranks]


@needs_gpu
@waits_for(one_dies)
def test_a_rank_that_dies(early):
    """Its memory can still be read, and the other one's barrier ends by the group's timeout; so does what
    waits for a reduction of amaxes behind it, with NCCL by the end of the process.
    """
    printed, statuses = early(one_dies)
    named = "then: rank 1 did not come to a barrier" in printed[0]
    ended = device_for(2) == "cuda" and "Watchdog caught collective operation timeout" in printed[0]
    assert named or ended, printed
    assert statuses[1] == -9, printed


@on_ranks(2, 3)
def test_what_is_refused(world):
    peer_checks.refusals(world)


@on_ranks(2)
def test_auto_without_the_permission_to_share_memory(world):
    """What one rank finds as it tries, all hear of."""

    def share(*_):
        if world.rank == 1:
            raise RuntimeError("no permission")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "seat_of", lambda _: FINE._replace(index=world.rank, reachable=[0, 1]))
        patch.setattr(peers, "Peers", share)
        found = peers.join_peers("auto", dist.group.WORLD, world.device)
    assert found == (None, "on rank 1: no permission")


@pytest.mark.parametrize(
    ("seats", "message"),
    [
        ([FINE, Seat("a", 1, [0], None)], None),
        ([FINE, Seat("b", 1, [0], None)], "ranks 0 and 1 are on different hosts"),
        ([FINE, Seat("a", 0, [1], None)], "ranks 0 and 1 both use cuda:0"),
        ([FINE, Seat("a", 1, [], None)], "cuda:1 of rank 1 cannot access the memory of cuda:0"),
        ([FINE, Seat("a", 1, [0], None), Seat("a", 2, [1], None)], "cuda:2 of rank 2 cannot access"),
        ([FINE, Seat("a", 1, [0], "this torch has none")], "on rank 1: this torch has none"),
        ([FINE] * 17, "17 ranks are more than 16"),
    ],
)
def test_who_can_share_memory(seats, message):
    found = find_obstacle(seats)
    assert (found is None) if message is None else (message in found)
