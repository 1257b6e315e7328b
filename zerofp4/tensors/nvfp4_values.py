"""What NVFP4Tensor does with its record: values, new values, bytes of another record."""

import torch

from zerofp4 import ops
from zerofp4.format import BLOCK, SCALE_DTYPE, WEIGHT_DTYPES
from zerofp4.storage import SIDES, NVFP4Storage, Side


def values_source(record: NVFP4Storage) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, bool]:
    """(data, compact scale, amax, block_rows, e4m3_max, columnwise) of the copy that gives the values.

    Raises ValueError where there is none: a columnwise copy with hadamard holds those of the transform.
    """
    copy = record.rowwise or record.columnwise
    columnwise = record.rowwise is None
    if columnwise and record.hadamard:
        raise ValueError(
            "this tensor has only a columnwise copy, of its Hadamard transform, which does not give its "
            "values: quantize with rowwise=True"
        )
    return copy.data, copy.scales["compact"], copy.amax, record.block[0], record.e4m3_max, columnwise


def dequantize(record: NVFP4Storage, dtype: torch.dtype) -> torch.Tensor:
    """Values in the record's shape: computed in float32, rounded once to dtype. Errors as values_source."""
    if dtype not in WEIGHT_DTYPES:
        return dequantize(record, torch.float32).to(dtype)
    source = values_source(record)
    try:
        values = ops.values_of(*source, dtype)
    except RuntimeError:
        record.check_memory("the tensor")  # by name, if that is it
        raise
    return values if values.dim() == len(record.shape) else values.view(record.shape)


def requantize(record: NVFP4Storage, values: torch.Tensor) -> None:
    """Quantize values, which broadcast to the record's shape, into the buffers that the record has.

    Like a master weight they are first rounded to the record's dtype.
    """
    values = values.to(device=record.device, dtype=record.dtype)
    ops.quantize_into(values.expand(record.shape).contiguous(), record)


def derived_side(record: NVFP4Storage, side: str) -> Side:
    """A side, with compact scales; transposed from the other side where the record has only that one."""
    copy: Side | None = getattr(record, side)
    if copy is not None:
        return copy
    if record.block[0] != BLOCK:
        raise ValueError(
            f"the source has no {side} copy, and block {record.block} does not let it follow from the other: "
            f"quantize the original values with {side}=True"
        )
    other: Side = getattr(record, SIDES[1 - SIDES.index(side)])
    scale = other.scales["compact"].view(torch.uint8).mT.contiguous().view(SCALE_DTYPE)
    return Side(torch.ops.zerofp4.transpose_packed(other.data), {"compact": scale}, other.amax)


def copy_bytes(target: NVFP4Storage, source: NVFP4Storage, non_blocking: bool = False) -> None:
    """Fill every buffer of target from a source of the same scheme; no value is quantized again.

    What the source does not have is derived from what it has. Raises ValueError, before anything is written,
    where that is impossible: one side of a (1, 16) quantization does not determine the other.
    """
    found = [(name, side, derived_side(source, name)) for name, side in target.sides()]
    for name, side, given in found:
        if side is found[0][1] or side.amax is not target.amax:  # two sides may share one
            side.amax.copy_(given.amax, non_blocking)
        side.data.copy_(given.data, non_blocking)
        compact = side.scales["compact"]
        compact.copy_(given.scales["compact"], non_blocking)
        for layout, buffer in side.scales.items():
            if layout != "compact":
                matrix = target.side_matrix(name)
                buffer.copy_(torch.ops.zerofp4.pad_scale(compact, *matrix, target.block[0], layout))
