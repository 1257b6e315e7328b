"""Shapes of the buffers of a quantized tensor. Pure arithmetic."""

import math
from collections.abc import Sequence

from zerofp4.format import ATOM_COLUMNS, ATOM_ROWS, BLOCK, MXFP8_BLOCK


def ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, cols): leading dimensions as one, and the last. Raises ValueError for fewer than two."""
    if len(shape) < 2:
        raise ValueError(f"blocks need a tensor of at least 2 dimensions, got shape {tuple(shape)}")
    *leading, cols = shape
    return math.prod(leading), cols


def stacked_matrices(shape: Sequence[int], block_rows: int, stacked: bool = False) -> int | None:
    """E of a stack [E, N, K], in blocks of 16x16 or `stacked`, whose matrices are quantized separately; None
    for a single matrix. Raises ValueError for other dimensions of a stack.
    """
    if block_rows > 1 and len(shape) > 3:
        raise ValueError(
            "blocks of 16x16 need a matrix [N, K] or a stack of them [E, N, K], got shape "
            f"{tuple(shape)}: view it as one of these, or use block (1, 16)"
        )
    if stacked and len(shape) != 3:
        raise ValueError(f"stacked=True needs a stack of matrices [E, N, K], got shape {tuple(shape)}")
    return shape[0] if len(shape) == 3 and (block_rows > 1 or stacked) else None


def check_matrix(rows: int, cols: int, *, columnwise: bool) -> None:
    """Two codes share a byte along a row, of the columnwise copy along a column: counts must be even."""
    if cols % 2:
        raise ValueError(
            f"NVFP4 packs two codes of a row into a byte: the last dimension must be even, got {cols}"
        )
    if columnwise and rows % 2:
        raise ValueError(
            f"columnwise data packs two codes of a column into a byte: rows must be even, got {rows}"
        )


def columnwise_rows(rows: int, hadamard: bool) -> int:
    """Elements of a row of the columnwise copy: with the transform the last group of 16 is completed."""
    return round_up(rows, BLOCK) if hadamard else rows


def scale_shape(rows: int, cols: int, block_rows: int, layout: str = "compact") -> tuple[int, int]:
    """Shape of the E4M3 scales of a [rows, cols] matrix. Padded layouts repeat a block's byte over its rows,
    so their shape does not depend on block_rows.
    """
    columns = ceil_div(cols, BLOCK)
    if layout == "compact":
        return ceil_div(rows, block_rows), columns
    return round_up(rows, ATOM_ROWS), round_up(columns, ATOM_COLUMNS)


def mxfp8_scale_shape(rows: int, cols: int, columnwise: bool, layout: str = "compact") -> tuple[int, int]:
    """Shape of the E8M0 scales of a [rows, cols] matrix, blocks of 32 lying along rows or, columnwise, along
    columns. Swizzled ones are padded, the columnwise ones as of the transpose.
    """
    if layout == "compact":
        return (ceil_div(rows, MXFP8_BLOCK), cols) if columnwise else (rows, ceil_div(cols, MXFP8_BLOCK))
    across, along = (cols, rows) if columnwise else (rows, cols)
    return round_up(across, ATOM_ROWS), round_up(ceil_div(along, MXFP8_BLOCK), ATOM_COLUMNS)
