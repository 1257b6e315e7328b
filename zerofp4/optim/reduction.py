"""Gradients from the model's parameters to the ranks' FP32 slices, through a bounded staging buffer.

What travels are the gradients' own values; the rank that owns an element adds them up in FP32, in rank order.
So no bit is lost that the gradients had, no sum depends on a library's algorithm, and bfloat16 gradients take
half the bytes of FP32 sums.
"""

import bisect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerofp4 import ops
from zerofp4.distributed import GroupReference, Pending, Stage, rank_and_size, reduce_max, start_exchange
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.optim.flat import ALIGNMENT, FlatBuffer
from zerofp4.optim.parameters import gradient_dtype
from zerofp4.shard import intersect

BUCKET_MB = 256.0
"""Megabytes of one bucket as it travels, all ranks' parts together. Four of them are held: two are packed and
sent, two received and added up, in turns.
"""

NORM = "finding the norm of the gradients"
"""The stage of global_norm()."""


class Wire(NamedTuple):
    """How gradients travel.

    dtype: what they are rounded to before they are added; None is their own, as their parameters have it when
    the optimizer is built. bucket_mb: as BUCKET_MB.
    """

    dtype: torch.dtype | None
    bucket_mb: float

    def dtype_of(self, buffer: FlatBuffer) -> torch.dtype:
        """That of the gradients of all its parameters, or float32 which holds the values of all."""
        dtypes = {gradient_dtype(parameter) for parameter in buffer.parameters}
        return self.dtype or (dtypes.pop() if len(dtypes) == 1 else torch.float32)


def make_wire(gradient_wire: torch.dtype | None, bucket_mb: float | None) -> Wire:
    """Raises ValueError for arguments that cannot be meant."""
    if gradient_wire is not None and gradient_wire not in WEIGHT_DTYPES:
        raise ValueError(f"gradient_wire must be None or one of {WEIGHT_DTYPES}, got {gradient_wire!r}")
    size = BUCKET_MB if bucket_mb is None else bucket_mb
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size < math.inf:
        raise ValueError(f"bucket_mb must be a positive number of megabytes, got {bucket_mb!r}")
    return Wire(gradient_wire, float(size))


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

    sent: [world_size, n] of the dtype that travels, rank r's stretch in row r. received: this rank's stretch
    from every rank; its own is packed there. output: float32 [n] of this rank's gradients. gaps: what is
    packed and belongs to no parameter. In a world of one where nothing is rounded, all are the output.
    """

    sent: torch.Tensor
    received: torch.Tensor
    output: torch.Tensor
    pieces: list[Piece]
    gaps: list[torch.Tensor]


class GradientReducer:
    """Averages gradients over the group, in FP32, into the `gradients` of flat buffers.

    A bucket is packed while the one before it travels; in a world of one they are packed where they belong.
    """

    def __init__(self, buffers: Sequence[FlatBuffer], group: dist.ProcessGroup | None, wire: Wire):
        self.buffers, self.group, self._wire = buffers, GroupReference(group), wire
        self.rank, self.world_size = rank_and_size(group)
        self._dtypes = [wire.dtype_of(buffer) for buffer in buffers]
        self._travels_as = {
            i: dtype
            for buffer, dtype in zip(buffers, self._dtypes, strict=True)
            for i in buffer.indices
            if dtype != torch.float32
        }
        self._buckets: list[Bucket] = []
        for dtype in dict.fromkeys(self._dtypes):
            self._add_buckets([b for b, d in zip(buffers, self._dtypes, strict=True) if d == dtype], dtype)

    def _add_buckets(self, buffers: Sequence[FlatBuffer], dtype: torch.dtype) -> None:
        """Those of the buffers whose gradients travel as dtype."""
        if self.world_size == 1 and self._wire.dtype in (None, torch.float32):
            for buffer in buffers:
                whole = buffer.gradients.view(1, -1)
                self._buckets.append(make_bucket(buffer, 0, buffer.slice_numel, whole, whole))
            return
        longest = max(buffer.slice_numel for buffer in buffers)
        part = int(self._wire.bucket_mb * 2**20) // (dtype.itemsize * self.world_size)
        chunk = min(longest, max(part // ALIGNMENT * ALIGNMENT, ALIGNMENT))
        staging = torch.empty(4, self.world_size * chunk, dtype=dtype, device=buffers[0].device)
        for buffer in buffers:
            for start in range(0, buffer.slice_numel, chunk):
                size = min(chunk, buffer.slice_numel - start)
                turn = 2 * (len(self._buckets) % 2)
                sent, received = staging[turn : turn + 2, : self.world_size * size].unbind()
                shape = self.world_size, size
                self._buckets.append(make_bucket(buffer, start, size, sent.view(shape), received.view(shape)))

    def check(self, gradients: Sequence[torch.Tensor | None], names: Sequence[str]) -> None:
        """Raises TypeError for a gradient that would lose values on its way which nobody asked to lose."""
        if self._wire.dtype is not None:
            return
        for i, dtype in self._travels_as.items():
            gradient = gradients[i]
            if gradient is not None and gradient.dtype != dtype:
                raise TypeError(
                    f"{names[i]} has a gradient of {gradient.dtype}, which would be rounded to {dtype} to be "
                    "added to those of other ranks: build the optimizer with gradient_wire=torch.float32, or "
                    f"{dtype} if that is meant"
                )

    def reduce(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Average the gradients of all trainable parameters, in order; None counts as zeros. Collective."""
        pending = None
        for bucket in self._buckets:
            pack(bucket, gradients)
            # Before the last one is added up: what is queued after it waits for it, the network too.
            travelling = self.start(bucket)
            if pending is not None:
                add_up(*pending)
            pending = bucket, travelling
        if pending is not None:
            add_up(*pending)

    def start(self, bucket: Bucket) -> list[Pending]:
        """Begin to send every other rank its stretch."""
        if self.world_size == 1:
            return []
        return start_exchange(bucket.received, bucket.sent, self.group(), "averaging gradients")


def add_up(bucket: Bucket, travelling: Sequence[Pending]) -> None:
    """The mean of what has been received, once it is there."""
    for work in travelling:
        work.wait()
    if bucket.received is not bucket.sent:
        ops.average(bucket.received, bucket.output)


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


def make_bucket(
    buffer: FlatBuffer, start: int, size: int, sent: torch.Tensor, received: torch.Tensor
) -> Bucket:
    """Elements [start, start + size) of every slice: this rank's are packed into `received`, the others'
    into `sent`.
    """
    pieces, gaps = [], []
    for rank in range(buffer.world_size):
        begin = rank * buffer.slice_numel + start
        stretch = (received if rank == buffer.rank else sent)[rank]
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
    return Bucket(sent, received, buffer.gradients[start : start + size], pieces, gaps)


def pack(bucket: Bucket, gradients: Sequence[torch.Tensor | None]) -> None:
    """Fill a bucket from gradients of any floating dtype, in the shapes of their parameters."""
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
            with Stage(NORM, group):
                dist.all_reduce(total, group=group)
        return total.pow(1 / p).float()
    largest = norms.max()
    # Not every backend's MAX keeps a NaN, so it travels as a flag.
    pair = torch.stack([largest.where(~largest.isnan(), 0.0), largest.isnan().double()])
    reduce_max(pair, group, NORM)
    return pair[0].where(pair[1] == 0, math.nan).float()
