"""Padded scale layouts."""

import torch

from zerofp4.format import ATOM_COLUMNS, ATOM_ROWS, BLOCK


def pad_scale(compact: torch.Tensor) -> torch.Tensor:
    """uint8 scales, a row for each row of the matrix, filled up with zeros to whole atoms."""
    rows, columns = compact.shape
    return torch.nn.functional.pad(compact, (0, -columns % ATOM_COLUMNS, 0, -rows % ATOM_ROWS))


def expand_scale(scale: torch.Tensor, rows: int, cols: int, block_rows: int) -> torch.Tensor:
    """Compact scales to [round_up(rows, 128), round_up(ceil(cols/16), 4)], a byte per row; padding is 0."""
    return pad_scale(scale.view(torch.uint8).repeat_interleave(block_rows, 0)[:rows]).view(scale.dtype)


def swizzle_scale(expanded: torch.Tensor) -> torch.Tensor:
    """Expanded scales to the order in which cuBLASLt and torch's scaled_mm read them; the same shape.

    Atoms of 128x4 follow one another row by row. In an atom row i, column j is byte i % 32 * 16 + i // 32 * 4
    + j: so cuBLASLt documents it for block-scaled GEMMs.
    """
    rows, columns = expanded.shape
    atoms = expanded.view(torch.uint8).view(rows // ATOM_ROWS, 4, 32, columns // ATOM_COLUMNS, ATOM_COLUMNS)
    return atoms.permute(0, 3, 2, 1, 4).reshape(expanded.shape).view(expanded.dtype)


def unswizzle_scale(swizzled: torch.Tensor) -> torch.Tensor:
    """The inverse of swizzle_scale."""
    rows, columns = swizzled.shape
    atoms = swizzled.view(torch.uint8).view(rows // ATOM_ROWS, columns // ATOM_COLUMNS, 32, 4, ATOM_COLUMNS)
    return atoms.permute(0, 3, 2, 1, 4).reshape(swizzled.shape).view(swizzled.dtype)


def compact_scale(expanded: torch.Tensor, rows: int, cols: int, block_rows: int) -> torch.Tensor:
    """The inverse of expand_scale."""
    compact = expanded.view(torch.uint8)[:rows:block_rows, : -(-cols // BLOCK)]
    return compact.contiguous().view(expanded.dtype)
