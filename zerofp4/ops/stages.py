"""Stages of plans, one launch for all weights. No operators: a schema cannot declare writes by tables."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

import zerofp4._C as _C
from zerofp4.format import BLOCK
from zerofp4.ops.device import DTYPE_CODES, NativePlan, scale_addresses
from zerofp4.ops.quantize import choice_arguments
from zerofp4.ops.scales import padded_scale_list, transpose_descriptor
from zerofp4.shard import Shard
from zerofp4.storage import NVFP4Storage, address_of

HEADER_WORDS: int = _C.HEADER_WORDS
ERROR_WORD: int = _C.ERROR_WORD
HASH_WORD: int = _C.HASH_WORD
PEER_ERROR: int = _C.PEER_ERROR
PLAN_MISMATCH: int = _C.PLAN_MISMATCH


# Casts


class MasterPiece(NamedTuple):
    """This rank's part of a weight, and the position of its amaxes in a plan's reduced vector.

    matrix, dtype: the weight's [rows, cols] and dtype.
    tile_offset: the word of the amax of tile (0, 0); others follow, row-major. A tile is in one piece.
    amax_offset: the word of the amax of its group, raised to the maximum.

    An amax is the largest magnitude of the owned elements rounded to `dtype`, +inf for a NaN or Inf.
    """

    master: torch.Tensor | None
    """None if the rank owns nothing, and between calls of a function that keeps no masters."""
    shard: Shard
    matrix: tuple[int, int]
    dtype: torch.dtype
    tile_offset: int
    amax_offset: int
    own_offset: int = -1
    cut_offsets: tuple[int, int] = (-1, -1)
    """Of a weight whose scales travel, without words for tiles (tile_offset -1): the words of its own amax,
    raised like the group's, and of the 1x16 blocks in which the shard begins and ends, -1 for a whole block.
    """

    def fields(self) -> dict[str, int]:
        rows, cols = self.matrix
        place = {"start": self.shard.start, "numel": self.shard.numel, "rows": rows, "cols": cols}
        offsets = {name: getattr(self, name) for name in ("tile_offset", "amax_offset", "own_offset")}
        return {**place, **offsets, "weight_dtype": DTYPE_CODES[self.dtype]}


class CastItem(NamedTuple):
    record: NVFP4Storage
    piece: MasterPiece
    codes: torch.Tensor | None
    """uint8 bytes shard.byte_range of the packed weight; None if the rank owns nothing."""


def _weight_descriptor(item: CastItem) -> _C.WeightDescriptor:
    record, piece = item.record, item.piece
    own_amax = None if record.columnwise_amax is record.amax else record.columnwise_amax
    master_dtype = torch.float32 if piece.master is None else piece.master.dtype
    e4m3_max, error = choice_arguments(record.four_over_six)
    return _C.WeightDescriptor(
        **piece.fields(),
        master=address_of("master", piece.master),
        master_dtype=DTYPE_CODES[master_dtype],
        codes=address_of("codes", item.codes),
        amax=address_of("amax", record.amax),
        columnwise_amax=address_of("columnwise_amax", own_amax),
        rowwise_scale=scale_addresses("rowwise_scale", record.rowwise),
        columnwise_scale=scale_addresses("columnwise_scale", record.columnwise),
        block_rows=record.block[0],
        e4m3_max=e4m3_max,
        squared_error=error == "mse",
        cut_offsets=piece.cut_offsets,
    )


def load_cast(
    plan: NativePlan,
    items: Sequence[CastItem],
    reduced: torch.Tensor,
    *,
    hash: int = 0,
    found_inf: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
) -> None:
    """Load the stages of a cast, each a single launch:

    - begin(error) clears the vector and writes its header; the flag `error` keeps every rank from writing
    - begin_amax() also takes the amaxes of the owned elements; a MAX all-reduce follows
    - scale_cast() makes all amaxes and scales from the reduced vector, and the codes of owned elements
    - scale(), cast_before(weight, row), cast_from(weight, row): scale_cast() with a break in it

    reduced: float32, HEADER_WORDS words, then those that the items' offsets point to.
    hash: below 2**24. found_inf: float32 [1].
    status: int32 [1] on the CPU (pinned for a GPU): PEER_ERROR or PLAN_MISMATCH.

    Holds addresses: the caller keeps the items' tensors alive. Raises as plan.load().
    """
    native = _C.CastPlan(
        on_cpu=plan.device.type == "cpu",
        weights=list(map(_weight_descriptor, items)),
        reduced=address_of("reduced", reduced),
        reduced_numel=reduced.numel(),
        hash=float(hash),
        found_inf=address_of("found_inf", found_inf),
        status=address_of("status", status),
    )
    memory = (reduced,) if found_inf is None else (reduced, found_inf)
    plan.load(native, len(items) > 1, memory=memory)


class PostStage:
    """Completes gathered weights: columnwise codes, padded 1x16 scales, scales of tiles that travel."""

    def __init__(self, device: torch.device):
        self._transposes, self._padding, self._spreading = (NativePlan(device) for _ in range(3))

    def bind(self, records: Sequence[NVFP4Storage]) -> None:
        """Use the addresses of these records from now on. Raises as NativePlan.load()."""
        on_cpu = self._transposes.device.type == "cpu"
        matrices = [matrix for record in records for matrix in record.matrices()]
        pairs = [(m.rowwise.data, m.columnwise.data) for m in matrices if m.rowwise and m.columnwise]
        pairs = [pair for pair in pairs if pair[0] is not None and pair[1] is not None]
        items = [transpose_descriptor(*pair) for pair in pairs if pair[0].numel()]
        native = _C.TransposePlan(on_cpu, items) if items else None
        self._transposes.load(native, len(items) > 1, items=list(itertools.chain(*pairs)))

        travelling = [matrix for matrix in matrices if matrix.scales_travel and len(_scales_of(matrix)) > 1]
        scales = [scale for matrix in travelling for scale in _scales_of(matrix)]
        padded = [
            (matrix.rowwise.scales["compact"], scale, (*matrix.matrix, 1), layout)
            for matrix in travelling
            if matrix.block[0] == 1
            for layout, scale in matrix.rowwise.scales.items()
            if layout != "compact"
        ]
        native, count = padded_scale_list(padded, self._padding.device) or (None, 0)
        self._padding.load(native, count > _C.ARGUMENT_ITEMS, items=scales)

        nothing = Shard(0, 0)
        tiles = [
            CastItem(m, MasterPiece(None, nothing, m.matrix, m.dtype, 0, 0), None)
            for m in travelling
            if m.block[0] == BLOCK
        ]
        nowhere = {"reduced": 0, "reduced_numel": 0, "hash": 0.0, "found_inf": 0, "status": 0}
        weights = list(map(_weight_descriptor, tiles))
        native = _C.CastPlan(on_cpu=on_cpu, weights=weights, **nowhere) if tiles else None
        self._spreading.load(native, len(tiles) > 1, items=scales)

    def run(self) -> None:
        self._transposes.run("run")
        self._padding.run("run")
        self._spreading.run("spread_scales")


def _scales_of(record: NVFP4Storage) -> list[torch.Tensor]:
    return [scale for _, side in record.sides() for scale in side.scales.values()]


# Gathers

GATHER_PRESENT: int = _C.GATHER_PRESENT
GATHER_FAILED: int = _C.GATHER_FAILED
GATHER_OTHER: int = _C.GATHER_OTHER
"""States of a rank in a gather: it takes part, it found an error, or it wants another gather."""

GATHER_REFUSED: int = _C.GATHER_REFUSED
GATHER_WITHOUT_STEP: int = _C.GATHER_WITHOUT_STEP
STATUS_RANK_SHIFT: int = _C.STATUS_RANK_SHIFT
"""Status bits of a gather: a rank had an error, or skipped its step; above them the lowest such rank."""

GATHER_VECTOR: int = _C.GATHER_VECTOR
"""Bytes. A run is copied fastest if its input and output have the same remainder modulo this."""


class GatherRun(NamedTuple):
    """Bytes of one rank and one weight, by addresses."""

    input: int
    output: int
    low: int
    """The byte with the low code of the first byte, if the previous rank owns that code; else 0."""
    bytes: int


class GatherHeader(NamedTuple):
    """The step that a gather belongs to; if it did not take place, no rank takes anything. reduced, hash,
    status: as of load_cast(); status gets the reason.
    """

    reduced: torch.Tensor
    hash: int
    status: torch.Tensor


def load_gather(
    plan: NativePlan,
    staging: torch.Tensor,
    rank: int,
    header: GatherHeader | None,
    own: Sequence[GatherRun],
    received: Sequence[GatherRun],
    buffers: Sequence[torch.Tensor],
) -> None:
    """Load the stages around an all-gather of the staging buffer, each a single launch.

    - pack(state) copies the runs `own` from weights to this rank's slot, in state GATHER_PRESENT only, and
      the state
    - unpack() copies `received` from slots to weights, if all ranks take part and their step took place

    staging: uint8 [ranks, bytes of a slot, a multiple of GATHER_VECTOR]; a slot begins with the int32 state.
    buffers: of the weights, in which the runs lie; the caller keeps them alive. Raises as plan.load().
    """
    own_words, received_words = ([word for run in runs for word in run] for runs in (own, received))
    native = _C.GatherPlan(
        on_cpu=plan.device.type == "cpu",
        own=own_words,
        received=received_words,
        staging=address_of("staging", staging),
        slot=staging.shape[1],
        rank=rank,
        ranks=staging.shape[0],
        reduced=0 if header is None else address_of("reduced", header.reduced),
        hash=0.0 if header is None else float(header.hash),
        status=0 if header is None else address_of("status", header.status),
    )
    plan.load(native, bool(own or received), memory=(staging,), items=buffers)
