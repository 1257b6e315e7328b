"""A barrier of GPUs that waits: kernels of other streams must still run, whatever is queued behind it."""

from __future__ import annotations

import time

import pytest
import torch

from zerofp4 import ops

LARGE = 1 << 26
"""Elements that keep every multiprocessor busy."""


def barriers(flags: torch.Tensor, timeout_s: float) -> list[ops.Barrier]:
    """Of two ranks that are one GPU: flags are int32 [2, 2], a row for each."""
    failed = [torch.zeros((), device=flags.device) for _ in range(2)]
    status = [torch.zeros(1, dtype=torch.int32, pin_memory=True) for _ in range(2)]
    rows = tuple(row.data_ptr() for row in flags)
    return [ops.Barrier(rows, rank, status[rank], failed[rank], timeout_s) for rank in range(2)]


def comes(event: torch.cuda.Event, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not event.query() and time.monotonic() < end:
        time.sleep(0.01)
    return event.query()


def test_what_is_queued_behind_a_barrier_leaves_the_gpu_to_others():
    """The other rank may wait for a kernel of this very GPU, as in a pipeline: what was launched behind the
    barrier must not sit on the multiprocessors until it opens.
    """
    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is false")
    device = torch.device("cuda")
    flags = torch.zeros(2, 2, dtype=torch.int32, device=device)
    first, second = barriers(flags, timeout_s=30)
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
