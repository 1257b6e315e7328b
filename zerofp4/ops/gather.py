"""Packed codes into the staging buffer of a gather, and out of it: the stages around its collective."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

import zerofp4._C as _C
from zerofp4.ops.device import DescriptorTable, is_capturing
from zerofp4.storage import address_of

GATHER_PRESENT: int = _C.GATHER_PRESENT
GATHER_FAILED: int = _C.GATHER_FAILED
GATHER_OTHER: int = _C.GATHER_OTHER
"""What a rank says in a gather: it takes part, it found an error, or it wants another gather."""

GATHER_REFUSED: int = _C.GATHER_REFUSED
GATHER_WITHOUT_STEP: int = _C.GATHER_WITHOUT_STEP
STATUS_RANK_SHIFT: int = _C.STATUS_RANK_SHIFT
"""What a gather leaves in the status of a plan, with the number of the first such rank above it: a rank found
an error, or its last step did not take place.
"""

GATHER_VECTOR: int = _C.GATHER_VECTOR
"""Bytes. A run whose input and output leave the same remainder of it is copied fastest, then one where that
is so of 4.
"""


class GatherRun(NamedTuple):
    """Bytes of one rank and one weight, at addresses."""

    input: int
    output: int
    low: int
    """Of the byte with the low code of the first byte, which belongs to another rank; 0 for a whole one."""
    bytes: int


class GatherHeader(NamedTuple):
    """The step that a gather belongs to: where it did not take place, no rank takes anything.

    reduced, hash, status: as CastStages has them. What kept the ranks from taking anything goes to status.
    """

    reduced: torch.Tensor
    hash: int
    status: torch.Tensor


class GatherStages:
    """pack() and unpack() around an all-gather of the staging buffer, each a single launch on the current
    stream.

    staging: uint8 [ranks, bytes of a slot, a multiple of GATHER_VECTOR]; the first word of a slot, int32,
    says whether its rank takes part. unpack() changes nothing unless all do; that is decided on the device.

    Holds addresses: whoever built it keeps the memory alive. captured: by address, the storage that CUDA
    graphs use in which the stages were captured; kept alive here.
    """

    def __init__(self, staging: torch.Tensor, rank: int, header: GatherHeader | None):
        self.device = staging.device
        self.captured: dict[int, torch.Tensor] = {}
        self._staging, self._header = staging, header
        self._table = DescriptorTable(self.device)
        self._options = {
            "on_cpu": self.device.type == "cpu",
            "staging": address_of("staging", staging),
            "slot": staging.shape[1],
            "rank": rank,
            "ranks": staging.shape[0],
            "reduced": 0 if header is None else address_of("reduced", header.reduced),
            "hash": 0.0 if header is None else float(header.hash),
            "status": 0 if header is None else address_of("status", header.status),
        }

    def bind(
        self, own: Sequence[GatherRun], received: Sequence[GatherRun], buffers: Sequence[torch.Tensor]
    ) -> None:
        """Take these runs from now on: `own` from weights to this rank's slot, `received` from slots to
        weights. `buffers` are what of weights they lie in.

        Nothing has changed when it raises (RuntimeError, while a CUDA graph is captured).
        """
        own_words, received_words = ([word for run in runs for word in run] for runs in (own, received))
        plan = _C.GatherPlan(own=own_words, received=received_words, **self._options)
        self._table.load(plan, bool(own or received))
        self._plan, self._buffers = plan, buffers

    def target(self) -> _C.Target:
        """Where both stages run now: on the current stream."""
        if is_capturing(self.device):
            self._table.hold()
            self.captured.update((buffer.data_ptr(), buffer.detach()) for buffer in self._buffers)
        return self._table.target(self._staging)

    def pack(self, target: _C.Target, state: int) -> None:
        """This rank's bytes and what it says; in any state but GATHER_PRESENT its codes are not touched."""
        self._plan.pack(target, state)

    def unpack(self, target: _C.Target) -> None:
        """The bytes of the other ranks, where all take part and their step took place."""
        self._plan.unpack(target)
