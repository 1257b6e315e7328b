"""The harness itself: a failure is named, a hang ends, and neither hides the checks beside it."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from early import Work, waits_for

from distributed.processes import NotRun, run_script
from distributed.run import Check, Launch, Outcome, RanksFailed, Setting, on_ranks, run_ranks


@on_ranks(2, 3)
@pytest.mark.parametrize(("shape", "factor"), [((2, 3), 1), ((4,), 2)])
def test_parameters_reach_the_ranks(world, shape, factor):
    x = torch.full(shape, float(factor), device=world.device)
    dist.all_reduce(x)
    assert x.shape == shape
    assert x.flatten()[0].item() == factor * world.world_size


def rank_times(world, factor):
    print(f"this is rank {world.rank}")
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


def keeps_a_group(world):
    sys.kept = dist.new_group([0])


def check(function, time_limit: float = 20.0, name: str | None = None, **arguments) -> Check:
    function = function.__name__
    return Check(name or function, f"{__name__}:{function}", arguments, time_limit)


# A failure ends its ranks and new ones take seconds: what no other check need be beside has ranks of its own,
# on the CPU.
CPU = {"CUDA_VISIBLE_DEVICES": ""}
BESIDE = [
    check(rank_times, name="first", factor=1),
    check(one_fails_the_other_waits),
    check(leaves_out),
    check(rank_times, name="last", factor=3),
    check(one_crashes),
]


def told_by(setting: Setting, checks: list[Check], env: dict[str, str] | None = None) -> Work:
    """Work that returns, by name, what came of each check: its Outcome or the RanksFailed."""

    def run(_: Path) -> dict[str, Outcome | RanksFailed]:
        launch, told = Launch(setting, checks, env), {}
        try:
            for each in checks:
                try:
                    told[each.name] = launch.outcome(each.name)
                except RanksFailed as failure:
                    told[each.name] = failure
        finally:
            launch.stop()
        return told

    return run


BAD = told_by(Setting(2), BESIDE)
HANGS = told_by(Setting(2), [check(one_hangs, 5.0)], CPU)
KEEPS = told_by(Setting(1, "alone"), [check(keeps_a_group)], CPU)


@pytest.mark.heavy
@waits_for(BAD, HANGS)
@pytest.mark.parametrize(
    ("work", "name", "messages"),
    [
        (BAD, "one_fails_the_other_waits", ["rank 1: Traceback", "DID NOT RAISE", "rank 0: "]),
        (HANGS, "one_hangs", ["rank 0: hangs: not done in 5 s", "in one_hangs", "rank 1: passed"]),
        (BAD, "one_crashes", ["rank 1: ended early", "Segmentation fault", "in one_crashes"]),
    ],
)
def test_what_went_wrong_is_said(early, work, name, messages):
    failure = early(work)[name]
    assert isinstance(failure, RanksFailed)
    for message in messages:
        assert message in str(failure)


@pytest.mark.heavy
@waits_for(BAD)
def test_checks_beside_a_failure_still_run(early):
    first, last = (early(BAD)[name] for name in ("first", "last"))
    assert (first.values, last.values) == ([0, 1], [0, 3])
    assert ["this is rank 0" in text for text in last.outputs] == [True, False]
    assert ["this is rank 1" in text for text in last.outputs] == [False, True]


@pytest.mark.heavy
@waits_for(BAD)
def test_a_check_may_leave_itself_out(early):
    assert early(BAD)["leaves_out"].values == [NotRun("not here")] * 2


@pytest.mark.heavy
@waits_for(HANGS)
def test_a_rank_that_hung_is_gone(early):
    pid = re.search(r"I am process (\d+)", str(early(HANGS)["one_hangs"]))[1]
    command = Path(f"/proc/{pid}/cmdline")
    assert not command.exists() or command.read_bytes() == b""  # empty: dead, and not yet waited for


@pytest.mark.heavy
def test_a_script_that_hangs_is_ended():
    with pytest.raises(AssertionError, match=r"alone-1 .* hangs: not done in 1 s\nbefore"):
        run_script(["-uc", "print('before'); import time; time.sleep(1000)"], 1, "alone", time_limit=1)


@pytest.mark.heavy
def test_this_python_runs_the_ranks():
    finished = run_script(["-c", "import sys; print(sys.executable)"], 1, "alone")
    assert (finished.status, finished.output.strip()) == (0, sys.executable)


@pytest.mark.heavy
def test_an_unknown_launcher():
    with pytest.raises(ValueError, match=r"launcher: must be .*, got 'srun'"):
        run_ranks(rank_times, 2, "srun", factor=1)


@pytest.mark.heavy
@waits_for(KEEPS)
def test_a_group_that_outlives_the_launch_is_named(early):
    message = r"every check passed, then .*(?s:.*)outlived .* still run: \['"
    assert re.search(message, str(early(KEEPS)["keeps_a_group"]))
