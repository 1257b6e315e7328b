"""Gradients that ranks write into each other's memory one bucket after the other: ranks of one process, whose
copies are made when the test says so.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import assert_bytes_equal

from zerofp4 import ops
from zerofp4.engine import EarlyPeerReducer, FlatGradients, GradientViews, exchange, flat, make_wire
from zerofp4.engine.peers import Peers

SIZES = (700, 40, 3000, 129, 511)
BUCKETS = (range(2), range(2, 4), range(4, 5))
"""Which parameters are in which. Of gradients that are rounded two have memory at a time."""


class Handle:
    """As torch's of a symmetric tensor."""

    def __init__(self, wholes):
        self.wholes, self.buffer_ptrs = wholes, [whole.data_ptr() for whole in wholes]

    def get_buffer(self, rank, shape, dtype, offset):
        return self.wholes[rank].view(-1)[offset : offset + math.prod(shape)].view(shape)


class Memory(Peers):
    """That of one rank. common: by number of the call of zeros(), what it gave to every rank. log: what was
    queued by now, copies too, which none but a wait makes.
    """

    def __init__(self, rank, size, common):
        self.rank, self.size, self._common = rank, size, common
        self._handles, self.log, self._copies = [], [], []

    def zeros(self, shape, dtype):
        number = len(self._handles)
        if number == len(self._common):
            self._common.append([torch.full(shape, math.nan, dtype=dtype) for _ in range(self.size)])
        own = self._common[number][self.rank]
        self._handles.append((own.data_ptr(), own.data_ptr() + own.nbytes, Handle(self._common[number])))
        return own

    def start_copies(self, first, second):
        self.log.append("copies")
        self._copies += [*first, *second]
        return Left(self, len(self._copies))

    def make_copies(self, count=None):
        for i, (target, source) in enumerate(self._copies[:count]):
            target.copy_(source)
            self._copies[i] = (target[:0], source[:0])

    def wait_until_sent(self):
        self.log.append("wait")
        self.make_copies()

    def arrive(self):
        self.log.append("arrive")


class Left:
    def __init__(self, memory, count):
        self._memory, self._count = memory, count

    def wait(self):
        self._memory.log.append("wait for some")
        self._memory.make_copies(self._count)


@pytest.fixture(params=[None, torch.float16, torch.float32], ids=str)
def ranks(request, monkeypatch):
    """Three: the parameters of each, and its reducer."""
    common, found = [], []
    for rank in range(3):
        for module in (flat, exchange):
            monkeypatch.setattr(module, "rank_and_size", lambda _, rank=rank: (rank, 3))
        parameters = [torch.zeros(n, dtype=torch.bfloat16, requires_grad=True) for n in SIZES]
        buffers = [flat.DenseBuffer(part, [parameters[i] for i in part], None) for part in BUCKETS]
        for buffer in buffers:
            buffer.allocate()
        wire = make_wire(request.param, None, parameters)
        found.append((parameters, EarlyPeerReducer(buffers, None, wire, Memory(rank, 3, common))))
    return found


def make_gradients(ranks, seed):
    """By rank; one parameter has none anywhere, and one has none on a rank."""
    for rank, (parameters, _) in enumerate(ranks):
        generator = torch.Generator().manual_seed(10 * seed + rank)
        for i, p in enumerate(parameters):
            has = i != 1 and (i, rank) != (3, 2)
            p.grad = torch.randn(SIZES[i], generator=generator).to(p) if has else None
    return [[p.grad for p in parameters] for parameters, _ in ranks]


def start(ranks, gradients, buckets=BUCKETS):
    for b in range(len(buckets)):
        for (_, reducer), mine in zip(ranks, gradients, strict=True):
            reducer.start(b, {i: mine[i] for i in reducer.buffers[b].indices})


def check_means(ranks, gradients):
    """Of what is begun with: in the FP32 slices, and as an update reads it."""
    for _, reducer in ranks:
        reducer.begin([])
    dtype = ranks[0][1].dtypes[0]
    for rank, (_, reducer) in enumerate(ranks):
        for b, buffer in enumerate(reducer.buffers):
            rows = torch.zeros(3, buffer.numel, dtype=dtype)
            for row, mine in zip(rows, gradients, strict=True):
                for i, view in zip(buffer.indices, buffer.whole_views(row), strict=True):
                    if mine[i] is not None:
                        view.copy_(mine[i])
            slices = rows[:, buffer.begin : buffer.begin + buffer.slice_numel].contiguous()
            expected = torch.empty(buffer.slice_numel)
            ops.average(slices, expected)
            reducer.finish(b)
            assert_bytes_equal(buffer.gradients, expected, f"rank {rank}: bucket {b}")
            received, own, _ = reducer.bring(b)
            found = torch.empty_like(expected)
            ops.average_rows(received, found)
            assert_bytes_equal(found, expected, f"rank {rank}: rows of bucket {b}")
            mine = zip(buffer.indices, buffer.own_views(slices[rank]), strict=True)
            expected = {i: view for i, view in mine if view is not None}
            assert own.keys() == expected.keys()
            for i, view in own.items():
                assert_bytes_equal(view, expected[i], f"rank {rank}: own gradients of parameter {i}")


def test_the_means_of_three_ranks(ranks):
    for step in range(3):
        gradients = make_gradients(ranks, step)
        start(ranks, gradients)
        check_means(ranks, gradients)


def test_what_was_begun_with_again(ranks):
    """On some ranks, in part or twice, before any copy is made: what was first is nowhere."""
    for step in range(3):
        dropped = make_gradients(ranks, 50 + step)
        start(ranks[:1], dropped[:1])
        start(ranks[1:2], dropped[1:2], BUCKETS[:2])
        for _, reducer in ranks:
            reducer.drop()
        gradients = make_gradients(ranks, step)
        start(ranks, gradients)
        check_means(ranks, gradients)


def test_nothing_is_read_before_all_ranks_have_sent(ranks):
    """And, in reduce(), nothing is sent before all have read."""
    _, reducer = ranks[0]
    log, gradients = reducer._peers.log, make_gradients(ranks, 0)
    reducer.start(0, None)
    assert log == []
    start(ranks, gradients)
    stays = isinstance(reducer._sources[0], GradientViews)
    third = ["copies"] if stays else ["wait for some", "copies"]  # where the first one's was
    assert log == ["copies", "copies", *third]
    log.clear()
    reducer.begin([])
    assert log == ["wait", "arrive"]
    log.clear()
    reducer.reduce([])
    assert log == ["wait", "arrive", "arrive"]
    log.clear()
    start(ranks, make_gradients(ranks, 1))
    assert log == (["copies"] * 3 if stays else third * 3)
    reducer.drain()
    assert log[-1] == "wait" and not any(target.numel() for target, _ in reducer._peers._copies)


def test_what_could_not_be_sent_is_told_once(ranks, monkeypatch):
    (_, reducer), gradients = ranks[0], make_gradients(ranks, 0)
    take, calls = FlatGradients.take, []

    def refuse(self, mine):
        calls.append(self)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory today")
        take(self, mine)

    with monkeypatch.context() as patch:
        patch.setattr(FlatGradients, "take", refuse)
        start(ranks[:1], gradients[:1])
    assert reducer._peers.log.count("copies") == 2
    with pytest.raises(RuntimeError, match="OutOfMemoryError: no memory today"):
        reducer.bring(0)
    with pytest.raises(RuntimeError, match="OutOfMemoryError: no memory today"):
        reducer.reduce([])
    assert reducer._peers.log[-1] == "arrive"  # the others wait for that
    reducer.drop()
    start(ranks, gradients)
    check_means(ranks, gradients)
