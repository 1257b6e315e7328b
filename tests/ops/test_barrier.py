"""Barriers of ranks, here on one GPU: what they leave to others while they wait, and how waiting ends."""

from __future__ import annotations

import time

import pytest
import torch

from zerofp4 import ops

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
LARGE = 1 << 26
"""Elements that keep every multiprocessor busy."""


class Ranks:
    """Barriers of ranks that are one GPU."""

    def __init__(self, timeouts: list[float]):
        """timeouts: in seconds, of each rank."""
        size, device = len(timeouts), torch.device("cuda")
        self._flags = torch.zeros(size, size, dtype=torch.int32, device=device)
        self.failed = [torch.zeros((), device=device) for _ in timeouts]
        self.status = [torch.zeros(1, dtype=torch.int32, pin_memory=True) for _ in timeouts]
        rows = tuple(row.data_ptr() for row in self._flags)
        state = zip(self.status, self.failed, timeouts, strict=True)
        self.barriers = [ops.Barrier(rows, rank, *of_rank) for rank, of_rank in enumerate(state)]


def comes(event: torch.cuda.Event, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not event.query() and time.monotonic() < end:
        time.sleep(0.01)
    return event.query()


@needs_gpu
def test_what_is_queued_behind_a_barrier_leaves_the_gpu_to_others():
    """The other rank may wait for a kernel of this very GPU, as in a pipeline: what was launched behind the
    barrier must not sit on the multiprocessors until it opens.
    """
    device = torch.device("cuda")
    ranks = Ranks([30, 30])
    first, second = ranks.barriers
    rows = torch.ones(2, LARGE, dtype=torch.bfloat16, device=device)
    mean = torch.zeros(LARGE, device=device)
    work, done = torch.ones(LARGE, device=device), torch.zeros(LARGE, device=device)
    ops.average(rows, mean)  # loads the kernels, which waits for the device
    torch.add(work, 1, out=done)
    mean.zero_()
    done.zero_()
    torch.cuda.synchronize()
    waiting, other, late = (torch.cuda.Stream() for _ in range(3))
    with torch.cuda.stream(waiting):
        first.run()
        ops.average(rows, mean)
        behind = waiting.record_event()
    time.sleep(0.2)  # the dependents of the barrier have been launched by now
    with torch.cuda.stream(other):
        torch.add(work, 1, out=done)
        beside = other.record_event()
    ran, was_waiting = comes(beside, 10), not behind.query()
    with torch.cuda.stream(late):  # opens it, whatever was found
        second.run()
    opened = comes(behind, 25)
    torch.cuda.synchronize()
    assert was_waiting and opened
    assert ran, "a kernel of another stream waited for the barrier"
    assert mean.eq(1).all() and done.eq(2).all()


@needs_gpu
def test_a_rank_that_gave_up_keeps_nobody_waiting():
    """It tells the others, who name the rank that it has given up on: here rank 2, which does not come. Those
    that wait for that rank too hear of it, and those that come later.
    """
    ranks = Ranks([1, 30, 30])
    first, second, third = ranks.barriers
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    began = time.monotonic()
    for stream, barrier in zip(streams, (first, second), strict=False):
        with torch.cuda.stream(stream):
            barrier.run()
            barrier.run()
    torch.cuda.synchronize()
    assert 0.5 < time.monotonic() - began < 10
    with torch.cuda.stream(streams[2]):
        third.run()  # late: others have come to this barrier, and gone
        third.run()
    torch.cuda.synchronize()
    assert time.monotonic() - began < 10
    assert [status.item() for status in ranks.status] == [3, 3, 3]
    assert all(failed.item() == 1 for failed in ranks.failed)


@needs_gpu
def test_ranks_that_meet_again_and_again():
    """One may be at the next barrier before the other has seen that it has come to this one."""
    ranks = Ranks([30, 30])
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for stream, barrier in zip(streams, ranks.barriers, strict=True):
        with torch.cuda.stream(stream):
            for _ in range(200):
                barrier.run()
    torch.cuda.synchronize()
    assert [status.item() for status in ranks.status] == [0, 0]
    assert all(failed.item() == 0 for failed in ranks.failed)
