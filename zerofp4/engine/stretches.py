"""What travels between ranks, in parts, and the memory for it."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zerofp4.distributed import OwnError, Pending
from zerofp4.engine.flat import FlatBuffer
from zerofp4.engine.gradients import FlatGradients
from zerofp4.ops import PeerRows


class Stretch(NamedTuple):
    """Elements [first, first + n) of every rank's slice of a buffer.

    here: [world_size, n] of this rank's own gradients, row r goes to rank r. received: [world_size, n], what
    the others have of this rank's slice; its own row is written to where they are averaged. In a world of one
    both are the same. sent, arrivals: the messages, by rank, of which every row is one.
    """

    source: FlatGradients
    buffer: FlatBuffer
    first: int
    here: torch.Tensor
    received: torch.Tensor
    sent: list[list[torch.Tensor]]
    arrivals: list[list[torch.Tensor]]


class Brought(NamedTuple):
    """Gradients of a buffer that are here, and not added up yet.

    received: [world_size, slice_numel], of every other rank, or rows in their memory; None in a world of one.
    own: this rank's, by the position of the parameter, one element after the other. row: which of the rows
    they are.
    """

    received: torch.Tensor | PeerRows | None
    own: dict[int, torch.Tensor]
    row: int


class Flight(NamedTuple):
    """A stretch that travels. error: what went wrong on this rank before it did; what the others get of
    it then is of no use, and nobody waits for it.
    """

    stretch: Stretch
    works: list[Pending]
    error: OwnError


class Turns:
    """Memory for tensors of which `count` are used at a time, each in turn with those after it; None for all.

    layouts: their shapes and dtypes.
    """

    def __init__(
        self,
        layouts: Sequence[tuple[Sequence[int], torch.dtype]],
        device: torch.device,
        count: int | None = 2,
    ):
        most = max((math.prod(shape) * dtype.itemsize for shape, dtype in layouts), default=0)
        count = max(len(layouts), 1) if count is None else count
        self._places = itertools.cycle(torch.empty(count, most, dtype=torch.uint8, device=device))

    def next(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for the next one, contiguous."""
        return next(self._places)[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
