"""Chunks that a load has read get to their places on a thread of their own, and what goes wrong is raised."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading

import pytest
import torch
from early import waits_for

from zerofp4.optim.read_chunks import LARGE, MOST_SMALL, ReadChunks

SECONDS = 20.0  # for what another thread does at once


class Gate:
    """What a chunk waits for, and the order in which chunks arrived."""

    def __init__(self):
        self.open, self.order, self.threads = threading.Event(), [], set()

    def arrival(self, name, error=None):
        def arrive():
            assert threading.current_thread() is threading.main_thread() or self.open.wait(SECONDS)
            self.order.append(name)
            self.threads.add(threading.current_thread())
            if error is not None:
                raise error

        return arrive


def chunk(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8)


@pytest.fixture
def gate():
    made = Gate()
    yield made
    made.open.set()  # for what a test has left


def expecting(*sizes):
    reads = ReadChunks()
    for size in sizes:
        reads.expect(size)
    return reads


def test_who_reads_goes_on_while_a_large_chunk_arrives(gate):
    reads = expecting(LARGE, 1, 1, LARGE)
    reads.bring(chunk(LARGE), gate.arrival("large"), True)
    reads.bring(chunk(1), gate.arrival("behind it"), True)
    assert gate.order == []  # nobody waited
    reads.bring(chunk(1), gate.arrival("another optimizer's"), False)  # whose buffer others may have
    assert gate.order == ["another optimizer's"]
    gate.open.set()
    reads.bring(chunk(LARGE), gate.arrival("last"), True)  # returns when all is there
    assert gate.order[1:] == ["large", "behind it", "last"]
    assert len(gate.threads) == 2 and threading.main_thread() in gate.threads


def test_one_large_chunk_is_on_its_way_at_a_time(gate):
    reads = expecting(3 * LARGE)
    reads.bring(chunk(LARGE), gate.arrival(0), True)
    held = []

    def look():
        held.extend(gate.order)  # the second has not begun to arrive, nor has the first ended
        gate.open.set()

    threading.Timer(0, look).start()
    reads.bring(chunk(LARGE), gate.arrival(1), True)
    assert held == [] and gate.order[0] == 0
    reads.wait()
    assert gate.order == [0, 1]


def test_so_many_small_ones_wait_for_it(gate):
    reads = expecting(2 * LARGE)
    reads.bring(chunk(LARGE), gate.arrival("large"), True)
    for i in range(MOST_SMALL):
        reads.bring(chunk(1), gate.arrival(i), True)
    assert gate.order == []
    gate.open.set()
    reads.bring(chunk(1), gate.arrival("one more"), True)
    assert gate.order == ["large", *range(MOST_SMALL), "one more"]


def test_small_chunks_alone_are_there_at_once(gate):
    reads = expecting(100)
    for i in range(3):
        reads.bring(chunk(1), gate.arrival(i), True)
        assert gate.order[-1] == i
    assert gate.threads == {threading.main_thread()}


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_what_went_wrong_is_raised_by_the_end(gate, bad):
    gate.open.set()
    reads, error = expecting(3 * LARGE), ValueError("damaged")
    with pytest.raises(ValueError, match="damaged"):
        for i in range(3):
            reads.bring(chunk(LARGE), gate.arrival(i, error if i == bad else None), True)
    assert len(gate.order) in (bad + 1, bad + 2)
    reads.wait()  # and once


def test_where_a_file_has_less_those_who_use_it_hear_of_it(gate):
    gate.open.set()
    reads = expecting(2 * LARGE)
    reads.bring(chunk(LARGE), gate.arrival(0, ValueError("damaged")), True)
    with pytest.raises(ValueError, match="damaged"):
        copy.deepcopy(reads).wait()
    reads.expect(LARGE)  # another load into the same state dict, which knows nothing of the first
    with pytest.raises(ValueError, match="too"):
        reads.bring(chunk(LARGE), gate.arrival(1, ValueError("damaged too")), True)


def test_nothing_is_on_its_way_to_abandoned_memory(gate):
    reads = expecting(2 * LARGE)
    reads.bring(chunk(LARGE), gate.arrival(0, ValueError("damaged")), True)
    threading.Timer(0, gate.open.set).start()
    reads.abandon()
    assert gate.order == [0]


@pytest.mark.parametrize("inference", [True, False])
def test_a_chunk_is_written_as_by_who_reads(inference, device):
    """Where that is inference mode only inference mode may write; on a GPU in its order."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.inference_mode(inference), torch.cuda.stream(stream):
        target, source = torch.zeros(LARGE, device=device), torch.ones(LARGE)
        reads, streams = expecting(2 * LARGE), []

        def arrive():
            streams.append(stream and torch.cuda.current_stream(device))
            target.copy_(source)

        reads.bring(target, arrive, True)
        reads.wait()
        assert streams == [stream] and target.is_inference() == inference
        assert target.sum() == LARGE


FORK = """
import os
import signal

import torch

from zerofp4.optim.read_chunks import LARGE, ReadChunks

def load():
    reads, there = ReadChunks(), []
    reads.bring(torch.empty(LARGE, dtype=torch.uint8), lambda: there.append(1), True)
    reads.wait()
    return there

assert load() == [1]
child = os.fork()
if not child:
    signal.alarm(20)
    os._exit(0 if load() == [1] else 1)
assert os.waitpid(child, 0)[1] == 0, "a process that was forked waits for a thread that it does not have"
"""


def forked(_):
    return subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True)


@waits_for(forked)
def test_a_process_that_was_forked_has_a_thread_of_its_own(early):
    done = early(forked)
    assert done.returncode == 0, done.stderr
