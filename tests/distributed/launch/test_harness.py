"""The harness itself: a failure is named, a hang ends, and neither hides the checks beside it."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from early import waits_for

from distributed.processes import NotRun, run_script
from distributed.run import Check, Launch, RanksFailed, Setting


def rank_times(world, factor):
    return world.rank * factor


def one_fails_the_other_waits(world):
    if world.rank == 1:
        with pytest.raises(ValueError, match="never raised"):
            print("rank 1 goes on")
    dist.barrier()


def one_hangs(world):
    if world.rank == 0:
        print(f"I am process {os.getpid()}", flush=True)
        time.sleep(1000)


def leaves_out(world):
    pytest.skip("not here")


def one_crashes(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(1000)


def check(function, time_limit: float = 20.0, name: str | None = None, **arguments) -> Check:
    function = function.__name__
    return Check(name or function, f"{__name__}:{function}", arguments, time_limit)


CPU = {"CUDA_VISIBLE_DEVICES": ""}
CHECKS = [
    check(rank_times, name="first", factor=1),
    check(one_fails_the_other_waits),
    check(leaves_out),
    check(rank_times, name="last", factor=3),
    check(one_hangs, 2.0),  # not the last: ranks join each other within the longest limit of what is left
    check(one_crashes),
]


def outcomes(_: Path) -> dict[str, list | RanksFailed]:
    """What came of each check, by name."""
    launch, found = Launch(Setting(2), CHECKS, CPU), {}
    for each in CHECKS:
        try:
            found[each.name] = launch.outcome(each.name)
        except RanksFailed as failure:
            found[each.name] = failure
    launch.stop()
    return found


@pytest.mark.heavy
@waits_for(outcomes)
@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("one_fails_the_other_waits", ["rank 1: Traceback", "DID NOT RAISE", "rank 0: "]),
        ("one_crashes", ["rank 1: ended early", "Segmentation fault", "in one_crashes"]),
        ("one_hangs", ["rank 0: hangs: not done in 2 s", "in one_hangs", "rank 1: passed"]),
    ],
)
def test_what_went_wrong_is_said(early, name, messages):
    failure = early(outcomes)[name]
    assert isinstance(failure, RanksFailed)
    for message in messages:
        assert message in str(failure)
    if name == "one_hangs":
        pid = re.search(r"I am process (\d+)", str(failure))[1]
        command = Path(f"/proc/{pid}/cmdline")
        assert not command.exists() or command.read_bytes() == b""  # empty: dead, and not yet waited for


@pytest.mark.heavy
@waits_for(outcomes)
def test_checks_beside_a_failure_still_run(early):
    found = early(outcomes)
    assert [found[name] for name in ("first", "last")] == [[0, 1], [0, 3]]
    assert found["leaves_out"] == [NotRun("not here")] * 2


@pytest.mark.heavy
def test_a_script_that_hangs_ends():
    with pytest.raises(AssertionError, match=r"alone-1 .* hangs: not done in 2 s\nbefore"):
        # Without site, Python starts in time also where other processes want the cores.
        run_script(["-Suc", "print('before'); import time; time.sleep(1000)"], 1, "alone", time_limit=2)
