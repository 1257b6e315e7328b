"""What NVFP4Tensor does with its record: values, new values, bytes of another record."""

import torch

from zerofp4 import ops
from zerofp4.format import BLOCK, SCALE_DTYPE, SCALE_LAYOUTS, WEIGHT_DTYPES
from zerofp4.storage import SIDES, NVFP4Storage, scale_name


def side_matrix(record: NVFP4Storage, side: str) -> tuple[int, int]:
    return record.matrix if side == "rowwise" else record.matrix[::-1]


def padded_scale(record: NVFP4Storage, side: str, layout: str) -> torch.Tensor:
    """The "expanded" or "swizzled" scales of a side: the persistent buffer, else made from the compact ones.

    Raises ValueError where the tensor does not have that side.
    """
    buffer = getattr(record, scale_name(side, layout))
    if buffer is not None:
        return buffer
    compact = getattr(record, scale_name(side, "compact"))
    if compact is None:
        raise ValueError(f"this tensor has no {side} copy, so it has no {side} scales")
    return torch.ops.zerofp4.pad_scale(compact, *side_matrix(record, side), record.block[0], layout)


def values_source(record: NVFP4Storage) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, bool]:
    """(data, compact scale, amax, block_rows, e4m3_max, columnwise) of the copy that gives the values.

    Raises ValueError where there is none: a columnwise copy with hadamard holds those of the transform.
    """
    options = record.block[0], record.e4m3_max
    if record.rowwise_data is not None:
        return record.rowwise_data, record.rowwise_scale, record.amax, *options, False
    if record.hadamard:
        raise ValueError(
            "this tensor has only a columnwise copy, of its Hadamard transform, which does not give its "
            "values: quantize with rowwise=True"
        )
    return record.columnwise_data, record.columnwise_scale, record.columnwise_amax, *options, True


def dequantize(record: NVFP4Storage, dtype: torch.dtype) -> torch.Tensor:
    """Values in the record's shape: computed in float32, rounded once to dtype. Errors as values_source."""
    data, scale, amax, block_rows, e4m3_max, columnwise = values_source(record)
    kernel_dtype = dtype if dtype in WEIGHT_DTYPES else torch.float32
    options = {"e4m3_max": e4m3_max, "columnwise": columnwise}
    matrix = torch.ops.zerofp4.dequantize(data, scale, amax, block_rows, kernel_dtype, **options)
    return matrix.view(record.shape).to(dtype)


def requantize(record: NVFP4Storage, values: torch.Tensor) -> None:
    """Quantize values, which broadcast to the record's shape, into the buffers that the record has.

    Like a master weight they are first rounded to the record's dtype.
    """
    values = values.to(device=record.device, dtype=record.dtype)
    ops.quantize_into(values.expand(record.shape).contiguous(), record)


def _side_of(record: NVFP4Storage, side: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(data, compact scale, amax) of a side, transposed from the other side where the record has only that
    one.
    """
    data, scale = getattr(record, f"{side}_data"), getattr(record, f"{side}_scale")
    if data is not None:
        return data, scale, record.amax if side == "rowwise" else record.columnwise_amax
    if record.block[0] != BLOCK:
        raise ValueError(
            f"the source has no {side} copy, and block {record.block} does not let it follow from the other: "
            f"quantize the original values with {side}=True"
        )
    data, scale, amax = _side_of(record, SIDES[1 - SIDES.index(side)])
    transposed_scale = scale.view(torch.uint8).t().contiguous().view(SCALE_DTYPE)
    return torch.ops.zerofp4.transpose_packed(data), transposed_scale, amax


def copy_bytes(target: NVFP4Storage, source: NVFP4Storage, non_blocking: bool = False) -> None:
    """Fill every buffer of target from a source of the same scheme; no value is quantized again.

    What the source does not have is derived from what it has. Raises ValueError, before anything is written,
    where that is impossible: one side of a (1, 16) quantization does not determine the other.
    """
    wanted = [side for side in SIDES if getattr(target, f"{side}_data") is not None]
    found = {side: _side_of(source, side) for side in wanted}
    *_, amax = found[wanted[0]]
    target.amax.copy_(amax, non_blocking)
    for side, (data, scale, amax) in found.items():
        if side == "columnwise" and target.columnwise_amax is not target.amax:
            target.columnwise_amax.copy_(amax, non_blocking)
        getattr(target, f"{side}_data").copy_(data, non_blocking)
        compact = getattr(target, f"{side}_scale")
        compact.copy_(scale, non_blocking)
        for layout in SCALE_LAYOUTS[1:]:
            buffer = getattr(target, scale_name(side, layout))
            if buffer is not None:
                matrix = side_matrix(target, side)
                buffer.copy_(torch.ops.zerofp4.pad_scale(compact, *matrix, target.block[0], layout))
