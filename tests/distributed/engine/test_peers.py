"""Ranks that share memory: on a GPU each where there are as many, else as processes that share GPUs."""

from __future__ import annotations

import functools
import os
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases.optim import assert_all_equal, keywords, make_gradients, make_parameters, set_gradients, take_step
from early import waits_for

from distributed.cases import is_last, raised_by, raised_everywhere
from distributed.engine.overlap_cases import SMALL, TINY, gpu_of
from distributed.engine.overlap_cases import on_gpu as early_check
from distributed.optim.cases import SPECIFICATIONS, built, check_weights, gradients_of, model_bytes
from distributed.processes import device_for
from distributed.run import Check, Launch, Setting, on_ranks, run_ranks
from zerofp4.engine import peers
from zerofp4.engine.peers import Location, Peers, find_hosts, find_obstacle, find_peers
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="fewer than two GPUs, of which one has two ranks to check"
)
OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.99)}


def build(device, **options):
    parameters = make_parameters(device, 0, SPECIFICATIONS)
    groups = [{"params": parameters[:4], "lr": 0.01}, {"params": parameters[4:]}]
    return parameters, ZeroFP4Optimizer(groups, FusedAdamW, **keywords(OPTIONS, options))


def all_bytes(parameters, optimizer):
    """Of weights, and of what this rank has of masters and moments."""
    state = [entry.values for p in parameters for _, entry in sorted(optimizer.state[p].items())]
    return [tensor.cpu() for tensor in (*model_bytes(parameters), *state)]


def equal_steps(world, **options):
    """The bytes of the collective transport on the CPU, with a clip and a step that is skipped."""
    cpu = build(torch.device("cpu"), process_group=dist.new_group(backend="gloo"), **options)
    shared = build(gpu_of(world), transport="peer", **options)
    assert shared[1].describe()["transport"] == "peer"
    for step in range(5):
        norms = [take_clipped_step(world, *model, step) for model in (cpu, shared)]
        assert norms[0] == norms[1]
        assert_all_equal(all_bytes(*shared), all_bytes(*cpu), f"step {step}")


def take_clipped_step(world, parameters, optimizer, step):
    """Clipped in the third, skipped in the fourth. Returns the norm of the third."""
    set_gradients(parameters, gradients_of(world, parameters, step))
    if step == 3 and is_last(world):
        parameters[3].grad = torch.full_like(parameters[3], float("inf"))
    norm = optimizer.clip_grad_norm_(0.5).item() if step == 2 else None
    optimizer.step()
    assert (optimizer.found_inf.item() != 0) == (step == 3)
    return norm


def an_optimizer_of_torch(world):
    """It is told on the device that no rank failed. Equal gradients have that mean: the bytes of one rank."""
    group = [dist.new_group([rank]) for rank in range(world.world_size)][world.rank]
    models = []
    for ways in ({"transport": "peer"}, {"process_group": group}):
        parameters = make_parameters(gpu_of(world), 0, SPECIFICATIONS)
        optimizer = ZeroFP4Optimizer(parameters, torch.optim.AdamW, lr=0.02, fused=True, **keywords(ways))
        models.append((parameters, optimizer))
    for step in range(2):
        for parameters, optimizer in models:
            take_step(parameters, optimizer, step)
        shared, alone = ([*model_bytes(ps), *o.gathered_masters()] for ps, o in models)
        assert_all_equal(shared, alone, f"step {step}")


def a_rank_that_does_not_come(world):
    """Nobody waits longer than the group's timeout; all hear of it in the next step, in which nothing
    changes.
    """
    group = dist.new_group(timeout=timedelta(seconds=2))
    parameters, optimizer = build(gpu_of(world), transport="peer", process_group=group)
    set_gradients(parameters, make_gradients(parameters, 0))
    optimizer.step()
    before = all_bytes(parameters, optimizer)
    peers = optimizer._shards.peers
    if world.rank == 0:
        began = time.monotonic()
        peers.arrive()
        peers.arrive()  # does not wait once more
        torch.cuda.synchronize(peers.device)
        assert 1.5 < time.monotonic() - began < 30
        assert peers.failed.item() == 1
    dist.barrier()
    set_gradients(parameters, make_gradients(parameters, 1))
    expected = r"rank [1-9] did not come to a barrier" if world.rank == 0 else "rank 0 found an error"
    error = raised_by(optimizer.step)
    if error is None and optimizer._agreement.defers and world.rank:  # which hears of it in the next step
        error = raised_by(optimizer.step)
    assert isinstance(error, RuntimeError) and re.search(expected, str(error)), repr(error)
    assert_all_equal(all_bytes(parameters, optimizer), before, "nothing changes")


def barriers(world):
    """Thousands of them: what was queued before on any rank is seen behind."""
    peers = Peers(dist.group.WORLD, gpu_of(world))
    here = peers.zeros((world.world_size, 1024), torch.int32)
    there = [peers.at(r, here) for r in range(world.world_size)]
    wrong = torch.zeros((), dtype=torch.int64, device=peers.device)
    for turn in range(1, 301):
        for r in range(world.world_size):
            there[r][world.rank].fill_(turn)
        peers.arrive()
        wrong += (here != turn).sum()
        peers.arrive()
    assert wrong.item() == 0
    peers.check()


@on_ranks(2, 3)
def test_what_is_refused(world):
    """What cannot be is refused on every rank, before anything is allocated."""
    group = dist.new_group(backend="gloo")
    parameters = make_parameters(torch.device("cpu"), 0, SPECIFICATIONS)
    given = {"process_group": group, "lr": 0.1}
    build = lambda way: ZeroFP4Optimizer(parameters, **keywords(given, transport=way))  # noqa: E731
    with pytest.raises(ValueError, match="only GPUs read each other's memory"):
        build("peer")
    auto = build("auto").describe()
    assert auto["transport"] == "collective" and "only GPUs" in auto["why_collective"]
    with pytest.raises(ValueError, match="transport"):
        build("peer" if world.rank else "collective")


UPDATES = {"check": "whole_steps", "overlaps": ("update",)}
FINE = Location("a", 0, [1, 2], None)
CHECKS = {
    "barriers": (barriers, {}),
    "fused": (equal_steps, {"bucket_mb": 0.003}),
    "rounded": (equal_steps, {"bucket_mb": 0.01, "gradient_wire": torch.float32}),
    "torch's fused": (an_optimizer_of_torch, {}),
    "early": (early_check, {"check": "whole_steps", "clip": True, "bucket_mb": SMALL}),
    "early, torch's": (early_check, {"check": "whole_steps", "name": "AdamW", "bucket_mb": TINY}),
    "early, one bucket": (early_check, {"check": "whole_steps", "bucket_mb": None}),
    "early, rounded": (
        early_check,
        {"check": "whole_steps", "bucket_mb": TINY, "gradient_wire": torch.float16},
    ),
    "early, not taken": (early_check, {"check": "nothing_comes_of_it", "bucket_mb": TINY}),
    "updates": (early_check, UPDATES | {"bucket_mb": TINY}),
    "updates, compact": (early_check, UPDATES | {"bucket_mb": SMALL, "state": "compact"}),
    "updates, rounded": (early_check, UPDATES | {"bucket_mb": SMALL, "gradient_wire": torch.float16}),
    "late": (a_rank_that_does_not_come, {}),
}
MORE = "barriers", "fused", "rounded", "early", "early, rounded", "updates", "late"
"""What three and four ranks run of CHECKS: of three equal gradients the mean is not always one of them, which
"torch's fused" takes it for.
"""


def shared_gpus() -> dict[str, str]:
    """For more ranks than GPUs: all of these, and gloo, since NCCL wants one each."""
    every = ",".join(map(str, range(torch.cuda.device_count())))
    return {
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", every),
        "ZEROFP4_TEST_BACKEND": "gloo",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }


def done(size: int, _) -> Launch:
    """The checks on so many ranks, done."""
    checks = [
        Check(name, f"{CHECKS[name][0].__module__}:{CHECKS[name][0].__name__}", CHECKS[name][1], 90.0)
        for name in (CHECKS if size == 2 else MORE)
    ]
    launch = Launch(Setting(size, "torchrun"), checks, {} if device_for(size) == "cuda" else shared_gpus())
    launch.run_ahead(Path())
    return launch


ON_RANKS = {size: functools.partial(done, size) for size in (2, 3, 4)}


@needs_gpu
@waits_for(ON_RANKS[2])
@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks(early, name):
    assert early(ON_RANKS[2]).outcome(name) == [None, None]


@needs_two_gpus
@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("size", [pytest.param(size, marks=waits_for(ON_RANKS[size])) for size in (3, 4)])
def test_more_ranks(early, size, name):
    assert early(ON_RANKS[size]).outcome(name) == [None] * size


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
        patch.setattr(peers, "locate", lambda _: FINE._replace(index=world.rank, reachable=[0, 1]))
        patch.setattr(peers, "Peers", share)
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
