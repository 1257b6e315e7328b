"""A publication in which something goes wrong: who takes part in what all the same, and what is raised."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from zerofp4.distributed import CollectiveError
from zerofp4.engine import Publication
from zerofp4.engine.flat import Halfway


class Recorder:
    """Stands for a plan or a buffer. faults: by the name of a method, what it raises, or returns (LATE)."""

    def __init__(self, name, done, **faults):
        self.name, self.done, self.faults = name, done, faults
        self.parameters, self.peers, self.halfway = [torch.zeros(2)], None, None
        self.world_size, self.indices = 2, [-ord(name[0])]  # the last bucket has the first parameters

    def _do(self, what, *arguments):
        self.done.append(f"{what} {self.name}")
        for position, row, between in arguments if what == "finish_step" else ():
            self.done.append(f"part {position} {row}")
            between()
        outcome = self.faults.get(what)
        if isinstance(outcome, BaseException) and outcome is not LATE:
            raise outcome
        return outcome

    def __getattr__(self, what):
        return lambda *arguments, **_: self._do(what, *arguments)


ERROR, LATE = RuntimeError("this rank's own"), RuntimeError("of an earlier step")


def publish(
    *plans,
    dense=None,
    error=None,
    prepare=None,
    shared=False,
    halfway=None,
    arrivals=None,
    gathers=None,
    alone=False,
):
    """Three buckets of which the last is rounded: what was done, the buffers, and what was raised. shared:
    by ranks that share memory. halfway: of the first bucket. arrivals: (what was done) to what gathers are
    left, which are `gathers`. alone: in groups of one rank.
    """
    done = []
    plans = [Recorder(str(i), done, **faults) for i, faults in enumerate(plans)]
    buffers = [Recorder(str(i), done, start_gather=gathers) for i in range(len(plans))]
    buffers.append(Recorder(str(len(plans)), done, **(dense or {})))
    if shared:
        peers = Recorder("peers", done)
        for buffer in buffers:
            buffer.peers = peers
    buffers[0].halfway = halfway
    if alone:
        for buffer in buffers:
            buffer.world_size = 1
    raised = None
    try:
        Publication(buffers, [*plans, None], prepare, error, arrivals and arrivals(done)).run()
    except RuntimeError as failure:
        raised = failure
    return done, buffers, raised


def collectives(done):
    return [entry for entry in done if entry.split()[0] in ("start_step", "abstain", "start_gather")]


WHOLE = ["start_step 0", "start_step 1", "start_gather 0", "start_gather 1", "start_gather 2"]
SHARED = ["start_step 0", "start_gather 0", "start_step 1", "start_gather 1", "start_gather 2"]
BOTH = pytest.mark.parametrize(("shared", "whole"), [(False, WHOLE), (True, SHARED)])


@BOTH
def test_all_is_well(shared, whole):
    done, buffers, raised = publish({}, {}, shared=shared)
    assert raised is None and collectives(done) == whole
    assert "cast 2" in done and "complete 1" in done and buffers[2].parameters[0]._version == 1


def test_between_gpus_codes_leave_behind_the_cast():
    entries, _, _ = publish({}, {}, shared=True)
    for b, cast in enumerate(("finish_step 0", "finish_step 1", "cast 2")):
        assert entries[entries.index(cast) + 1] == f"start_gather {b}"
    assert entries.index("start_gather 1") < entries.index("complete 0")


def test_between_gpus_others_are_waited_for_behind_the_first_update():
    """Which reads no weights, and is not to come later for it."""
    done, _, _ = publish({}, {}, shared=True)
    assert done.count("open peers") == 1
    assert done.index("leave_amaxes 0") < done.index("open peers") < done.index("start_gather 0")


def test_between_gpus_codes_leave_while_others_are_made():
    entries, _, _ = publish({}, {}, shared=True, halfway=Halfway(3, 16, 128))
    assert "start_sending 0" not in entries  # nothing waits for them
    entries, _, _ = publish({}, {}, shared=True, halfway=Halfway(3, 16, 128), prepare=lambda b: None)
    first = entries.index("finish_step 0")
    assert entries[first:][:4] == ["finish_step 0", "part 3 16", "start_sending 0", "start_gather 0"]
    assert entries.count("start_sending 0") == 1 and "start_sending 1" not in entries


@BOTH
@pytest.mark.parametrize("fault", ["leave_amaxes", "prepare", "start_step", "finish_step", "complete"])
def test_a_bucket_that_fails_takes_its_part(fault, shared, whole):
    def prepare(b):
        if fault == "prepare" and b == 1:
            raise ERROR

    done, buffers, raised = publish({}, {fault: ERROR}, prepare=prepare, shared=shared)
    assert raised is ERROR and not hasattr(raised, "unheard")
    joined = fault in ("start_step", "finish_step", "complete")  # a start_step() that raises has joined
    assert collectives(done) == [
        entry if joined else entry.replace("start_step 1", "abstain 1") for entry in whole
    ]
    assert ("finish_step 1" in done) == (fault in ("finish_step", "complete"))
    assert ("complete 1" in done) == (fault == "complete") and "complete 0" in done and "cast 2" in done
    assert buffers[2].parameters[0]._version == 1


@BOTH
def test_what_failed_before_publishes_nothing(shared, whole):
    done, _, raised = publish({}, {}, error=ERROR, shared=shared)
    assert raised is ERROR and not hasattr(raised, "unheard")
    assert collectives(done) == [entry.replace("start_step", "abstain") for entry in whole]
    assert not {entry.split()[0] for entry in done} & {"cast", "finish_step", "complete", "leave_amaxes"}


def test_nobody_hears_of_a_bucket_that_is_rounded():
    error = RuntimeError("cannot round")
    done, buffers, raised = publish({}, dense={"cast": error})
    assert raised is error and raised.unheard and "start_gather 1" in done
    assert buffers[1].parameters[0]._version == 1


def test_the_first_error_is_this_ranks_own():
    """Not what it hears of others, nor what came of an earlier step."""
    heard = RuntimeError("another rank")
    assert publish({"start_step": LATE})[2] is LATE
    assert publish({"start_step": LATE, "finish_step": heard}, {})[2] is heard
    _, _, raised = publish({"start_step": LATE, "finish_step": heard}, {"complete": ERROR})
    assert raised is ERROR and raised.__cause__ is LATE


def test_a_collective_that_fails_ends_it():
    gone = CollectiveError("gathering weights failed")
    done, buffers, raised = publish({"finish_step": ERROR}, {"finish_step": gone})
    assert raised is ERROR and raised.__cause__ is gone
    assert "start_gather 2" not in done and buffers[2].parameters[0]._version == 1
    assert publish({}, {"finish_step": gone})[2] is gone


class Left:
    """Stands for arrivals: what was left to them, and what they are to do then."""

    def __init__(self, done):
        self.done, self.completions = done, {}

    def add(self, buffer, gather, complete):
        self.done.append(f"add {buffer.name}")
        self.completions[buffer.name] = complete


def publish_late(*plans, **options):
    """Where gathers of codes are left to arrivals: what they are to do besides."""
    left = []

    def arrivals(done):
        left.append(Left(done))
        return left[0]

    dense = {"start_gather": SimpleNamespace(wait=lambda: left[0].done.append("wait 2"))}
    options = {"gathers": object(), **options}
    return *publish(*plans, dense=dense, arrivals=arrivals, **options), left[0].completions


@pytest.mark.parametrize("shared", [False, True])
def test_gathers_of_codes_are_left_to_arrivals(shared):
    """They begin when nothing else is to travel, those of the first parameters first. Of what is rounded the
    gather is waited for, and versions advance at once.
    """
    halfway = Halfway(7, 16, 128) if shared else None
    done, buffers, raised, completions = publish_late({}, {}, shared=shared, halfway=halfway)
    assert raised is None
    assert collectives(done) == ["start_step 0", "start_step 1", *(f"start_gather {b}" for b in (2, 1, 0))]
    assert not {"part 7 16", "complete 0", "derive_columns 0"} & set(done)
    assert (done[done.index("start_gather 1") - 1] == "arrive peers") == shared
    assert done[done.index("start_gather 1") :] == [
        *("start_gather 1", "add 1", "note_written 1"),
        *("start_gather 0", "add 0", "note_written 0"),
    ]
    assert done.index("wait 2") < done.index("start_gather 1") and buffers[2].parameters[0]._version == 1
    completions["1"]()
    assert done[-1] == "derive_columns 1"


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("fault", ["start_step", "finish_step"])
def test_a_bucket_that_failed_is_gathered_as_it_is(fault, shared):
    done, _, raised, completions = publish_late({}, {fault: ERROR}, shared=shared)
    assert raised is ERROR
    assert [entry for entry in done if entry.startswith("add")] == ["add 1", "add 0"]
    assert "note_written 1" not in done and "note_written 0" in done
    completions["1"]()
    assert "derive_columns 1" not in done


def test_a_group_of_one_rank_leaves_nothing():
    done, _, raised, completions = publish_late({}, alone=True, gathers=None)
    assert raised is None and not completions
    assert "complete 0" in done and "start_gather 0" in done
