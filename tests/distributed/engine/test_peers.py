"""Ranks that share memory: on a GPU each where there are as many, else as processes that share GPUs."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases.optim import take_step
from early import waits_for

from distributed.cases import raised_everywhere
from distributed.engine import peer_checks
from distributed.engine.overlap_cases import SMALL, TINY
from distributed.engine.overlap_checks import on_gpu as early_check
from distributed.engine.test_updates import on_gpu as update_check
from distributed.optim.cases import built, check_weights
from distributed.processes import device_for
from distributed.run import Check, Launch, Setting, on_ranks, run_ranks
from zerofp4.engine import topology
from zerofp4.engine.topology import Location, find_hosts, find_obstacle, find_peers
from zerofp4.optim import FusedAdamW

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="fewer than two GPUs, of which one has two ranks to check"
)
FINE = Location("a", 0, [1, 2], None)
CHECKS = {
    "barriers": (peer_checks.barriers, {}),
    "fused": (peer_checks.equal_steps, {"inner": "fused", "bucket_mb": 0.003}),
    "one bucket": (peer_checks.equal_steps, {"inner": "fused", "bucket_mb": None}),
    "in sequence": (peer_checks.equal_steps, {"inner": "in sequence", "bucket_mb": 0.003}),
    "rounded": (peer_checks.equal_steps, {"inner": "fused", "bucket_mb": 0.01, "wire": torch.float32}),
    "torch's": (peer_checks.an_optimizer_of_torch, {"fused": False}),
    "torch's fused": (peer_checks.an_optimizer_of_torch, {"fused": True}),
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
    "updates": (update_check, {"bucket_mb": TINY}),
    "updates, compact": (update_check, {"bucket_mb": SMALL, "state": "compact"}),
    "updates, rounded": (update_check, {"bucket_mb": SMALL, "gradient_wire": torch.float16}),
    "late": (peer_checks.a_rank_that_does_not_come, {}),
}


MORE = (
    *("barriers", "fused", "one bucket", "in sequence", "rounded", "early", "early, clipped"),
    *("early micro-batches", "early, rounded", "updates", "late"),
)
"""What three and four ranks run of CHECKS: of three equal gradients the mean is not always one of them, which
the checks of torch's optimizers take it for.
"""


def shared_gpus() -> dict[str, str]:
    """For more ranks than GPUs: all of these, and gloo, since NCCL wants one each."""
    every = ",".join(map(str, range(torch.cuda.device_count())))
    return {
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", every),
        "ZEROFP4_TEST_BACKEND": "gloo",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }


def environment(world_size: int) -> dict[str, str]:
    return {} if device_for(world_size) == "cuda" else shared_gpus()


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
    return done(Setting(2, "torchrun"), CHECKS, environment(2))


@needs_gpu
@waits_for(all_checks)
@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks(early, name):
    assert early(all_checks).outcome(name) == [None, None]


def more_checks(world_size: int, _) -> Launch:
    checks = {name: CHECKS[name] for name in MORE}
    return done(Setting(world_size, "torchrun"), checks, environment(world_size))


LARGER = {size: functools.partial(more_checks, size) for size in (3, 4)}


@needs_two_gpus
@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("size", [pytest.param(size, marks=waits_for(run)) for size, run in LARGER.items()])
def test_more_ranks(early, size, name):
    assert early(LARGER[size]).outcome(name) == [None] * size


@on_ranks(2, 3)
def test_what_is_refused(world):
    peer_checks.refusals(world)


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="fewer than three GPUs")
def test_ranks_that_have_shared_memory_unequally_often():
    """torch's rendezvous would hang: it numbers exchanges by process, whatever their group."""
    run_ranks(share_unequally_often, 3)


def share_unequally_often(world):
    pair = dist.new_group([0, 1])
    if world.rank < 2:
        _, optimizer = built(world, FusedAdamW, process_group=pair)
        assert optimizer.describe()["transport"] == "peer"
    parameters, optimizer = built(world, FusedAdamW)
    assert optimizer.describe()["transport"] == "collective"
    take_step(parameters, optimizer, world.rank)
    check_weights(parameters, optimizer)


@on_ranks(2)
def test_auto_without_the_permission_to_share_memory(world):
    """What one rank finds as it tries, all hear of."""

    def share(*_):
        if world.rank == 1:
            raise RuntimeError("no permission")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "locate", lambda _: FINE._replace(index=world.rank, reachable=[0, 1]))
        patch.setattr(topology, "Peers", share)
        arguments = dist.group.WORLD, world.device
        assert find_peers("auto", *arguments) == (None, "rank 1: no permission")
        message = raised_everywhere(world, ValueError, find_peers, "peer", *arguments)
        assert 'transport="peer" is not available: rank 1: no permission' in message


@pytest.mark.parametrize(
    ("locations", "message"),
    [
        ([FINE, Location("a", 1, [0], None)], None),
        ([FINE, Location("b", 1, [0], None)], "ranks 0 and 1 differ (a and b) in the host"),
        ([FINE, Location("a", 0, [1], None)], "cuda:0 of rank 0 cannot access the memory of cuda:0"),
        ([FINE, Location("a", 1, [], None)], "cuda:1 of rank 1 cannot access the memory of cuda:0"),
        ([FINE, Location("a", 1, [0, 2], None), Location("a", 2, [1], None)], "cuda:2 of rank 2 cannot"),
        ([FINE, Location("a", 1, [0], "this torch has none")], "on rank 1: this torch has none"),
        ([FINE, Location("a", 1, [0], None, 3)], "ranks 0 and 1 differ (0 and 3) in how often"),
        ([FINE] * 17, "17 ranks are more than 16"),
    ],
)
def test_who_can_share_memory(locations, message):
    found = find_obstacle(locations)
    assert (found is None) if message is None else (message in found)


@pytest.mark.parametrize(
    ("names", "hosts"),
    [
        ("aabb", (2, 2)),
        ("aabbcc", (3, 2)),
        ("aaaa", (1, 4)),
        ("abcd", (4, 1)),
        ("abab", None),
        ("aabba", None),
        ("aab", None),
        ("a", (1, 1)),
    ],
)
def test_hosts_of_names(names, hosts):
    """Only ranks that are numbered host by host, as many on each, have a shape."""
    assert find_hosts(names) == hosts
