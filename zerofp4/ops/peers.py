"""What ranks of one host do in each other's memory: reading rows of it, and meeting there."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

import zerofp4._C as _C
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.ops.average import SQUARES
from zerofp4.ops.device import DTYPE_CODES, target_of
from zerofp4.storage import address_of, check_buffer

MAX_PEERS: int = _C.MAX_PEERS
"""How many ranks can read each other's memory."""


class PeerRows(NamedTuple):
    """A matrix [ranks, n] of which every rank has its row in memory that all can read.

    addresses: by rank, where its row begins, at a multiple of 16 bytes; this rank's own too.
    """

    addresses: tuple[int, ...]
    numel: int
    dtype: torch.dtype


def average_rows(rows: PeerRows, out: torch.Tensor, squares: torch.Tensor | None = None) -> None:
    """average() of them: out = ((row 0 + row 1) + ...) / ranks, in float32.

    out: float32 [n] on the device from which the rows can be read. squares: as of average().
    Raises TypeError or ValueError for others.
    """
    if rows.dtype not in WEIGHT_DTYPES:
        raise TypeError(f"rows must have one of the dtypes {WEIGHT_DTYPES}, got {rows.dtype}")
    if not 0 < len(rows.addresses) <= MAX_PEERS:
        raise ValueError(f"there must be 1 to {MAX_PEERS} rows, got {len(rows.addresses)}")
    check_buffer("out", out, (rows.numel,), torch.float32, out.device)
    if squares is not None:
        check_buffer("squares", squares, SQUARES, torch.int64, out.device)
    _C.average(
        target=target_of(out.device),
        pieces=0,
        rows=rows.addresses,
        dtype=DTYPE_CODES[rows.dtype],
        count=len(rows.addresses),
        numel=rows.numel,
        output=address_of("out", out),
        squares=address_of("squares", squares),
    )


class Barrier:
    """A place in the queue of a GPU behind which all ranks have come to it; run() queues one, and no host
    waits.

    flags: by rank, where its uint32 [ranks] flags are, zeros at first, in memory that all ranks can write.
    status: int32 [1], pinned, which becomes 1 + the number of a rank that did not come within the time: to
    this rank, or to one that this rank meets. From then on nothing is waited for, and `failed` is not 0.
    failed: float32 [] on the device.

    Of barriers with the same flags every rank must run as many, one after the other. Holds addresses: whoever
    built it keeps the flags alive. A CUDA graph may hold any number of them.
    """

    def __init__(
        self,
        flags: Sequence[int],
        rank: int,
        status: torch.Tensor,
        failed: torch.Tensor,
        timeout_s: float,
    ):
        self._device = failed.device
        self._passed = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._held = status, failed
        self._barrier = _C.Barrier(
            flags=list(flags),
            passed=self._passed.data_ptr(),
            failed=address_of("failed", failed),
            status=address_of("status", status),
            rank=rank,
            timeout_ns=int(timeout_s * 1e9),
        )

    def run(self) -> None:
        """On the current stream."""
        self._barrier.run(target_of(self._device))
