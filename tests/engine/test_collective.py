"""CollectiveTransport and ArrivingMeans in one process: which memory is read, and which is sent."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_bytes_equal

from zerofp4 import ops
from zerofp4.distributed import OwnError
from zerofp4.engine import (
    ArrivingMeans,
    BackwardSchedule,
    Bucket,
    CollectiveTransport,
    GradientMemory,
    Trained,
    buckets,
    collective,
)
from zerofp4.tensors import Holder


def transport_of(parameters):
    """Of one bucket in a world of one."""
    return CollectiveTransport([Bucket(range(len(parameters)), parameters)])


def test_only_gradients_in_another_order_are_copied(device):
    """In a world of one, which reads the others where they are."""
    parameters = [torch.zeros(8, 3, device=device).requires_grad_() for _ in range(3)]
    transport = transport_of(parameters)
    gradients = [torch.ones(8, 3, device=device), None, torch.ones(3, 8, device=device).t()]
    in_order, missing, turned = transport.prepare(gradients)
    assert in_order is gradients[0] and missing is None
    assert turned.is_contiguous() and turned.equal(gradients[2])


def test_gradients_of_two_dtypes_are_copied_once(device):
    """To the means, which are FP32."""
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    parameters = [torch.zeros(8, 4, dtype=torch.bfloat16, device=device).requires_grad_() for _ in range(2)]
    parameters[1].grad_dtype = torch.float32
    transport = transport_of(parameters)
    gradients = [torch.randn(8, 4, dtype=d, device=device) for d in (torch.bfloat16, torch.float32)]
    prepared = transport.prepare(gradients)
    assert all(mine is theirs for mine, theirs in zip(prepared, gradients, strict=True))
    transport.average(0, prepared)
    for gradient, view in zip(gradients, transport.buckets[0].gradient_views, strict=True):
        assert_bytes_equal(view, gradient.float().view(-1), "mean")


def test_messages_of_a_step_that_was_left_are_waited_for():
    """They would arrive where those of the next one do."""
    transport, waited = transport_of([torch.zeros(300)]), []
    transport._sent[0] = SimpleNamespace(wait=lambda: waited.append(1))
    transport.begin()
    assert len(waited) == 1 and not transport._sent


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


# Gradients that are sent in backward passes


def early(monkeypatch, wire, count, rank, size):
    """ArrivingMeans of a rank among several, whose buckets have a parameter each; and the calls of
    start_exchange.
    """
    monkeypatch.setattr(buckets, "rank_and_size", lambda group: (rank, size))
    calls = []

    def start_exchange(received, sent, *_):
        calls.append([[[m.numel() for m in messages] for messages in side] for side in (received, sent)])
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(collective, "start_exchange", start_exchange)
    parameters = [torch.zeros(700, dtype=torch.bfloat16, requires_grad=True) for _ in range(count)]
    several = [Bucket([i], [p], wire=wire) for i, p in enumerate(parameters)]
    for bucket in several:
        bucket.replica_count = 1
        bucket.allocate()
    transport = CollectiveTransport(several, in_flight=2)
    return ArrivingMeans(transport), calls


@pytest.mark.parametrize(
    ("wire", "expected"),
    [(None, ["copy", "aside", "send"]), (torch.float32, ["aside", "copy", "send"])],
    ids=["aliased", "memory in turns"],
)
def test_on_which_stream_gradients_are_copied(monkeypatch, wire, expected):
    """A later backward pass writes aliased memory as soon as its own stream is there: a copy on another
    stream, which waits for other ranks, would come after it.
    """
    log = []

    @contextlib.contextmanager
    def aside(self):
        log.append("aside")
        yield

    monkeypatch.setattr(ArrivingMeans, "_aside", aside)
    exchange, _ = early(monkeypatch, wire, 1, 0, 2)
    monkeypatch.setattr(collective, "start_exchange", lambda *_: log.append("send"))
    monkeypatch.setattr(GradientMemory, "take", lambda self, gradients: log.append("copy"))
    exchange.send_gradients(0, {0: torch.ones(700, dtype=torch.bfloat16)})
    assert log == expected


def test_ranks_are_connected_when_it_is_built(monkeypatch):
    """By a bucket of which nobody uses anything: a first message waits for the other rank, and no backward
    pass may.
    """
    exchange, calls = early(monkeypatch, None, 2, 1, 3)
    row = [exchange.buckets[0].slice_numel]
    assert calls == [[[row] * 3] * 2] and not exchange._transport._sent


def test_at_most_two_buckets_are_on_their_way(monkeypatch):
    """What was received for a third would lie in the memory of the first."""
    exchange, _ = early(monkeypatch, None, 5, 0, 2)
    averaged, average = [], CollectiveTransport.average

    def counted(transport, b, *arguments):
        averaged.append(b)
        average(transport, b, *arguments)

    monkeypatch.setattr(CollectiveTransport, "average", counted)
    for b in range(5):
        exchange.send_gradients(b, {b: torch.ones(700, dtype=torch.bfloat16)})
        assert averaged == list(range(b - 1))
    exchange.send_gradients(0, {0: torch.ones(700, dtype=torch.bfloat16)})  # another round, before a step
    assert averaged == list(range(5))
    exchange.drain()
    assert averaged == [*range(5), 0]


def test_how_often_a_backward_pass_reads_gradients(monkeypatch):
    """Once to send each, and once to see whether it has changed since."""
    parameters, reads, sent = [torch.zeros(8, requires_grad=True) for _ in range(30)], [], []
    read = ops.gradients_of
    monkeypatch.setattr(ops, "gradients_of", lambda some: reads.extend(some) or read(some))
    exchange = SimpleNamespace(
        buckets=[Bucket([i], [p]) for i, p in enumerate(parameters)],
        send_gradients=lambda b, gradients: sent.append(b),
        error=None,
        memory=[None] * 30,
    )
    schedule = BackwardSchedule([Trained(p, "") for p in parameters], Holder(parameters), exchange)
    sum(p.sum() for p in parameters).backward()
    schedule.close(OwnError(), reduces=True)
    assert sent == list(range(30)) and len(reads) == 60
