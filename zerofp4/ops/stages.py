"""Stages of a plan: many weights, one launch each, on addresses that were taken beforehand.

They are not torch operators: a schema cannot declare writes through a table of addresses.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

import zerofp4._C as _C
from zerofp4.ops.device import DTYPE_CODES, is_capturing, scale_addresses, target_of
from zerofp4.ops.streams import StreamUse
from zerofp4.ops.table import DescriptorTable
from zerofp4.shard import Shard
from zerofp4.storage import NVFP4Storage, address_of

HEADER_WORDS: int = _C.HEADER_WORDS
ERROR_WORD: int = _C.ERROR_WORD
HASH_WORD: int = _C.HASH_WORD
PEER_ERROR: int = _C.PEER_ERROR
PLAN_MISMATCH: int = _C.PLAN_MISMATCH


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
        self._table, self._streams = DescriptorTable(self.device), StreamUse(self.device)
        self.bind(items, found_inf)

    def bind(self, items: Sequence[CastItem], found_inf: torch.Tensor | None) -> None:
        """Take the addresses of the same items and of found_inf anew; the stages already queued keep the old
        ones.

        Nothing has changed when it raises (RuntimeError, while a CUDA graph is captured).
        """
        weights = [_weight_descriptor(item) for item in items]
        plan = _C.CastPlan(weights=weights, found_inf=address_of("found_inf", found_inf), **self._options)
        self._table.load(plan, len(weights) > 1)
        self._streams.forget()
        self._plan, self._found_inf = plan, found_inf

    def hold(self) -> None:
        """The stages are being captured in a CUDA graph: the table that it reads is never loaded again."""
        self._table.hold()

    def target(self) -> _C.Target:
        """Where the stages run now: on the current stream."""
        flags = () if self._found_inf is None else (self._found_inf,)
        if self._streams.note((self._reduced, *flags, *self._table.memory[-1:])):
            self._table.wait()
        return target_of(self.device)

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
        """Every scale buffer and amax of every weight, from the reduced vector."""
        self._plan.scale(self.target())

    def cast(self) -> None:
        """Codes of the owned elements."""
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
        self._table, self._streams = DescriptorTable(self.device), StreamUse(self.device)
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
        self._streams.forget()
        self._plan, self._pairs, self._addresses = plan, pairs, addresses

    def run(self) -> None:
        if self._plan is None:
            return
        if is_capturing(self.device):
            self._table.hold()
            self.captured.update((t.data_ptr(), t.detach()) for pair in self._pairs for t in pair)
        if self._streams.note(self._table.memory[-1:]):
            self._table.wait()
        self._plan.run(target_of(self.device))
