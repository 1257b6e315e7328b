"""A checksum of a tensor's elements, as fast as memory on a CPU, and on a GPU without waiting for it."""

import zlib
from collections.abc import Callable
from typing import Any

import torch

from zerofp4.layout import ceil_div

COLUMNS, ROWS = 512, 64
BLOCK = 8 * COLUMNS * ROWS
"""Bytes whose sums are taken together: 256 KB, which stay in a core's cache."""

GPU_BLOCKS = 256
"""That a GPU takes at a time."""


def checksum(values: torch.Tensor, *about: Any) -> int:
    """Of the elements of a tensor in their order, and of what is said about them.

    In each block sums of rows and of columns of words, modulo 2**64, and a CRC of these: as fast as memory,
    where a CRC of all bytes would take longer than to write them. Any change within 8 bytes is found, and any
    two words that changed places. A CPU and a GPU find the same.
    """
    return begin_checksum(values, *about)()


def begin_checksum(values: torch.Tensor, *about: Any) -> Callable[[], int]:
    """What returns it, later: a GPU takes its sums meanwhile, in the order of its current stream."""
    flat = values.detach().reshape(-1).contiguous()
    data = flat.view(torch.uint8)
    whole = data.numel() - data.numel() % BLOCK
    sums = (_sums_on_gpu if data.is_cuda else _sums_on_cpu)(data[:whole], data[whole:])

    def finish() -> int:
        columns, rows, rest = sums()
        return zlib.crc32(rest, zlib.crc32(repr((str(values.dtype), *about, columns, rows)).encode()))

    return finish


Sums = Callable[[], tuple[int, int, Any]]
"""CRCs of the sums of columns and of rows of all blocks, and the bytes that fill no block."""


def _sums_on_cpu(data: torch.Tensor, rest: torch.Tensor) -> Sums:
    """In numpy, where a sum of a block costs a fifth of torch's threads."""
    columns = rows = 0
    for block in data.numpy().view("int64").reshape(-1, ROWS, COLUMNS):
        columns, rows = zlib.crc32(block.sum(0), columns), zlib.crc32(block.sum(1), rows)
    return lambda: (columns, rows, rest.numpy())


def _sums_on_gpu(data: torch.Tensor, rest: torch.Tensor) -> Sums:
    """All that the host needs travels in one copy, for which nobody waits before it is asked for."""
    count, size = data.numel() // BLOCK, rest.numel()
    found = data.new_empty((count * (COLUMNS + ROWS) + ceil_div(size, 8)) * 8)
    words = found.view(torch.int64)
    columns = words[: count * COLUMNS].view(-1, COLUMNS)
    rows = words[count * COLUMNS :][: count * ROWS].view(-1, ROWS)
    for i, part in enumerate(data.split(BLOCK * GPU_BLOCKS) if count else ()):
        if part.storage_offset() % 8:
            part = part.clone()  # words are read where they are aligned
        blocks, own = part.view(torch.int64).view(-1, ROWS, COLUMNS), slice(i * GPU_BLOCKS, None)
        torch.sum(blocks, 1, out=columns[own][: len(blocks)])
        torch.sum(blocks, 2, out=rows[own][: len(blocks)])
    start = count * (COLUMNS + ROWS) * 8
    found[start:][:size].copy_(rest)
    here, arrival = found.to("cpu", non_blocking=True), torch.cuda.Event()
    arrival.record(torch.cuda.current_stream(data.device))

    def finish() -> tuple[int, int, Any]:
        arrival.synchronize()
        by_column, by_row = here[: count * COLUMNS * 8], here[count * COLUMNS * 8 : start]
        return zlib.crc32(by_column.numpy()), zlib.crc32(by_row.numpy()), here[start:][:size].numpy()

    return finish
