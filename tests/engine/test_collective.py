"""Exchanges by collectives in one process: which memory is read, and which is sent."""

from types import SimpleNamespace

import pytest
import torch
from helpers import assert_bytes_equal

from zerofp4 import ops
from zerofp4.distributed import OwnError
from zerofp4.engine import (
    ABSTAIN,
    BackwardSchedule,
    Bucket,
    Trained,
    buckets,
    collective,
    collective_exchanges,
    in_place,
    zeros_on,
)
from zerofp4.tensors import Holder


def exchanges_of(several, **options):
    return collective_exchanges(several, zeros_on(several[0].device), **options)


def test_gradients_of_two_dtypes_are_copied_once(device):
    """To the means, which are FP32."""
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    parameters = [torch.zeros(8, 4, dtype=torch.bfloat16, device=device).requires_grad_() for _ in range(2)]
    parameters[1].grad_dtype = torch.float32
    (exchange,) = exchanges = exchanges_of([Bucket(range(2), parameters)])
    gradients = [torch.randn(8, 4, dtype=d, device=device) for d in (torch.bfloat16, torch.float32)]
    prepared = in_place(exchanges, gradients)
    assert all(mine is theirs for mine, theirs in zip(prepared, gradients, strict=True))
    exchange.send(prepared)
    assert exchange.receive() is None
    for gradient, view in zip(gradients, exchange.bucket.gradient_views, strict=True):
        assert_bytes_equal(view, gradient.float().view(-1), "mean")


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


# Several ranks


def of_ranks(monkeypatch, rank, size, wire=None, count=1, **options):
    """Exchanges of a rank among several, whose buckets have a parameter each; and what start_exchange() was
    given and what was waited for, in order.
    """
    monkeypatch.setattr(buckets, "rank_and_size", lambda group: (rank, size))
    log = []

    def start_exchange(received, sent, *_):
        log.append([[[m.numel() for m in messages] for messages in side] for side in (received, sent)])
        number = sum(isinstance(entry, list) for entry in log) - 1
        return SimpleNamespace(wait=lambda: log.append(number))

    monkeypatch.setattr(collective, "start_exchange", start_exchange)
    parameters = [torch.zeros(700, dtype=torch.bfloat16, requires_grad=True) for _ in range(count)]
    several = [Bucket([i], [p], wire=wire) for i, p in enumerate(parameters)]
    for bucket in several:
        bucket.replica_count = 1
        bucket.allocate()
    return exchanges_of(several, **options), log


def test_messages_of_a_step_that_was_left_are_waited_for(monkeypatch):
    """They would arrive where those of the next one do."""
    (exchange,), log = of_ranks(monkeypatch, 0, 2)
    exchange.send(ABSTAIN)
    exchange.send(ABSTAIN)
    assert log[1] == 0 and len(log) == 3


@pytest.mark.parametrize(("turns", "count"), [({}, 2), ({"turns": None}, 3)])
def test_memory_that_buckets_send_from_in_turns(monkeypatch, turns, count):
    """It is written again when it has left; by then this rank's own gradients are with those of the others,
    and wait for the step. With turns=None the host never waits in the middle of a backward pass.
    """
    exchanges, log = of_ranks(monkeypatch, 0, 2, torch.float32, 3, early=True, **turns)
    assert len({exchange.memory.flat.data_ptr() for exchange in exchanges}) == count
    for value, exchange in enumerate(exchanges):
        exchange.send([torch.full((700,), float(value), dtype=torch.bfloat16)])
    assert [entry for entry in log if not isinstance(entry, list)] == ([] if turns else [0])
    for value, exchange in enumerate(exchanges):
        (own,) = exchange.receive().own
        assert own.numel() and (own == value).all()


def test_gradients_that_are_sent_early_wait_for_the_step(monkeypatch):
    """What was received of all buckets is there at once, and not averaged."""
    exchanges, _ = of_ranks(monkeypatch, 0, 2, count=4, early=True)
    assert len({exchange.received.data_ptr() for exchange in exchanges}) == 4
    for exchange in exchanges:
        exchange.send([torch.ones(700, dtype=torch.bfloat16)])
    assert all(exchange.receive().rows is not None for exchange in exchanges)
    assert not any("gradients" in vars(exchange.bucket) for exchange in exchanges)


def test_how_often_a_backward_pass_reads_gradients(monkeypatch):
    """Once to send each, and once to see whether it has changed since."""
    parameters, reads, sent = [torch.zeros(8, requires_grad=True) for _ in range(30)], [], []
    read = ops.gradients_of
    monkeypatch.setattr(ops, "gradients_of", lambda some: reads.extend(some) or read(some))
    exchanges = [
        SimpleNamespace(bucket=Bucket([i], [p]), send=lambda _, i=i: sent.append(i), error=OwnError())
        for i, p in enumerate(parameters)
    ]
    schedule = BackwardSchedule([Trained(p, "") for p in parameters], Holder(parameters), exchanges)
    sum(p.sum() for p in parameters).backward()
    schedule.close(OwnError(), reduces=True)
    assert sent == list(range(30)) and len(reads) == 60
