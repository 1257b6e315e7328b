"""A Step over exchanges that record what was done: the order, and what an error changes."""

from types import SimpleNamespace

import pytest
import torch

from zerofp4.distributed import CollectiveError, OwnError
from zerofp4.engine import ABSTAIN, Arrived, Step

ERROR = RuntimeError("this rank's own")


class Log:
    """An object whose methods are only recorded, as "method number".

    number: that of a bucket; without one it is a call's first argument.
    faults: by what is recorded, what the call raises. returns: by method, what computes what it returns.
    """

    def __init__(self, done, faults, number=None, **returns):
        self._done, self._faults, self.number, self._returns = done, faults, number, returns

    def __getattr__(self, verb):
        def call(*arguments, **_):
            numbers = [self.number, *arguments[:1]]
            said = " ".join([verb, *[str(n) for n in numbers if isinstance(n, int)][:1]])
            self._done.append(said)
            if said in self._faults:
                raise self._faults[said]
            return self._returns[verb](*arguments) if verb in self._returns else None

        return call


def make_step(done, groups="aaa", packed=2, late=False, halfway=None, **faults):
    """groups: by bucket. packed: how many are NVFP4. The means of bucket 1 are made before its update."""
    faults = {name.replace("_of_", " "): error for name, error in faults.items()}
    exchanges = []
    for b, group in enumerate(groups):
        bucket = Log(done, faults, b)
        bucket.group, bucket.world_size, bucket.indices = group, 2, [len(groups) - 1 - b]
        bucket.parameters, bucket.plan = [torch.zeros(2)], Log(done, faults, b) if b < packed else None
        bucket.is_sharded_like = lambda other, own=group: own == other.group
        receive = lambda own=b: None if own == 1 else Arrived([], None)  # noqa: E731
        gather = lambda own=b: Log(done, faults, own)  # noqa: E731
        exchange = Log(done, faults, b, receive=receive, gather=gather)
        exchange.bucket, exchange.halfway = bucket, halfway if b == 0 else None
        exchanges.append(exchange)

    def add(bucket, gather, derive):
        done.append(f"late {bucket.number}")
        derive()

    def update(exchange, arrived):
        assert (arrived is None) == (exchange.number == 1)
        log.update(exchange.number)

    log = Log(done, faults)
    step = Step(exchanges, log, late=SimpleNamespace(add=add) if late else None)
    return step, update


def run(reduces=True, error=None, **options):
    """A step: what was done, the buckets, and what was raised."""
    done, raised = [], None
    step, update = make_step(done, **options)
    try:
        gradients = [None] * len(step.exchanges) if reduces else None
        step.run(update if reduces else None, gradients, OwnError(error))
    except RuntimeError as failure:
        raised = failure
    return done, [exchange.bucket for exchange in step.exchanges], raised


def test_three_buckets_are_in_flight():
    done, buckets, raised = run()
    assert raised is None
    assert done == [
        *("open", "send 0"),
        *("send 1", "receive 0", "update 0", "start_step 0"),
        *("send 2", "receive 1", "update 1", "start_step 1", "finish_step 0", "gather 0"),
        *("receive 2", "update 2", "finish_step 1", "gather 1", "wait 0", "complete 0"),
        *("cast 2", "gather 2", "wait 1", "complete 1", "wait 2"),
    ]
    assert [bucket.parameters[0]._version for bucket in buckets] == [0, 0, 1]  # plans note their own


def test_masters_are_published_as_they_are():
    done, _, raised = run(reduces=False)
    assert raised is None
    exchanges = {"send", "receive", "finish", "update", "arrive"}
    assert not {entry.split()[0] for entry in done} & exchanges
    assert [entry for entry in done if entry.startswith("start_step")] == ["start_step 0", "start_step 1"]


def test_late_gathers_are_behind_everything_else():
    """Those of the first parameters first; of a rounded bucket the step waits."""
    done, _, raised = run(late=True)
    assert raised is None and "wait 2" in done and "complete 0" not in done
    assert done[done.index("arrive") :] == [
        "arrive",
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


FAULTS = {"receive": 1, "update": 2, "start_step": 2, "finish_step": 3, "complete": 4}
"""By what fails in bucket 1, how many buckets this rank has updated."""


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_takes_part_and_changes_nothing_more(fault, late):
    if late and fault == "complete":
        pytest.skip("readers transpose then, or a stream")
    options = {"groups": "aaaa", "packed": 3, "late": late}
    done, _, raised = run(**options, **{f"{fault}_of_1": ERROR})
    assert raised is ERROR
    well, _, _ = run(**options)
    verbs = ("open", "send", "receive", "gather", "arrive", "start_step")

    def collectives(entries):
        entries = [e.replace("abstain", "start_step").replace("finish ", "receive ") for e in entries]
        return [entry for entry in entries if entry.split()[0] in verbs]

    assert collectives(done) == collectives(well)
    updated = [entry for entry in done if entry.startswith("update")]
    assert updated == [f"update {b}" for b in range(FAULTS[fault])]
    assert "cast 3" not in done
    # What was reduced without a flag the other ranks cast, so this rank does.
    flagged = {b for b in range(3) if f"abstain {b}" in done} | ({1} if fault == "start_step" else set())
    casts = [entry for entry in well if entry.split()[0] in ("finish_step", "complete")]
    expected = [entry for entry in casts if int(entry.split()[1]) not in flagged]
    assert [entry for entry in done if entry in casts] == expected


def test_a_collective_that_fails_ends_it():
    """This rank's own error came first, and may be why the others have gone."""
    gone = CollectiveError("gathering weights failed")
    done, buckets, raised = run(gather_of_1=gone)
    assert raised is gone and "gather 2" not in done and buckets[2].parameters[0]._version == 1
    _, _, raised = run(update_of_0=ERROR, gather_of_1=gone)
    assert raised is ERROR and raised.__cause__ is gone


def test_average():
    done = []
    step, _ = make_step(done, groups="aab", average_of_1=ERROR)
    error = step.average([None] * 3)
    sends = [f"send {b}" for b in range(3)]
    assert done == [*sends[:2], "average 0", "average 1", sends[2], "average 2"]
    assert error.take() is ERROR


def test_a_rank_that_only_takes_its_part_does_what_the_others_wait_for():
    """In a step and in an average: every message leaves, and nobody uses what arrives."""
    done = []
    step, _ = make_step(done, groups="aab")
    with pytest.raises(RuntimeError) as caught:
        step.run(None, ABSTAIN, OwnError(ERROR))
    assert caught.value is ERROR
    sends, finishes = ([f"{verb} {b}" for b in range(3)] for verb in ("send", "finish"))
    verbs = ("open", "send", "finish", "abstain", "gather")
    assert [entry for entry in done if entry.split()[0] in verbs] == [
        *("open", *sends[:2], "finish 0", "abstain 0", "finish 1", "abstain 1"),
        *("gather 0", "gather 1", sends[2], finishes[2], "gather 2"),
    ]
    done.clear()
    assert not step.average(ABSTAIN)
    assert done == [*sends[:2], *finishes[:2], sends[2], finishes[2]]
