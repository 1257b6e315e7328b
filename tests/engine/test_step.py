"""The order of a Step, over exchanges that record it, and what backward passes read. Errors of one rank:
distributed/engine/test_errors.
"""

from types import SimpleNamespace

import pytest
import torch

from zerofp4 import ops
from zerofp4.distributed import CollectiveError, OwnError
from zerofp4.engine import Arrived, BackwardSchedule, Bucket, Step, Trained
from zerofp4.tensors import Holder

ERROR = RuntimeError("this rank's own")


class Log:
    """An object whose methods are only recorded, as "method number", `number` being that of a bucket.

    faults: by what is recorded, what the call raises. returns: by method, what computes what it returns.
    """

    def __init__(self, done, faults, number, **returns):
        self._done, self._faults, self.number, self._returns = done, faults, number, returns

    def __getattr__(self, verb):
        def call(*arguments, **_):
            self._done.append(f"{verb} {self.number}")
            if self._done[-1] in self._faults:
                raise self._faults[self._done[-1]]
            return self._returns[verb](*arguments) if verb in self._returns else None

        return call


def make_exchange(done, faults, b):
    """The mean of bucket 1 is made before its update, and bucket 2 is not NVFP4."""
    bucket = Log(done, faults, b)
    bucket.group = bucket.replicas = lambda: None
    bucket.world_size, bucket.indices = 2, [2 - b]
    bucket.device = torch.device("cpu")
    bucket.parameters, bucket.plan = [torch.zeros(2)], Log(done, faults, b) if b < 2 else None
    exchange = Log(done, faults, b, receive=lambda: Arrived([], None), gather=lambda: Log(done, faults, b))
    exchange.bucket, exchange.halfway, exchange.bring_down = bucket, None, None
    exchange.arrives_as = None if b == 1 else torch.float32
    return exchange


def run(late=False, **faults):
    """A step: what was done, the parameters by bucket, and what was raised."""
    done, raised = [], None
    faults = {name.replace("_of_", " "): error for name, error in faults.items()}
    exchanges = [make_exchange(done, faults, b) for b in range(3)]

    def add(bucket, gather, derive):
        done.append(f"late {bucket.number}")
        derive()

    def update(exchange, arrived):
        assert (arrived is None) == (exchange.number == 1)
        Log(done, faults, exchange.number).update()

    late_gathers = SimpleNamespace(add=add) if late else None
    step = Step(exchanges, Log(done, faults, "all"), sends=True, late=late_gathers)
    try:
        step.run(update, [None] * 3, OwnError())
    except RuntimeError as failure:
        raised = failure
    return done, [exchange.bucket.parameters[0] for exchange in exchanges], raised


def test_three_buckets_are_in_flight():
    done, parameters, raised = run()
    assert raised is None
    assert done == [
        *("open all", "send 0"),
        *("send 1", "receive 0", "update 0", "start_step 0"),
        *("send 2", "average 1", "update 1", "start_step 1", "finish_step 0", "gather 0"),
        *("receive 2", "update 2", "finish_step 1", "gather 1", "wait 0", "complete 0"),
        *("cast 2", "gather 2", "wait 1", "complete 1", "wait 2"),
    ]
    assert [p._version for p in parameters] == [0, 0, 1]  # plans note their own


def test_late_gathers_are_behind_everything_else():
    """Those of the first parameters first; of a rounded bucket the step waits."""
    done, _, raised = run(late=True)
    assert raised is None and "wait 2" in done and "complete 0" not in done
    assert done[done.index("arrive all") :] == [
        "arrive all",
        *("gather 1", "late 1", "derive_columns 1", "note_written 1"),
        *("gather 0", "late 0", "derive_columns 0", "note_written 0"),
    ]


def test_a_collective_that_fails_ends_it():
    """This rank's own error came first, and may be why the others have gone."""
    gone = CollectiveError("gathering weights failed")
    done, parameters, raised = run(gather_of_1=gone)
    assert raised is gone and "gather 2" not in done and parameters[2]._version == 1
    _, _, raised = run(update_of_0=ERROR, gather_of_1=gone)
    assert raised is ERROR and raised.__cause__ is gone


def test_a_ranks_own_error_is_the_first_that_is_no_interrupt():
    error = OwnError()
    with error:
        raise ValueError("first")
    with error:
        raise TypeError("second")
    with pytest.raises(KeyboardInterrupt), error:
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="first"):
        error.raise_if_any()
    assert not error


def test_how_often_a_backward_pass_reads_gradients(monkeypatch):
    """Once to send each, and once to see whether it has changed since."""
    parameters, reads, sent = [torch.zeros(8, requires_grad=True) for _ in range(30)], [], []
    read = ops.gradients_of
    monkeypatch.setattr(ops, "gradients_of", lambda some: reads.extend(some) or read(some))
    exchanges = [
        SimpleNamespace(bucket=Bucket([i], [one]), send=lambda _, i=i: sent.append(i), error=OwnError())
        for i, one in enumerate(Trained(p, "") for p in parameters)
    ]
    weights = SimpleNamespace(parameters=parameters, names=[""] * 30, holder=Holder(parameters))
    schedule = BackwardSchedule(weights, exchanges, SimpleNamespace(clipped=None))
    sum(p.sum() for p in parameters).backward()
    schedule.close(OwnError())
    assert sent == list(range(30)) and len(reads) == 60
