"""Buffers that a load reads through have the pages of those before them."""

import platform
import subprocess
import sys

import pytest
from early import waits_for

from zerofp4.optim import host_memory

SCRIPT = """
import resource

import torch

from zerofp4.optim.host_memory import keep_freed_buffers

def new_pages(sizes):
    before, kept = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, None
    for size in sizes:  # two are there at a time
        kept = torch.empty(size, dtype=torch.uint8).fill_(1)
    del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

sizes = [2**20 * megabytes for megabytes in (4, 1, 1, 4, 14, 14, 14) for _ in range(3)]
keep_freed_buffers()
new_pages(sizes)
print(new_pages(4 * sizes), 4 * sum(sizes) // resource.getpagesize())
"""


def script_run(_):
    return subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)


@waits_for(script_run)
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that hands memory back")
def test_a_buffer_has_the_pages_of_those_before_it(early):
    """In a process that has freed nothing as large: without it a fifth of the pages were new."""
    done = early(script_run)
    assert done.returncode == 0, done.stderr
    new, all_pages = map(int, done.stdout.split())
    assert new < all_pages / 100


def test_a_load_goes_on_where_there_are_no_such_addresses(monkeypatch):
    asked = []

    def refuse(size, dtype):
        asked.append(size)
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(host_memory.torch, "empty", refuse)
    host_memory.keep_freed_buffers.__wrapped__()
    assert asked == [host_memory.LARGEST]
