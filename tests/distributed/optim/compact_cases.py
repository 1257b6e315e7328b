"""What the tests of compact state share: tensors of an update, and what reference.compact_adamw_step makes of
them.
"""

from __future__ import annotations

import dataclasses

import torch
from helpers import assert_bytes_equal, assert_values_equal

from zerofp4 import ops, reference
from zerofp4.format import STATE_GROUP
from zerofp4.layout import ceil_div
from zerofp4.shard import Shard


def embedded(values: torch.Tensor, offset: int) -> torch.Tensor:
    """A flat view of the values, so many elements behind the beginning of its memory."""
    buffer = torch.empty(offset + values.numel(), dtype=values.dtype, device=values.device)
    return buffer[offset:].copy_(values.reshape(-1))


@dataclasses.dataclass
class Tensor:
    """A shard of a matrix in compact state, and the same in plain tensors."""

    matrix: tuple[int, int]
    start: int
    end: int
    master: torch.Tensor
    """float32 [rows, cols] of the whole matrix, which each step replaces."""
    low: torch.Tensor | None
    high: torch.Tensor
    """What the kernels have of the masters; the float32 ones where there is no low byte."""
    moments: reference.CompactMoments
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    scales: torch.Tensor
    step: torch.Tensor
    number: int

    @classmethod
    def make(cls, master, split, number=0, owned=None, offset=0) -> Tensor:
        """master: float32 [rows, cols]. owned: the first and the last element, both between groups."""
        rows, cols = master.shape
        start, end = owned or (0, rows * cols)
        device, numel = master.device, end - start
        master = reference.round_master(master.cpu(), torch.tensor(0)) if split else master.cpu()
        high, low = (part.to(device).flatten()[start:end] for part in reference.split_master(master))
        plain = master.to(device).flatten()[start:end]
        groups = Tensor.groups_before(end, cols) - Tensor.groups_before(start, cols)
        return cls(
            (rows, cols),
            start,
            end,
            master,
            embedded(low, offset) if split else None,
            embedded(high if split else plain, offset),
            reference.no_moments(rows, cols),
            embedded(torch.zeros(numel, dtype=torch.int8, device=device), offset),
            embedded(torch.zeros(numel, dtype=torch.uint8, device=device), offset),
            torch.zeros(groups, 2, device=device),
            torch.zeros((), device=device),
            number,
        )

    @staticmethod
    def groups_before(position: int, cols: int) -> int:
        row, col = divmod(position, cols)
        return row * ceil_div(cols, STATE_GROUP) + col // STATE_GROUP

    def piece(self, dtype=torch.bfloat16, tile_offset=-1, amax_offset=-1) -> ops.MasterPiece:
        shard = Shard(self.start, self.end - self.start)
        return ops.MasterPiece(self.high, shard, self.matrix, dtype, tile_offset, amax_offset)

    def item(self, gradient_dtype, piece=None) -> ops.AdamWItem:
        state = self.high, self.step, self.exp_avg, self.exp_avg_sq
        pieces = (piece or self.piece(),)
        compact = {"compact": True, "scales": self.scales, "low": self.low, "number": self.number}
        return ops.AdamWItem(*state, gradient_dtype, pieces, **compact)

    def owned(self, whole: torch.Tensor) -> torch.Tensor:
        """What is owned of a tensor of the whole matrix."""
        return whole.reshape(-1)[self.start : self.end]

    def update(self, gradient: torch.Tensor, **options) -> None:
        """Of the reference. gradient: [rows, cols]; what is not owned may be anything."""
        number = None if self.low is None else self.number
        step = int(self.step.item()) + 1
        self.master, self.moments = reference.compact_adamw_step(
            self.master, gradient.cpu(), self.moments, step, number=number, **options
        )

    def stored(self) -> torch.Tensor:
        """The float32 values of what the kernels have of the masters, on the CPU."""
        high = self.high.cpu()
        return high if self.low is None else reference.join_master(high, self.low.cpu())

    def check(self, what: str) -> None:
        assert_values_equal(self.stored(), self.owned(self.master), f"{what}: masters")
        assert_bytes_equal(self.exp_avg.cpu(), self.owned(self.moments.exp_avg), f"{what}: exp_avg")
        assert_bytes_equal(self.exp_avg_sq.cpu(), self.owned(self.moments.exp_avg_sq), f"{what}: exp_avg_sq")
        first = self.groups_before(self.start, self.matrix[1])
        scales = self.moments.scales.view(-1, 2)[first : first + len(self.scales)]
        assert_bytes_equal(self.scales.cpu(), scales, f"{what}: scales")
