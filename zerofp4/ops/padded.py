"""The padded scales of a record, whatever its format."""

import torch

from zerofp4.format import BLOCK, MXFP8_SCALE_DTYPE
from zerofp4.storage import MXFP8Storage, NVFP4Storage, Side, check_memory


def padded_scale(record: NVFP4Storage | MXFP8Storage, side: str, layout: str) -> torch.Tensor:
    """The "expanded" (NVFP4 only) or "swizzled" scales of a side, as layout.scale_shape and
    layout.mxfp8_scale_shape say, of each of a stack: the persistent buffer if there is one, else made from
    the compact scales.

    Raises ValueError where the record does not have that side, RuntimeError where its scales were freed.
    """
    copy: Side | None = getattr(record, side)
    if copy is None:
        raise ValueError(f"this tensor has no {side} copy, so it has no {side} scales")
    if layout in copy.scales:
        return copy.scales[layout]
    compact = copy.scales["compact"]
    check_memory(f"{side}_scale", compact)
    if isinstance(record, NVFP4Storage):
        return torch.ops.zerofp4.pad_scale(compact, *record.side_matrix(side), record.block[0], layout)
    raw = compact.view(torch.uint8)
    raw = raw.t().contiguous() if side == "columnwise" else raw
    # As scales of NVFP4 would be that has as many blocks in a row.
    rows, columns = raw.shape
    return torch.ops.zerofp4.pad_scale(raw, rows, columns * BLOCK, 1, layout).view(MXFP8_SCALE_DTYPE)
