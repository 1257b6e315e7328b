"""Functions of lists of tensors, with one launch per list."""

from collections.abc import Sequence

import torch

from zerofp4 import ops
from zerofp4.format import BLOCK, WEIGHT_DTYPES
from zerofp4.layout import scale_shape
from zerofp4.storage import Side, check_block, side_of
from zerofp4.tensors.mxfp8 import MXFP8Tensor
from zerofp4.tensors.nvfp4 import NVFP4Tensor

ScaleOf = tuple[torch.Tensor, tuple[int, int]]
"""E4M3 scales (or their uint8 bytes), and the shape (rows, cols) of the matrix that they belong to."""


def dequantize_many(
    tensors: Sequence[NVFP4Tensor | MXFP8Tensor], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """The values of NVFP4Tensors and MXFP8Tensors as plain tensors of their shapes, without autograd history.

    tensors: all on one device. Tensors of one format and one output dtype take one launch, and one for every
        32 while a CUDA graph is captured.
    dtype: float32, bfloat16 or float16; by default each tensor's own.

    Examples:
        >>> values, others = zerofp4.dequantize_many([zerofp4.quantize(x), zerofp4.quantize_mxfp8(x)])

    Raises TypeError for another type or dtype; ValueError for several devices, and for an NVFP4Tensor whose
    only copy is columnwise with hadamard; RuntimeError if a buffer was freed.
    """
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, NVFP4Tensor | MXFP8Tensor):
            raise TypeError(
                f"tensors[{i}] must be an NVFP4Tensor or an MXFP8Tensor, got {type(tensor).__name__}"
            )
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"tensors[{i}] must be on {tensors[0].device}, as the first is, got {tensor.device}"
            )
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise TypeError(f"dtype must be one of {WEIGHT_DTYPES}, got {dtype}")
    wanted = [(isinstance(tensor, MXFP8Tensor), dtype or tensor.dtype) for tensor in tensors]
    values: dict[int, torch.Tensor] = {}
    for is_mxfp8, each in dict.fromkeys(wanted):
        members = [i for i, own in enumerate(wanted) if own == (is_mxfp8, each)]
        sources = [tensors[i].record.values_source() for i in members]
        try:
            made = (ops.mxfp8_values_of_many if is_mxfp8 else ops.values_of_many)(sources, each)
        except RuntimeError:
            for i in members:
                tensors[i].record.check_memory(f"tensors[{i}]")  # by name, if that is it
            raise
        values |= {i: matrix.view(tensors[i].shape) for i, matrix in zip(members, made, strict=True)}
    return [values[i] for i in range(len(tensors))]


def swizzle_scales(
    scales: Sequence[NVFP4Tensor | ScaleOf], *, columnwise: bool = False
) -> list[torch.Tensor]:
    """Compact scales in the order in which cuBLASLt and torch.nn.functional.scaled_mm read them.

    scales: NVFP4Tensors; or pairs (compact scale, (rows, cols)), with scales of shape (rows, ceil(cols/16))
        for 1x16 blocks and (ceil(rows/16), ceil(cols/16)) for 16x16 blocks. All on one device. They take one
        launch, and one for every 32 while a CUDA graph is captured.
    columnwise: which copy of the NVFP4Tensors.

    Examples:
        >>> (scales,) = zerofp4.swizzle_scales([zerofp4.quantize(x)])

    Returns scales of shape (round_up(rows, 128), round_up(ceil(cols/16), 4)), padded with zeros, for [E, N,
    K] with a leading E. A tensor's persistent ones are returned; others of one shape share a storage.

    Raises TypeError or ValueError for other items, and tensors without the copy, RuntimeError for freed ones.
    """
    return _change(scales, side_of(columnwise), None, compact=True)


def unswizzle_scales(
    scales: Sequence[NVFP4Tensor | ScaleOf],
    *,
    block: tuple[int, int] = (BLOCK, BLOCK),
    columnwise: bool = False,
) -> list[torch.Tensor]:
    """The inverse of swizzle_scales: compact scales. The padding may hold anything.

    scales: NVFP4Tensors with persistent swizzled scales, or pairs (swizzled scale, (rows, cols)).
    block: of the pairs.
    columnwise: which copy of the NVFP4Tensors.

    Examples:
        >>> t = zerofp4.quantize(x, scale_layouts=("compact", "swizzled"))
        >>> (compact,) = zerofp4.unswizzle_scales([t])

    Raises TypeError or ValueError for another item, or a tensor without such scales.
    """
    check_block(block)
    return _change(scales, side_of(columnwise), block[0], compact=False)


def _change(scales, side: str, block_rows: int | None, *, compact: bool) -> list[torch.Tensor]:
    """block_rows: of pairs; None if their shape tells it."""
    done: dict[int, torch.Tensor] = {}
    arguments: dict[int, tuple] = {}
    """(scale, rows, cols, block_rows) by index."""
    for i, item in enumerate(scales):
        if not isinstance(item, NVFP4Tensor):
            arguments[i] = _pair(f"scales[{i}]", item, block_rows)
            continue
        record = item.record
        copy: Side | None = getattr(record, side)
        swizzled = None if copy is None else copy.scales.get("swizzled")
        if (copy if compact else swizzled) is None:
            missing = f"{side} copy" if compact else f"persistent swizzled {side} scales"
            raise ValueError(f"scales[{i}] is an NVFP4Tensor that has no {missing}")
        if compact and swizzled is not None:
            done[i] = swizzled
        else:
            scale = copy.scales["compact"] if compact else swizzled
            arguments[i] = (scale, *record.side_matrix(side), record.block[0])
    if arguments:
        columns = map(list, zip(*arguments.values(), strict=True))
        done |= zip(arguments, ops.change_scales(*columns, "swizzled", compact), strict=True)
    return [done[i] for i in range(len(scales))]


def _pair(name: str, item, block_rows: int | None) -> tuple[torch.Tensor, int, int, int]:
    """(scale, rows, cols, block_rows)"""
    try:
        scale, (rows, cols) = item
        shape = tuple(scale.shape)
    except (TypeError, ValueError, AttributeError):
        raise TypeError(
            f"{name} must be an NVFP4Tensor or a pair (scale, (rows, cols)), got {type(item).__name__}"
        ) from None
    if block_rows is None:
        shapes = {rows_of_block: scale_shape(rows, cols, rows_of_block) for rows_of_block in (1, BLOCK)}
        fitting = [rows_of_block for rows_of_block, wanted in shapes.items() if wanted == shape]
        if not fitting:
            raise ValueError(
                f"{name} must have shape {shapes[1]} or {shapes[BLOCK]} for a matrix of ({rows}, {cols}), "
                f"got {shape}"
            )
        block_rows = fitting[0]
    return scale, rows, cols, block_rows
