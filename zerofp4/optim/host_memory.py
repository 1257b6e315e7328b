"""Memory of the host that torch.distributed.checkpoint reads files through, a new buffer for each tensor."""

import contextlib
import functools

import torch

LARGEST = 2**25 - 2**16
"""Bytes of a buffer that glibc still learns from: it looks at none above 32 MB."""

COUNT = 16
"""Buffers, so that one is larger than what is free in the heap, from which there is nothing to learn."""


@functools.cache
def keep_freed_buffers() -> None:
    """Have the next buffer take the pages of those that were freed, once and for all in this process.

    glibc hands what is freed to the kernel at once where it was larger than any block before, and the end of
    its heap where that is twice as long. Two buffers are there at a time, which is about so much: then each
    page of a file is read into a new one, and that takes as long again. What it has seen freed once it keeps,
    up to 64 MB. These buffers are never written to, so they take addresses and no memory; where the system
    does not even give those, a load is as slow as it was.
    """
    held = []
    with contextlib.suppress(RuntimeError):
        held += (torch.empty(LARGEST, dtype=torch.uint8) for _ in range(COUNT))
    held.clear()
