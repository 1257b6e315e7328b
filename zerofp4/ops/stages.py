"""Stages of plans and of optimizer steps: many tensors in one launch each, by their addresses.

They are not torch operators: a schema cannot declare writes through a table of addresses.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

import zerofp4._C as _C
from zerofp4.format import BLOCK, STATE_GROUP
from zerofp4.layout import ceil_div
from zerofp4.ops.device import (
    DTYPE_CODES,
    DescriptorTable,
    StreamUse,
    is_capturing,
    scale_addresses,
)
from zerofp4.ops.layouts import padded_scale_list
from zerofp4.ops.peers import PeerRows
from zerofp4.ops.tensor_lists import numbers, packed, tensor_facts
from zerofp4.shard import Shard
from zerofp4.storage import NVFP4Storage, address_of

HEADER_WORDS: int = _C.HEADER_WORDS
ERROR_WORD: int = _C.ERROR_WORD
HASH_WORD: int = _C.HASH_WORD
PEER_ERROR: int = _C.PEER_ERROR
PLAN_MISMATCH: int = _C.PLAN_MISMATCH

ROW = 128
"""Columns of the matrix that an optimizer takes a tensor without tiles for: those of a kernel's strip."""

RANDOM_COLUMNS: int = _C.RANDOM_COLUMNS
"""So many neighbors of a row share a block of random bytes."""


# Casts


class MasterPiece(NamedTuple):
    """What this rank owns of a weight, and where its amaxes belong in a plan's reduced vector.

    matrix, dtype: the weight's [rows, cols] and dtype. The amax of its tile (0, 0) is word tile_offset, those
    of the others follow, row-major [ceil(rows/16), ceil(cols/16)]; the amax of its group is word amax_offset.
    An amax is the largest magnitude of the owned elements rounded to `dtype`, +inf where one of them is NaN
    or Inf. Tile words, which were cleared, are written: on a rank every tile belongs to one piece. A group's
    word is raised by maximum with what is there.
    """

    master: torch.Tensor | None
    """None where the rank owns nothing, and between the calls of a function that keeps no masters."""
    shard: Shard
    matrix: tuple[int, int]
    dtype: torch.dtype
    tile_offset: int
    amax_offset: int
    own_offset: int = -1
    cut_offsets: tuple[int, int] = (-1, -1)
    """Of a weight whose scales travel, and whose tiles or blocks have no words (tile_offset -1): the words of
    its own amax, raised as the group's is, and of the amaxes of the 1x16 blocks in which the shard begins and
    ends, -1 where it has all of that block.
    """


class CastItem(NamedTuple):
    """One weight of a cast."""

    record: NVFP4Storage
    piece: MasterPiece
    codes: torch.Tensor | None
    """uint8 bytes shard.byte_range of the packed weight; None where the rank owns nothing."""


def _weight_descriptor(item: CastItem) -> _C.WeightDescriptor:
    record, piece = item.record, item.piece
    own_amax = None if record.columnwise_amax is record.amax else record.columnwise_amax
    master_dtype = torch.float32 if piece.master is None else piece.master.dtype
    return _C.WeightDescriptor(
        master=address_of("master", piece.master),
        start=piece.shard.start,
        numel=piece.shard.numel,
        rows=piece.matrix[0],
        cols=piece.matrix[1],
        master_dtype=DTYPE_CODES[master_dtype],
        weight_dtype=DTYPE_CODES[piece.dtype],
        codes=address_of("codes", item.codes),
        amax=address_of("amax", record.amax),
        columnwise_amax=address_of("columnwise_amax", own_amax),
        rowwise_scale=scale_addresses("rowwise_scale", record.rowwise),
        columnwise_scale=scale_addresses("columnwise_scale", record.columnwise),
        tile_offset=piece.tile_offset,
        amax_offset=piece.amax_offset,
        block_rows=record.block[0],
        e4m3_max=0 if record.four_over_six is None else record.four_over_six.e4m3_max,
        squared_error=record.four_over_six is not None and record.four_over_six.error == "mse",
        own_offset=piece.own_offset,
        cut_offsets=piece.cut_offsets,
    )


class CastStages:
    """begin, amax, scale and cast of a list of weights on one device, each a single launch, on the current
    stream.

    reduced: float32 vector of HEADER_WORDS words, then whatever the items' offsets point to; a MAX all-reduce
    of it belongs between amax and scale.
    hash: an integer below 2**24 that tells plans apart.
    found_inf: float32 [1].
    status: int32 [1] on the CPU (pinned for a GPU), set to PEER_ERROR or PLAN_MISMATCH by `scale` and never
    cleared.

    Holds addresses: the items' tensors must stay where they are, and whoever built it keeps them alive.
    """

    def __init__(
        self,
        items: Sequence[CastItem],
        reduced: torch.Tensor,
        *,
        hash: int = 0,
        found_inf: torch.Tensor | None = None,
        status: torch.Tensor | None = None,
    ):
        self.device = reduced.device
        self._options = {
            "on_cpu": self.device.type == "cpu",
            "reduced": address_of("reduced", reduced),
            "reduced_numel": reduced.numel(),
            "hash": float(hash),
            "status": address_of("status", status),
        }
        self._reduced = reduced
        self._table = DescriptorTable(self.device)
        self.bind(items, found_inf)

    def bind(self, items: Sequence[CastItem], found_inf: torch.Tensor | None) -> None:
        """Take the addresses of the same items and of found_inf anew; the stages already queued keep the old
        ones.

        Nothing has changed when it raises (RuntimeError, while a CUDA graph is captured).
        """
        weights = [_weight_descriptor(item) for item in items]
        plan = _C.CastPlan(weights=weights, found_inf=address_of("found_inf", found_inf), **self._options)
        self._table.load(plan, len(weights) > 1)
        self._plan, self._found_inf = plan, found_inf

    def hold(self) -> None:
        """The stages are being captured in a CUDA graph: the table that it reads is never loaded again."""
        self._table.hold()

    def target(self) -> _C.Target:
        """Where the stages run now: on the current stream."""
        flags = () if self._found_inf is None else (self._found_inf,)
        return self._table.target(self._reduced, *flags)

    def begin(self, error: bool = False) -> None:
        """Clear the vector and write its header; with `error`, a flag that keeps every rank from writing."""
        self._plan.begin(self.target(), error)

    def amax(self) -> None:
        """Amaxes of the owned elements, into a vector that begin() has cleared.

        Tile words are written: on a rank every tile belongs to one writer. Only group words are raised by
        maximum with what is there.
        """
        self._plan.amax(self.target())

    def scale(self) -> None:
        """Every amax of every weight, and every scale but of weights whose scales travel, from the reduced
        vector.
        """
        self._plan.scale(self.target())

    def cast(self) -> None:
        """Codes of the owned elements, and where scales travel, the compact ones of their blocks."""
        self._plan.cast(self.target())

    def begin_amax(self, target: _C.Target) -> None:
        """begin() and amax() in one call; a step looks up its target once."""
        self._plan.begin_amax(target)

    def scale_cast(self, target: _C.Target) -> None:
        """scale() and cast() in one call."""
        self._plan.scale_cast(target)

    def scale_cast_in_two(
        self, target: _C.Target, weight: int, row: int, between: Callable[[], object]
    ) -> None:
        """scale_cast() that calls between() where codes of the weights before this one are queued, and of its
        rows before this one, and most of the others are not. Raises IndexError for others.
        """
        self._plan.scale(target)
        self._plan.cast_before(target, weight, row)
        between()
        self._plan.cast_from(target, weight, row)


def transpose_pairs(records: Sequence[NVFP4Storage]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(rowwise data, columnwise data) of each matrix of the records that have both."""
    pairs = []
    for record in records:
        copies = [side.data for _, side in record.sides() if side.data is not None]
        if len(copies) == 2:
            data = copies[0], copies[1]
            pairs += [data] if record.experts is None else zip(*map(torch.unbind, data), strict=True)
    return pairs


class TransposeStage:
    """Packed transposes of a list of (rowwise_data, columnwise_data) pairs in one launch, on the current
    stream.

    captured: by address, the storage that CUDA graphs use which run() was captured in; kept alive with the
    stage, as are the tables that they read.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]):
        self.device = pairs[0][0].device if pairs else torch.device("cpu")
        self.captured: dict[int, torch.Tensor] = {}
        self._table = DescriptorTable(self.device)
        self._addresses: list[tuple[int, int]] | None = None
        self.bind(pairs)

    def bind(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take the addresses of the same pairs anew; as CastStages.bind. Those that it has cost no plan."""
        names = "rowwise_data", "columnwise_data"
        addresses = [tuple(map(address_of, names, pair)) for pair in pairs]
        if addresses == self._addresses:
            self._pairs = pairs
            return
        items = [
            _C.TransposeDescriptor(*places, data.shape[0], 2 * data.shape[1])
            for places, (data, _) in zip(addresses, pairs, strict=True)
            if data.numel()
        ]
        plan = _C.TransposePlan(self.device.type == "cpu", items) if items else None
        self._table.load(plan, len(items) > 1)
        self._plan, self._pairs, self._addresses = plan, pairs, addresses

    def run(self) -> None:
        if self._plan is None:
            return
        if is_capturing(self.device):
            self._table.hold()
            self.captured.update((t.data_ptr(), t.detach()) for pair in self._pairs for t in pair)
        self._plan.run(self._table.target())


def _scales_of(record: NVFP4Storage) -> list[torch.Tensor]:
    """All buffers of scales."""
    return [scale for _, side in record.sides() for scale in side.scales.values()]


class GatheredScaleStage:
    """All other scales of weights whose scales travel, from their compact rowwise ones, which a gather has
    completed: the padded ones of blocks of 1x16, and both sides' of tiles, a launch for each kind, on the
    current stream.

    captured: as of TransposeStage.
    """

    def __init__(self, records: Sequence[NVFP4Storage], device: torch.device):
        self.device = device
        self.captured: dict[int, torch.Tensor] = {}
        self._tables = DescriptorTable(device), DescriptorTable(device)
        self.bind(records)

    def bind(self, records: Sequence[NVFP4Storage]) -> None:
        """Take the addresses of the same records anew; as CastStages.bind."""
        travelling = [record for record in records if record.scales_travel and len(_scales_of(record)) > 1]
        matrices = [matrix for record in travelling for matrix in record.matrices()]
        rows, tiles = ([m for m in matrices if m.block[0] == block_rows] for block_rows in (1, BLOCK))
        padded = [
            (matrix.rowwise.scales["compact"], scale, (*matrix.matrix, 1), layout)
            for matrix in rows
            for layout, scale in matrix.rowwise.scales.items()
            if layout != "compact"
        ]
        found = padded_scale_list(padded, self.device)
        padding, count = (None, 0) if found is None else found
        spreading = self._spreading(tiles) if tiles else None
        self._tables[0].load(padding, count > _C.ARGUMENT_ITEMS)
        self._tables[1].load(spreading, len(tiles) > 1)
        self._padding, self._spreading_plan = padding, spreading
        self._scales = [scale for record in travelling for scale in _scales_of(record)]

    def _spreading(self, tiles: Sequence[NVFP4Storage]) -> _C.CastPlan:
        nothing = Shard(0, 0)
        items = [CastItem(m, MasterPiece(None, nothing, m.matrix, m.dtype, 0, 0), None) for m in tiles]
        nowhere = {"reduced": 0, "reduced_numel": 0, "hash": 0.0, "found_inf": 0, "status": 0}
        return _C.CastPlan(
            on_cpu=self.device.type == "cpu", weights=list(map(_weight_descriptor, items)), **nowhere
        )

    def run(self) -> None:
        if self._scales and is_capturing(self.device):
            for table in self._tables:
                table.hold()
            self.captured.update((scale.data_ptr(), scale.detach()) for scale in self._scales)
        if self._padding is not None:
            self._padding.run(self._tables[0].target())
        if self._spreading_plan is not None:
            self._spreading_plan.spread_scales(self._tables[1].target())


class PostStage:
    """What completes weights whose codes, and scales that travel, have been gathered: columnwise codes, and
    the other scales.
    """

    def __init__(self, records: Sequence[NVFP4Storage]):
        self._transposes = TransposeStage(transpose_pairs(records))
        self._scales = GatheredScaleStage(records, records[0].device if records else torch.device("cpu"))

    def bind(self, records: Sequence[NVFP4Storage]) -> None:
        """Take the addresses of the same records anew; as CastStages.bind."""
        self._transposes.bind(transpose_pairs(records))
        self._scales.bind(records)

    def run(self) -> None:
        self._transposes.run()
        self._scales.run()

    @property
    def was_captured(self) -> bool:
        """Whether a CUDA graph that was captured uses the weights."""
        return bool(self._transposes.captured or self._scales.captured)


# Optimizer steps


class AdamWItem(NamedTuple):
    """One tensor of an update: contiguous, on the device of the others.

    The state is None where there is none yet: then only the amaxes are taken.
    """

    master: torch.Tensor
    """float32; in compact state also bfloat16, with `low`. Without pieces its last dimension is a row of
    compact state.
    """
    step: torch.Tensor | None
    """float32 [] or [1]: how many updates there were."""
    exp_avg: torch.Tensor | None
    """float32; int8 codes in compact state."""
    exp_avg_sq: torch.Tensor | None
    """float32; uint8 codes in compact state."""
    gradient_dtype: torch.dtype
    pieces: tuple[MasterPiece, ...] = ()
    """What it is of a weight, where its amaxes are wanted; of several matrices, one behind the other. In
    compact state each begins with a group of its matrix, and ends with one.
    """
    present: torch.Tensor | None = None
    """float64 of one element on the device: where it is 0, the item counts as one without gradient."""
    # Of compact state:
    compact: bool = False
    scales: torch.Tensor | None = None
    """float32 [groups, 2]: the owned groups of rows of STATE_GROUP elements, row by row."""
    low: torch.Tensor | None = None
    """uint8, as many as masters: their lowest bytes. None for float32 masters, and for zeros that only amaxes
    are taken of.
    """
    number: int = 0
    """Of the parameter in its optimizer, below 2**32: it chooses the random bytes that round its masters."""
    first_row: int = 0
    """The number of the first row among those of the parameter, where other ranks have rows before it."""


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
        arrays = {"step": steps}
        for name in ("master", "low", "exp_avg", "exp_avg_sq", "scales"):
            array = getattr(item, name)
            if array is not None:
                sizes = numels if name != "scales" else [2 * _group_range(p)[1] for p in item.pieces]
                arrays[name] = array.view(-1).split(sizes)
        self.parts = [
            item._replace(pieces=(piece,), **{name: parts[k] for name, parts in arrays.items()})
            for k, piece in enumerate(item.pieces)
        ]
        # The rows of a stack are those of its matrices, one after another.
        rows = item.pieces[0].matrix[0]
        self.parts = [p._replace(first_row=item.first_row + rows * k) for k, p in enumerate(self.parts)]

    def take_step(self) -> None:
        """Make the copies what the counter is now, on its device."""
        if self._copies is not None:
            self._copies.copy_(self._step.view(1).expand_as(self._copies))


def _descriptor(item: AdamWItem) -> _C.AdamWDescriptor:
    if item.pieces:
        piece = item.pieces[0]
    else:
        numel, cols = item.master.numel(), item.master.shape[-1] if item.compact else ROW
        piece = MasterPiece(None, Shard(0, numel), (ceil_div(numel, cols), cols), torch.float32, -1, -1)
    master, exp_avg, exp_avg_sq = (
        address_of(name, getattr(item, name)) for name in ("master", "exp_avg", "exp_avg_sq")
    )
    state = {}
    if item.compact:
        is_float = item.master.dtype == torch.float32
        state["compact"] = _C.CompactState(
            high=0 if is_float else master,
            low=address_of("low", item.low),
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            scales=address_of("scales", item.scales),
            first_group=_group_range(piece)[0],
            first_block=item.first_row * ceil_div(piece.matrix[1], RANDOM_COLUMNS),
            number=item.number,
        )
        master, exp_avg, exp_avg_sq = master if is_float else 0, 0, 0
    return _C.AdamWDescriptor(
        master=master,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        step=address_of("step", item.step),
        present=address_of("present", item.present),
        gradient_dtype=DTYPE_CODES[item.gradient_dtype],
        start=piece.shard.start,
        numel=piece.shard.numel,
        rows=piece.matrix[0],
        cols=piece.matrix[1],
        weight_dtype=DTYPE_CODES[piece.dtype],
        tile_offset=piece.tile_offset,
        amax_offset=piece.amax_offset,
        own_offset=piece.own_offset,
        **state,
    )


def _group_range(piece: MasterPiece) -> tuple[int, int]:
    """The first group of a piece, row by row of its matrix, and how many it has.

    Raises ValueError for a piece that has part of a group.
    """
    cols = piece.matrix[1]
    counts = []
    for position in (piece.shard.start, piece.shard.end):
        row, col = divmod(position, max(cols, 1))
        if col % STATE_GROUP:
            raise ValueError(
                f"compact state of elements {piece.shard.start} to {piece.shard.end} of a matrix "
                f"{list(piece.matrix)}: a piece begins and ends with a group of {STATE_GROUP} elements of a "
                "row"
            )
        counts.append(row * ceil_div(cols, STATE_GROUP) + col // STATE_GROUP)
    return counts[0], counts[1] - counts[0]


class AdamWStage:
    """AdamW for a list of tensors: begin() per parameter group, then one update().

    items: all in compact state, or none.
    reduced: the vector that the amaxes of items with a piece go to, cleared since the last update: words of
    tiles with owned elements are written, words of amax groups and of weights whose scales travel raised.

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
            compact=items[0].compact,
            tensors=[_descriptor(part) for part in parts],
            reduced=address_of("reduced", reduced),
        )
        self._use, self._tables = StreamUse(self.device), ()
        if self.device.type == "cuda":
            contents = torch.frombuffer(bytearray(self._plan.descriptor_bytes()), dtype=torch.uint8)
            # torch does not reuse pinned memory before the copies from it are done.
            table = contents.pin_memory().to(self.device, non_blocking=True)
            steps = torch.empty(self._plan.step_bytes(), dtype=torch.uint8, device=self.device)
            self._plan.set_device_tables(table.data_ptr(), steps.data_ptr())
            self._tables = table, steps
            self._use.filled.note()

    def begin(self, options: _C.AdamWOptions, first: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Count the step of items [first, first + len(gradients)), which share their options.

        gradients: contiguous, of the item's gradient_dtype and length; None leaves the item as it is.
        """
        addresses = tensor_facts(list(gradients)).addresses
        if self._splits is not None:
            splits = self._splits[first : first + len(gradients)]
            for split in splits:
                split.take_step()
            addresses = packed(
                -1 if gradient is None else start + begin * gradient.itemsize
                for split, gradient, start in zip(splits, gradients, numbers(addresses), strict=True)
                for begin in split.begins
            )
        self._plan.begin(self._use.target(self._tables), options, self._firsts[first], addresses)

    def update(self, brought: RankGradients | None = None) -> None:
        """brought: those of the other ranks; then what begin() was given are this rank's own, of the same
        dtype.
        """
        pieces = _C.GradientPieces() if brought is None else brought.pieces()
        self._plan.update(self._use.target(self._tables), pieces)


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
