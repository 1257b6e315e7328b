"""Ranks on the CPU that share memory in files, in place of GPUs."""

from __future__ import annotations

import contextlib
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from zerofp4.distributed import GroupReference, rank_and_size
from zerofp4.engine.peers import Copies, Peers
from zerofp4.optim import zero

PADDING = 4096


class Mapped(NamedTuple):
    """As torch's handle of a symmetric tensor. wholes: by rank, uint8."""

    wholes: list[torch.Tensor]

    @property
    def buffer_ptrs(self) -> list[int]:
        return [whole.data_ptr() for whole in self.wholes]

    def get_buffer(self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset: int) -> torch.Tensor:
        first = offset * dtype.itemsize
        nbytes = math.prod(shape) * dtype.itemsize
        return self.wholes[rank][first : first + nbytes].view(dtype).view(shape)


class Queued(NamedTuple):
    """A place behind the copies of before, as an event is."""

    run: Callable[[], None]

    def wait(self, _=None) -> None:
        self.run()


class FilePeers(Peers):
    """Peers whose barriers the hosts wait in. late: copies are made when somebody waits for them, with what
    is there by then, as the slowest copy engine would; else at once, as the fastest.
    """

    def __init__(self, group: dist.ProcessGroup, late: bool):
        self.group, self.device, self._late = GroupReference(group), torch.device("cpu"), late
        self.rank, self.size = rank_and_size(group)
        self.failed = torch.zeros((), dtype=torch.float32)
        self._status = torch.zeros(1, dtype=torch.int32)
        self._handles, self._copies = [], {}
        self._queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._made = 0
        self.log: list[str] = []

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "memory"
            path.write_bytes(bytes(nbytes + PADDING))
            paths = [None] * self.size
            dist.all_gather_object(paths, str(path), group=self.group())
            size = nbytes + PADDING
            wholes = [torch.from_file(p, shared=True, size=size, dtype=torch.uint8) for p in paths]
            dist.barrier(self.group())
        handle = Mapped(wholes)
        first = handle.buffer_ptrs[self.rank]
        self._handles.append((first, first + nbytes, handle))
        return handle.get_buffer(self.rank, shape, dtype, 0)

    def arrive(self) -> None:
        self.log.append("arrive")
        dist.barrier(self.group())

    def open(self) -> None:
        self._copy_until(math.inf)
        dist.barrier(self.group())

    def start_copies(self, first: Copies, second: Copies) -> Queued:
        self._queue += itertools.chain(first, second)
        place = self._made + len(self._queue)
        if not self._late:
            self._copy_until(place)
        return Queued(lambda: self._copy_until(place))

    def start_sending(self, whole: torch.Tensor, count: int) -> None:
        self.start_copies(self._copies_of(whole, 0, count), [])

    def start_gather(self, whole: torch.Tensor, sent: int = 0) -> Queued:
        self.start_copies(self._copies_of(whole, sent, whole.numel() // self.size), [])
        self._copy_until(math.inf)
        dist.barrier(self.group())
        return Queued(lambda: None)

    def _copy_until(self, place: float) -> None:
        while self._queue and self._made < place:
            target, source = self._queue.pop(0)
            target.copy_(source)
            self._made += 1


@contextlib.contextmanager
def sharing_files(world, late: bool) -> Iterator[tuple[SimpleNamespace, dist.ProcessGroup]]:
    """Optimizers that are built inside share memory in files where transport="peer" is asked for. Yields the
    world on the CPU, whatever its ranks have, and a group of it.
    """
    alone = SimpleNamespace(rank=world.rank, world_size=world.world_size, device=torch.device("cpu"))

    def find(transport, given, _):
        return None if transport == "collective" else FilePeers(given, late), None

    with mock.patch.object(zero, "find_peers", find):
        yield alone, dist.new_group(backend="gloo")
