"""Optimizer updates of many tensors, and the amaxes that they leave in a cast plan's reduced vector."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

import zerofp4._C as _C
from zerofp4.layout import ceil_div
from zerofp4.ops.device import DTYPE_CODES, target_of
from zerofp4.ops.peers import PeerRows
from zerofp4.ops.stages import MasterPiece
from zerofp4.ops.streams import Filled, StreamUse
from zerofp4.shard import Shard
from zerofp4.storage import address_of, addresses_of

ROW = 128
"""Columns of the matrix that a tensor without tiles is taken for: those of a kernel's strip."""


class AdamWItem(NamedTuple):
    """One tensor of an update: contiguous, float32, on the device of the others.

    The state is None where there is none yet: then only the amaxes are taken.
    """

    master: torch.Tensor
    step: torch.Tensor | None
    """float32 [] or [1]: how many updates there were."""
    exp_avg: torch.Tensor | None
    exp_avg_sq: torch.Tensor | None
    gradient_dtype: torch.dtype
    pieces: tuple[MasterPiece, ...]
    """What it is of a weight, where its amaxes are wanted; of several matrices, one behind the other."""
    present: torch.Tensor | None = None
    """float64 of one element on the device: where it is 0, the item counts as one without gradient."""


class RankGradients(NamedTuple):
    """Gradients that have not been averaged: the mean is ((r0 + r1) + ...) / ranks, in float32, and the bytes
    are those of ops.average followed by an update.

    received: [ranks, n] contiguous; this rank's row is not read, but what begin() is given. Or rows in the
    memory of the ranks, of which this rank's own is what begin() is given. masters: float32 [n], a slice in
    which every item's master lies where its gradients lie in the rows.
    """

    received: torch.Tensor | PeerRows
    masters: torch.Tensor
    rank: int

    def pieces(self) -> _C.GradientPieces:
        if isinstance(self.received, PeerRows):
            rows, masters = self.received.addresses, address_of("masters", self.masters)
            return _C.GradientPieces(rows=rows, masters=masters, rank=self.rank, count=len(rows))
        count, stride = self.received.shape
        return _C.GradientPieces(
            received=address_of("received", self.received),
            masters=address_of("masters", self.masters),
            stride=stride,
            rank=self.rank,
            count=count,
        )


class _Split:
    """An item as one for each of its pieces, which follow one another in its arrays.

    parts: those items. begins: where each begins, in elements. Each counts steps for itself, the first in the
    item's own counter and the others in copies of it: none could read a counter that another advances.
    """

    def __init__(self, item: AdamWItem):
        self.parts, self.begins, self._step = [item], [0], item.step
        self._copies = None
        if len(item.pieces) < 2:
            return
        numels = [piece.shard.numel for piece in item.pieces]
        self.begins = list(itertools.accumulate(numels[:-1], initial=0))
        steps: list[torch.Tensor | None] = [item.step] * len(numels)
        if item.step is not None:
            self._copies = torch.empty(len(numels) - 1, dtype=torch.float32, device=item.step.device)
            steps[1:] = self._copies.split(1)
        arrays = [
            [None] * len(numels) if array is None else array.view(-1).split(numels)
            for array in (item.master, item.exp_avg, item.exp_avg_sq)
        ]
        self.parts = [
            AdamWItem(master, step, *moments, item.gradient_dtype, (piece,), item.present)
            for piece, step, master, *moments in zip(item.pieces, steps, *arrays, strict=True)
        ]

    def take_step(self) -> None:
        """Make the copies what the counter is now, on its device."""
        if self._copies is not None:
            self._copies.copy_(self._step.view(1).expand_as(self._copies))


def _descriptor(item: AdamWItem) -> _C.AdamWDescriptor:
    numel = item.master.numel()
    whole = MasterPiece(None, Shard(0, numel), (ceil_div(numel, ROW), ROW), torch.float32, -1, -1)
    _, shard, (rows, cols), dtype, tile_offset, amax_offset = item.pieces[0] if item.pieces else whole
    return _C.AdamWDescriptor(
        master=address_of("master", item.master),
        exp_avg=address_of("exp_avg", item.exp_avg),
        exp_avg_sq=address_of("exp_avg_sq", item.exp_avg_sq),
        step=address_of("step", item.step),
        present=address_of("present", item.present),
        gradient_dtype=DTYPE_CODES[item.gradient_dtype],
        start=shard.start,
        numel=shard.numel,
        rows=rows,
        cols=cols,
        weight_dtype=DTYPE_CODES[dtype],
        tile_offset=tile_offset,
        amax_offset=amax_offset,
    )


class AdamWStage:
    """AdamW for a list of tensors: begin() per parameter group, then one update().

    reduced: the vector that the amaxes of items with a piece go to, cleared since the last update: words of
    tiles with owned elements are written, words of amax groups raised.

    Masters, moments and gradients that do not lie at a vector's alignment (4 columns) are accessed element by
    element on a GPU.

    Nothing synchronizes with a GPU. Holds addresses: whoever built it keeps the items' tensors alive. A CUDA
    graph that has captured its calls, but not its making, can be replayed while all of these live.
    """

    def __init__(self, items: Sequence[AdamWItem], reduced: torch.Tensor | None):
        self.device = items[0].master.device
        splits = [_Split(item) for item in items]
        parts = [part for split in splits for part in split.parts]
        self._splits = None if len(parts) == len(items) else splits
        self._firsts = list(itertools.accumulate((len(split.parts) for split in splits), initial=0))
        self._plan = _C.AdamWPlan(
            on_cpu=self.device.type == "cpu",
            tensors=[_descriptor(part) for part in parts],
            reduced=address_of("reduced", reduced),
        )
        if self.device.type == "cuda":
            contents = torch.frombuffer(bytearray(self._plan.descriptor_bytes()), dtype=torch.uint8)
            # torch does not reuse pinned memory before the copies from it are done.
            self._table = contents.pin_memory().to(self.device, non_blocking=True)
            self._steps = torch.empty(self._plan.step_bytes(), dtype=torch.uint8, device=self.device)
            self._plan.set_device_tables(self._table.data_ptr(), self._steps.data_ptr())
        self._filled, self._streams = Filled(self.device), StreamUse(self.device)
        self._filled.note()

    def begin(self, options: _C.AdamWOptions, first: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Count the step of items [first, first + len(gradients)), which share their options.

        gradients: contiguous, of the item's gradient_dtype and length; None leaves the item as it is.
        """
        # An empty tensor has no address, but its steps count; nothing is read there.
        present = iter(addresses_of("gradients", [g for g in gradients if g is not None]))
        addresses = [0 if gradient is None else next(present) or 1 for gradient in gradients]
        if self._splits is not None:
            splits = self._splits[first : first + len(gradients)]
            for split in splits:
                split.take_step()
            addresses = [
                0 if gradient is None else start + begin * gradient.itemsize
                for split, gradient, start in zip(splits, gradients, addresses, strict=True)
                for begin in split.begins
            ]
        self._plan.begin(self._target(), options, self._firsts[first], addresses)

    def update(self, brought: RankGradients | None = None) -> None:
        """brought: those of the other ranks; then what begin() was given are this rank's own, of the same
        dtype.
        """
        self._plan.update(self._target(), _C.GradientPieces() if brought is None else brought.pieces())

    def _target(self) -> _C.Target:
        """The current stream, which may be another than that of the last call."""
        if self.device.type == "cuda" and self._streams.note((self._table, self._steps)):
            self._filled.wait()
        return target_of(self.device)


def adamw_options(
    *,
    lr: float | torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool,
    skip: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    **others: object,
) -> _C.AdamWOptions:
    """The options of a parameter group, whose other entries are passed over. lr as a float32 tensor on a GPU
    is read there, by the kernels.

    skip: float32, one element, on the device of the items: where it is not 0 as begin() runs, the update
    leaves the items as they are, uncounted, and only takes their amaxes.
    factor: likewise; gradients are multiplied by it, in float32, as they are read, but not RankGradients.
    """
    on_gpu = isinstance(lr, torch.Tensor) and lr.is_cuda
    return _C.AdamWOptions(
        lr_address=address_of("lr", lr) if on_gpu else 0,
        skip=address_of("skip", skip),
        factor=address_of("factor", factor),
        lr=0.0 if on_gpu else float(lr),
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        maximize=bool(maximize),
    )
