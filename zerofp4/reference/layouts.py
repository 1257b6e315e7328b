"""Padded scale layouts."""

import torch

from zerofp4.format import ATOM_COLUMNS, ATOM_ROWS, BLOCK
from zerofp4.layout import ceil_div, scale_shape, swizzled_offset


def expand_scale(scale: torch.Tensor, rows: int, cols: int, block_rows: int) -> torch.Tensor:
    """Compact scales to [round_up(rows, 128), round_up(ceil(cols/16), 4)], a byte per row; padding is 0."""
    compact = scale.view(torch.uint8)
    out = compact.new_zeros(scale_shape(rows, cols, block_rows, "expanded"))
    out[:rows, : compact.shape[1]] = compact.repeat_interleave(block_rows, 0)[:rows]
    return out.view(scale.dtype)


def swizzle_scale(expanded: torch.Tensor) -> torch.Tensor:
    """Expanded scales to the order in which cuBLASLt and torch's scaled_mm read them; the same shape."""
    rows, columns = expanded.shape
    i = torch.arange(rows, dtype=torch.int64, device=expanded.device).unsqueeze(1)
    j = torch.arange(columns, dtype=torch.int64, device=expanded.device)
    out = torch.empty_like(expanded.view(torch.uint8)).flatten()
    out[swizzled_offset(i, j, columns).flatten()] = expanded.view(torch.uint8).flatten()
    return out.view(expanded.shape).view(expanded.dtype)


def unswizzle_scale(swizzled: torch.Tensor) -> torch.Tensor:
    """The inverse of swizzle_scale."""
    rows, columns = swizzled.shape
    if rows % ATOM_ROWS or columns % ATOM_COLUMNS:
        raise ValueError(
            f"swizzled scales come in whole atoms of {ATOM_ROWS}x{ATOM_COLUMNS}, got {rows}x{columns}"
        )
    i = torch.arange(rows, dtype=torch.int64, device=swizzled.device).unsqueeze(1)
    j = torch.arange(columns, dtype=torch.int64, device=swizzled.device)
    flat = swizzled.view(torch.uint8).flatten()
    return flat[swizzled_offset(i, j, columns)].view(swizzled.dtype)


def compact_scale(expanded: torch.Tensor, rows: int, cols: int, block_rows: int) -> torch.Tensor:
    """The inverse of expand_scale."""
    return (
        expanded.view(torch.uint8)[:rows:block_rows, : ceil_div(cols, BLOCK)]
        .contiguous()
        .view(expanded.dtype)
    )
