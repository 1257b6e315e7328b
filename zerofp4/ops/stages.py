"""Stages of a plan: many weights, one launch each, on addresses that were taken beforehand.

They are not torch operators: a schema cannot declare writes through a table of addresses.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zerofp4 import _C
from zerofp4.ops.device import DTYPE_CODES, address, target_of
from zerofp4.shard import Shard
from zerofp4.storage import NVFP4Storage

HEADER_WORDS: int = _C.HEADER_WORDS
ERROR_WORD: int = _C.ERROR_WORD
HASH_WORD: int = _C.HASH_WORD
PEER_ERROR: int = _C.PEER_ERROR
PLAN_MISMATCH: int = _C.PLAN_MISMATCH

SIDES = {
    side: (f"{side}_scale", f"{side}_scale_expanded", f"{side}_scale_swizzled")
    for side in ("rowwise", "columnwise")
}


class CastItem(NamedTuple):
    """One weight of a cast: its record, what this rank owns of it, and where its amaxes lie in the reduced
    vector.
    """

    record: NVFP4Storage
    master: torch.Tensor | None
    shard: Shard
    codes: torch.Tensor | None
    """uint8 bytes shard.byte_range of the packed weight; None where the rank owns nothing."""
    tile_offset: int
    amax_offset: int


def weight_descriptor(
    buffers: dict,
    master,
    shard: Shard,
    shape,
    dtypes,
    codes: int,
    tile_offset: int,
    amax_offset: int,
    given_amax=None,
) -> _C.WeightDescriptor:
    return _C.WeightDescriptor(
        master=address(master),
        start=shard.start,
        numel=shard.numel,
        rows=shape[0],
        cols=shape[1],
        master_dtype=DTYPE_CODES[dtypes[0]],
        weight_dtype=DTYPE_CODES[dtypes[1]],
        codes=codes,
        amax=address(buffers.get("amax")),
        columnwise_amax=address(buffers.get("columnwise_amax")),
        given_amax=address(given_amax),
        rowwise_scale=[address(buffers.get(name)) for name in SIDES["rowwise"]],
        columnwise_scale=[address(buffers.get(name)) for name in SIDES["columnwise"]],
        tile_offset=tile_offset,
        amax_offset=amax_offset,
    )


def _upload(plan, device: torch.device, count: int) -> torch.Tensor | None:
    """Copies a plan's descriptors to the GPU; the returned tensor must live as long as the plan."""
    if device.type == "cpu" or count < 2:
        return None
    table = torch.frombuffer(bytearray(plan.descriptor_bytes()), dtype=torch.uint8).to(device)
    plan.set_device_descriptors(table.data_ptr())
    return table


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
        skip_nonfinite: bool = True,
        found_inf: torch.Tensor | None = None,
        status: torch.Tensor | None = None,
    ):
        self.device = reduced.device
        weights = []
        for item in items:
            dtypes = (torch.float32 if item.master is None else item.master.dtype, item.record.dtype)
            buffers, matrix = dict(item.record.buffers()), item.record.matrix
            codes = address(item.codes)
            offsets = (item.tile_offset, item.amax_offset)
            weights.append(
                weight_descriptor(buffers, item.master, item.shard, matrix, dtypes, codes, *offsets)
            )
        self._plan = _C.CastPlan(
            on_cpu=self.device.type == "cpu",
            weights=weights,
            reduced=reduced.data_ptr(),
            reduced_numel=reduced.numel(),
            hash=float(hash),
            skip_nonfinite=skip_nonfinite,
            found_inf=address(found_inf),
            status=address(status),
        )
        self._table = _upload(self._plan, self.device, len(weights))

    def begin(self, error: bool = False) -> None:
        """Clear the vector and write its header; with `error`, a flag that keeps every rank from writing."""
        self._plan.begin(target_of(self.device), error)

    def amax(self) -> None:
        """Tile amaxes and group amaxes of the owned elements, by maximum with what the vector holds."""
        self._plan.amax(target_of(self.device))

    def scale(self) -> None:
        """Every scale buffer and amax of every weight, from the reduced vector."""
        self._plan.scale(target_of(self.device))

    def cast(self) -> None:
        """Codes of the owned elements."""
        self._plan.cast(target_of(self.device))


class TransposeStage:
    """Packed transposes of a list of (rowwise_data, columnwise_data) pairs in one launch, on the current
    stream.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]):
        pairs = [(data, out) for data, out in pairs if data.numel()]
        self.device = pairs[0][0].device if pairs else torch.device("cpu")
        items = [
            _C.TransposeDescriptor(address(data), address(out), data.shape[0], 2 * data.shape[1])
            for data, out in pairs
        ]
        self._plan = _C.TransposePlan(self.device.type == "cpu", items) if items else None
        self._table = _upload(self._plan, self.device, len(items)) if items else None

    def run(self) -> None:
        if self._plan is not None:
            self._plan.run(target_of(self.device))
