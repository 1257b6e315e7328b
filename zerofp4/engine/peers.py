"""Memory that the ranks of one host share: every rank reads and writes that of all others, through NVLink."""

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofp4.distributed import GroupReference, attempt, exchange, rank_and_size, timeout_seconds
from zerofp4.ops import Barrier, PeerRows

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Targets in the memory of other ranks, and what is copied there."""


def halves(copies: Copies) -> tuple[Copies, Copies]:
    """Of each, 1D, the first half and the second: one copy engine does not fill NVLink."""
    middles = [source.numel() // 32 * 16 for _, source in copies]
    pairs = list(zip(copies, middles, strict=True))
    return (
        [(target[:middle], source[:middle]) for (target, source), middle in pairs],
        [(target[middle:], source[middle:]) for (target, source), middle in pairs],
    )


class Peers:
    """The ranks of a group, with memory that all of them read and write, and barriers of their GPUs.

    Building it is collective, and so is zeros(). What is queued waits for other ranks on the device only, in
    the same order on every rank, and at most as long as the group's timeout: a rank that has not come by then
    is named by check(), `failed` (float32 [] on the device) becomes 1, and updates that heed it change
    nothing. A rank that has given up tells the others, which give up too as they meet it.

    The memory stays where it is, and is freed with the tensors that zeros() gave and their views.
    """

    rendezvous_count = 0
    """How often this process has made memory that others access. torch tells one time from another by it, so
    ranks of different counts would wait for each other until the timeout.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = GroupReference(group), device
        self.rank, self.size = rank_and_size(group)
        self._ranks = dist.get_process_group_ranks(group)  # by which messages name them
        # Multicast is for sums in the switch, and its objects have been seen to outlive their processes.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._handles: list[tuple[int, int, Any]] = []  # first and last address of this rank's, and torch's
        self.failed = torch.zeros((), dtype=torch.float32, device=device)
        self._status = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self._flags = self.zeros((2, self.size), torch.int32)
        arguments = self.rank, self._status, self.failed, timeout_seconds(group, device)
        self._arrivals, self._gathers = (Barrier(self.rows(flags), *arguments) for flags in self._flags)
        # What is copied to other ranks travels beside what is computed, and is not to wait behind it: in two
        # parts, of which one may leave while the other is computed.
        self._stream, self._other_stream = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self._sent: torch.cuda.Event | None = None
        self._copies: dict[tuple[int, int, int], Copies] = {}

    @property
    def others(self) -> list[int]:
        """All ranks but this one, beginning with its neighbour, so that not all write to one at a time."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    @property
    def nbytes(self) -> int:
        """Of the memory of this rank that others can access: torch.cuda's counts leave it out."""
        return sum(last - first for first, last, _ in self._handles)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Collective: zeros of this shape on every rank, in memory that all can access.

        Raises the error of the first rank that has no room for them, on every rank.
        """
        from torch.distributed._symmetric_memory import rendezvous

        tensor, error = attempt(_allocate, shape, dtype, self.device)
        exchange(None, error, self.group(), "allocating shared memory")
        Peers.rendezvous_count += 1
        handle = rendezvous(tensor, self.group().group_name)
        first = handle.buffer_ptrs[self.rank]
        self._handles.append((first, max(first, tensor.data_ptr() + tensor.nbytes), handle))
        return tensor

    def rows(self, own: torch.Tensor) -> tuple[int, ...]:
        """By rank, the address of what is, in this rank's shared memory, `own`."""
        first, handle = self._find(own)
        return tuple(address + own.data_ptr() - first for address in handle.buffer_ptrs)

    def rows_like(self, own: torch.Tensor) -> PeerRows:
        """What is, in each rank's shared memory, `own` here; 1D and contiguous."""
        return PeerRows(self.rows(own), own.numel(), own.dtype)

    def at(self, rank: int, own: torch.Tensor) -> torch.Tensor:
        """What is, in the shared memory of another rank, `own` here; contiguous."""
        first, handle = self._find(own)
        return handle.get_buffer(rank, own.shape, own.dtype, (own.data_ptr() - first) // own.itemsize)

    def _find(self, own: torch.Tensor) -> tuple[int, Any]:
        address = own.data_ptr()
        found = [(first, handle) for first, last, handle in self._handles if first <= address <= last]
        return max(found, key=lambda one: one[0])  # where one begins at another's end, the one that begins

    def arrive(self) -> None:
        """What is queued next on the current stream finds what the others have queued before theirs, done."""
        self._arrivals.run()

    def open(self) -> None:
        """The gathers that follow write into weights that nobody reads any more: what reads them is queued
        on the current stream of each rank by now.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._gathers.run()

    def start_copies(self, first: Copies, second: Copies) -> torch.cuda.Event:
        """Begin to copy into the memory of other ranks what is there once the current stream is here: by the
        GPUs' copy engines, beside what is computed, and behind all copies and gathers of before. Both lists
        at once. A stream that waits for what this returns finds all of them done.
        """
        self._follow()
        self._send(self._other_stream, first)
        self._send(self._stream, second)
        return self._note_sent()

    def start_sending(self, whole: torch.Tensor, count: int) -> None:
        """The beginning of start_gather(): the first `count` elements of the slice, as they are now."""
        self._follow()
        self._send(self._other_stream, self._copies_of(whole, 0, count))

    def start_gather(self, whole: torch.Tensor, sent: int = 0) -> torch.cuda.Event:
        """Begin to give all ranks this rank's slice of `whole`, 1D in shared memory, as it is once the
        current stream is here: by the GPUs' copy engines, beside what is computed. A stream that waits for
        what this returns finds the slices of all ranks.

        sent: how much of it start_sending() was given.
        """
        if sent == 0:
            sent = whole.numel() // self.size // 32 * 16
            self.start_sending(whole, sent)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self._send(self._stream, self._copies_of(whole, sent, whole.numel() // self.size))
        self._note_sent()
        with torch.cuda.stream(self._stream):
            self._gathers.run()
            done = torch.cuda.Event()
            done.record(self._stream)
        return done

    def _follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self._other_stream.wait_stream(self._stream)  # behind open(), too

    def _send(self, stream: torch.cuda.Stream, copies: Copies) -> None:
        with torch.cuda.stream(stream):
            for target, own in copies:
                target.copy_(own, non_blocking=True)

    def _note_sent(self) -> torch.cuda.Event:
        self._stream.wait_stream(self._other_stream)
        self._sent = torch.cuda.Event()
        self._sent.record(self._stream)
        return self._sent

    def wait_until_sent(self) -> None:
        """The current stream waits until everything that was to be sent has left this rank."""
        if self._sent is not None:
            self._sent.wait(torch.cuda.current_stream(self.device))

    def _copies_of(self, whole: torch.Tensor, first: int, last: int) -> Copies:
        """These elements of this rank's slice in the memory of each other rank, and here."""
        key = whole.data_ptr(), first, last
        if key not in self._copies:
            mine = whole.chunk(self.size)[self.rank][first:last]
            self._copies[key] = [(self.at(r, mine), mine) for r in self.others]
        return self._copies[key]

    def check(self) -> None:
        """Raise RuntimeError where ranks did not meet, as far as the device has come. Waits for nothing."""
        missing = int(self._status[0])
        if missing:
            raise RuntimeError(
                f"rank {self._ranks[missing - 1]} did not come to a barrier of the GPUs within the process "
                "group's timeout: it has died, was stopped or is elsewhere. Weights of this rank may be of "
                "two steps, and its optimizer is of no more use: build it anew and load a checkpoint"
            )


def _allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    from torch._C._distributed_c10d import _SymmetricMemory

    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    tensor = _SymmetricMemory.empty_strided_p2p(tuple(shape), strides, dtype, device)
    tensor.zero_()
    torch.cuda.synchronize(device)  # before others write there
    return tensor
