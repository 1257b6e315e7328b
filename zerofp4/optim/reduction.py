"""Gradients from the model's parameters to the ranks' FP32 slices, through a bounded staging buffer."""

import bisect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerofp4.distributed import GroupReference, rank_and_size, reduce_max, reduce_scatter_slices
from zerofp4.optim.flat import ALIGNMENT, FlatBuffer
from zerofp4.shard import intersect

STAGING_ELEMENTS = 1 << 23
"""FP32 elements of one of the two staging buffers, all ranks' parts together: 32 MiB."""


class Piece(NamedTuple):
    """Elements [first, last) of the gradient of a parameter, and where they go.

    whole: these are all of its elements; then the destination has the parameter's shape, else it is 1D.
    """

    parameter: int
    first: int
    last: int
    destination: torch.Tensor
    whole: bool


class Bucket(NamedTuple):
    """The same stretch of every rank's slice.

    staged: float32 [world_size * n], rank r's stretch at r * n; output: float32 [n] of this rank's gradients;
    gaps: what of `staged` belongs to no parameter.
    """

    staged: torch.Tensor
    output: torch.Tensor
    pieces: list[Piece]
    gaps: list[torch.Tensor]


class GradientReducer:
    """Averages gradients over the group, in FP32, into the `gradients` of flat buffers.

    A bucket is packed while the one before it travels; in a world of one they are packed where they belong.
    """

    def __init__(self, buffers: Sequence[FlatBuffer], group: dist.ProcessGroup | None):
        self.buffers, self.group = buffers, GroupReference(group)
        self.rank, self.world_size = rank_and_size(group)
        device = buffers[0].device
        self._buckets = self._make_buckets(device)

    def _make_buckets(self, device: torch.device) -> list[Bucket]:
        if self.world_size == 1:
            return [make_bucket(b, 0, b.slice_numel, b.gradients) for b in self.buffers]
        longest = max(buffer.slice_numel for buffer in self.buffers)
        chunk = min(longest, max(STAGING_ELEMENTS // self.world_size, 1))
        staging = torch.empty(2, self.world_size * chunk, dtype=torch.float32, device=device)
        buckets = []
        for buffer in self.buffers:
            for start in range(0, buffer.slice_numel, chunk):
                size = min(chunk, buffer.slice_numel - start)
                staged = staging[len(buckets) % 2, : self.world_size * size]
                buckets.append(make_bucket(buffer, start, size, staged))
        return buckets

    def reduce(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Average the gradients of all trainable parameters, in order; None counts as zeros. Collective."""
        pending = None
        for bucket in self._buckets:
            pack(bucket, gradients)
            if pending is not None:
                pending.wait()
            pending = self.reduce_scatter(bucket.output, bucket.staged)
        if pending is not None:
            pending.wait()
        if self.world_size > 1:
            for buffer in self.buffers:
                buffer.gradients.div_(self.world_size)

    def reduce_scatter(self, output: torch.Tensor, staged: torch.Tensor) -> dist.Work | None:
        """Begin output = the sum over the ranks of this rank's stretch of `staged`."""
        if self.world_size == 1:
            return None
        return reduce_scatter_slices(output, staged, self.group(), async_op=True)


def clip_arguments(max_norm: Any, norm_type: Any) -> tuple[float, float]:
    """Both as floats; raises ValueError for what is no number or cannot be a limit or a norm."""
    numbers = []
    for name, value, rule in (("max_norm", max_norm, "0 or more"), ("norm_type", norm_type, "positive")):
        try:
            number = float(value)
        except Exception:  # a value's own __float__ may raise anything
            raise ValueError(f"{name} must be a number, {rule}, got {value!r}") from None
        if not (number > 0 or (number == 0 and name == "max_norm")):
            raise ValueError(f"{name} must be {rule}, got {value!r}")
        numbers.append(abs(number))  # -0.0 is 0
    return numbers[0], numbers[1]


def make_bucket(buffer: FlatBuffer, start: int, size: int, staged: torch.Tensor) -> Bucket:
    """Elements [start, start + size) of every slice, to be packed into `staged`."""
    pieces, gaps = [], []
    for rank in range(buffer.world_size):
        begin = rank * buffer.slice_numel + start
        stretch = staged[rank * size : (rank + 1) * size]
        filled = 0
        i = max(bisect.bisect_right(buffer.offsets, begin) - 1, 0)
        while i < len(buffer.offsets) and buffer.offsets[i] < begin + size:
            parameter = buffer.parameters[i]
            part = intersect(buffer.offsets[i], parameter.numel(), begin, begin + size)
            if part.numel:
                at = buffer.offsets[i] + part.start - begin
                if at > filled:
                    gaps.append(stretch[filled:at])
                filled = at + part.numel
                whole = part.numel == parameter.numel()
                destination = stretch[at:filled].view(parameter.shape if whole else -1)
                pieces.append(Piece(buffer.indices[i], part.start, part.end, destination, whole))
            i += 1
        if filled < size:
            gaps.append(stretch[filled:])
    return Bucket(staged, buffer.gradients[start : start + size], pieces, gaps)


def pack(bucket: Bucket, gradients: Sequence[torch.Tensor | None]) -> None:
    """Fill the staged stretches from gradients of any floating dtype, in the shapes of their parameters."""
    zeros, destinations, sources = list(bucket.gaps), [], []
    for piece in bucket.pieces:
        gradient = gradients[piece.parameter]
        if gradient is None:
            zeros.append(piece.destination)
        else:
            destinations.append(piece.destination)
            # A view costs more than all else here, and most pieces are whole.
            part = gradient if piece.whole else gradient.reshape(-1)[piece.first : piece.last]
            sources.append(part)
    if zeros:
        torch._foreach_zero_(zeros)
    if sources:
        torch._foreach_copy_(destinations, sources)


def global_norm(buffers: Sequence[FlatBuffer], p: float, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The p-norm of the reduced gradients of all ranks, float32 []. Collective: one all-reduce.

    FP32 sums are kept short and added up in float64: one long FP32 sum is off by percents for 10**8 elements.
    """
    rows = [torch.linalg.vector_norm(b.gradients.view(-1, ALIGNMENT), p, dim=1) for b in buffers]
    norms = torch.cat(rows).double()
    if p != math.inf:
        total = norms.pow(p).sum()
        if group is not None:
            dist.all_reduce(total, group=group)
        return total.pow(1 / p).float()
    largest = norms.max()
    # Not every backend's MAX keeps a NaN, so it travels as a flag.
    pair = torch.stack([largest.where(~largest.isnan(), 0.0), largest.isnan().double()])
    reduce_max(pair, group)
    return pair[0].where(pair[1] == 0, math.nan).float()
