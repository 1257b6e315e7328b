"""A Step over buckets and a transport that record what was done: the order, and what an error changes."""

from types import SimpleNamespace

import pytest
import torch

from zerofp4.distributed import CollectiveError, OwnError
from zerofp4.engine import Arrived, Step

ERROR = RuntimeError("this rank's own")


class Log:
    """An object whose methods are only recorded. faults: by the name of a method, what it raises."""

    def __init__(self, name, done, **faults):
        self._name, self._done, self._faults = name, done, faults

    def __getattr__(self, what):
        def call(*arguments, **_):
            self._done.append(f"{what} {self._name}")
            if what in self._faults:
                raise self._faults[what]

        return call


class Bucket(Log):
    def __init__(self, name, done, group, first, **faults):
        super().__init__(name, done, **faults)
        self.group, self.world_size, self.indices = group, 2, [first]
        self.parameters, self.plan = [torch.zeros(2)], None

    def is_sharded_like(self, other):
        return self.group == other.group


class Transport:
    """faults: by "verb b", what it raises. halfway: of bucket 0."""

    def __init__(self, done, buckets, halfway=None, **faults):
        self._done, self.buckets, self._halfway, self._faults = done, buckets, halfway, faults
        self.adds_in_update = [b != 1 for b in range(len(buckets))]

    def _say(self, verb, b=None):
        self._done.append(verb if b is None else f"{verb} {b}")
        if f"{verb}_{b}" in self._faults:
            raise self._faults[f"{verb}_{b}"]

    def begin(self):
        self._say("begin")

    def send_gradients(self, b, gradients):
        self._say("send", b)

    def arrived(self, b, gradients):
        self._say("arrived", b)
        return Arrived([], None)

    def average(self, b, gradients, squares=None, out=None):
        self._say("average", b)

    def discard(self, b):
        self._say("discard", b)

    def end(self):
        self._say("end")

    def open_weights(self):
        self._say("open")

    def halfway(self, b):
        return self._halfway if b == 0 else None

    def gather(self, b):
        self._say("gather", b)
        return SimpleNamespace(wait=lambda: self._say("wait", b))


class Update:
    """faults: by bucket."""

    def __init__(self, done, **faults):
        self._done, self._faults = done, faults

    def __call__(self, b, arrived):
        assert (arrived is None) == (b == 1)
        self._done.append(f"update {b}")
        if f"update_{b}" in self._faults:
            raise self._faults[f"update_{b}"]


class Late:
    def __init__(self, done):
        self._done = done

    def add(self, bucket, gather, derive):
        self._done.append(f"late {bucket._name}")
        derive()


def run(groups=("a", "a", "a"), plans=({}, {}, None), late=False, error=None, averages=True, **faults):
    """A step: what was done, the buckets, and what was raised.

    groups: by bucket. plans: by bucket, the faults of its plan. faults: of the transport and the update.
    """
    done = []
    buckets = [Bucket(str(b), done, group, len(groups) - b, **faults) for b, group in enumerate(groups)]
    for b, own in enumerate(plans):
        buckets[b].plan = None if own is None else Log(str(b), done, **own)
    step = Step(Transport(done, buckets, **faults), late=Late(done) if late else None)
    raised = None
    try:
        step.run(Update(done, **faults) if averages else None, [None] if averages else None, OwnError(error))
    except RuntimeError as failure:
        raised = failure
    return done, buckets, raised


def test_three_buckets_are_in_flight():
    done, buckets, raised = run()
    assert raised is None
    assert done == [
        *("begin", "send 0"),
        *("send 1", "arrived 0", "update 0", "open", "start_step 0"),
        *("send 2", "average 1", "update 1", "start_step 1", "finish_step 0", "gather 0"),
        *("arrived 2", "update 2", "finish_step 1", "gather 1", "wait 0", "complete 0"),
        *("cast 2", "gather 2", "wait 1", "complete 1", "wait 2"),
    ]
    assert [bucket.parameters[0]._version for bucket in buckets] == [0, 0, 1]  # plans note their own


def test_masters_are_published_as_they_are():
    done, _, raised = run(averages=False)
    assert raised is None
    assert not {entry.split()[0] for entry in done} & {"begin", "send", "arrived", "average", "update", "end"}
    assert [entry for entry in done if entry.startswith("start_step")] == ["start_step 0", "start_step 1"]


def test_late_gathers_are_behind_everything_else():
    """Those of the first parameters first; of a rounded bucket the step waits."""
    done, _, raised = run(late=True)
    assert raised is None and "wait 2" in done and "complete 0" not in done
    assert done[done.index("end") :] == [
        "end",
        *("gather 1", "late 1", "derive_columns 1", "note_written 1"),
        *("gather 0", "late 0", "derive_columns 0", "note_written 0"),
    ]


def test_where_a_cast_may_stop(monkeypatch):
    seen = []
    monkeypatch.setattr(Log, "finish_step", lambda self, halfway: seen.append(halfway), raising=False)
    place = (3, 16, lambda: None)
    run(halfway=place)
    run(halfway=place, late=True)
    assert seen == [place, None, None, None]


FAULTS = {
    "own gradients": {"arrived_1": ERROR, "average_1": ERROR},
    "update": {"update_1": ERROR},
    "amaxes": {"plans": ({}, {"start_step": ERROR}, {}, None)},
    "cast": {"plans": ({}, {"finish_step": ERROR}, {}, None)},
    "transpose": {"plans": ({}, {"complete": ERROR}, {}, None)},
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_takes_part_and_changes_nothing_more(fault, late):
    if late and fault == "transpose":
        pytest.skip("readers transpose then, or a stream")
    done, _, raised = run(**{"groups": "aaaa", "plans": ({}, {}, {}, None), "late": late, **FAULTS[fault]})
    assert raised is ERROR
    well, _, _ = run(groups="aaaa", plans=({}, {}, {}, None), late=late)
    verbs = ("begin", "send", "arrived", "average", "open", "gather", "end", "start_step", "abstain")

    def collectives(entries):
        found = [entry for entry in entries if entry.split()[0] in verbs]
        return [entry.replace("abstain", "start_step") for entry in found]

    assert collectives(done) == collectives(well)
    before = {"own gradients": 1, "update": 2, "amaxes": 2, "cast": 3, "transpose": 4}[fault]
    assert [entry for entry in done if entry.startswith("update")] == [f"update {b}" for b in range(before)]
    assert "cast 3" not in done
    # What was reduced without a flag the other ranks cast, so this rank does.
    flagged = {b for b in range(3) if f"abstain {b}" in done} | ({1} if fault == "amaxes" else set())
    casts = [entry for entry in well if entry.split()[0] in ("finish_step", "complete")]
    expected = [entry for entry in casts if int(entry.split()[1]) not in flagged]
    assert [entry for entry in done if entry in casts] == expected


def test_a_collective_that_fails_ends_it():
    """This rank's own error came first, and may be why the others have gone."""
    gone = CollectiveError("gathering weights failed")
    done, buckets, raised = run(gather_1=gone)
    assert raised is gone and "gather 2" not in done and buckets[2].parameters[0]._version == 1
    _, _, raised = run(update_0=ERROR, gather_1=gone)
    assert raised is ERROR and raised.__cause__ is gone


def test_average():
    done = []
    buckets = [Bucket(str(b), done, group, b) for b, group in enumerate("aab")]
    error = Step(Transport(done, buckets, average_1=ERROR)).average([None])
    assert done == ["begin", "send 0", "send 1", "average 0", "average 1", "send 2", "average 2", "end"]
    assert error.take() is ERROR


def test_a_rank_that_only_takes_its_part_does_what_the_others_wait_for():
    """In a step and in an average: every message leaves, and nobody uses what arrives."""
    done = []
    buckets = [Bucket(str(b), done, group, b) for b, group in enumerate("aab")]
    buckets[0].plan, buckets[1].plan = Log("0", done), Log("1", done)
    step = Step(Transport(done, buckets))
    with pytest.raises(RuntimeError) as caught:
        step.run(None, (), OwnError(ERROR))
    assert caught.value is ERROR
    ours = [entry for entry in done if entry.split()[0] in ("begin", "send", "discard", "abstain", "gather")]
    assert ours == [
        *("begin", "send 0", "send 1", "discard 0", "abstain 0", "discard 1", "abstain 1"),
        *("gather 0", "gather 1", "send 2", "discard 2", "gather 2"),
    ]
    done.clear()
    assert not step.average(())
    assert done == ["begin", "send 0", "send 1", "discard 0", "discard 1", "send 2", "discard 2", "end"]
