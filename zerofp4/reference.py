"""NVFP4 in plain PyTorch: the specification that every backend equals byte for byte, on any device.

All arithmetic is float32 in the order written, rounding to nearest even. The order is part of the format:
where a product has three factors the brackets say which two are multiplied first, because another order
changes bytes.
"""

from typing import NamedTuple

import torch

from zerofp4.format import (
    ATOM_COLUMNS,
    ATOM_ROWS,
    BLOCK,
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    FLOAT32_MAX,
    SCALE_DTYPE,
)
from zerofp4.layout import as_matrix, ceil_div, scale_shape, swizzled_offset
from zerofp4.shard import Shard, byte_range


class Quantized(NamedTuple):
    """Codes and compact scales of a [M, K] matrix; the columnwise side is None where M is odd.

    rowwise_data uint8 [M, K/2], rowwise_scale E4M3 [ceil(M/block_rows), ceil(K/16)], columnwise_data uint8
    [K, M/2], columnwise_scale E4M3 [ceil(K/block_rows), ceil(M/16)], amax float32 [1].
    """

    rowwise_data: torch.Tensor
    rowwise_scale: torch.Tensor
    columnwise_data: torch.Tensor | None
    columnwise_scale: torch.Tensor | None
    amax: torch.Tensor


# Elements


def float_to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 of float32 values: nearest, ties to the even code, saturating at 6, NaN to code 7.

    Thresholds are the midpoints of neighbouring values; `>` sends a tie down, `>=` up, whichever code is
    even.
    """
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    code = code + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5.0)
    code = torch.where(x.isnan(), 7, code)
    return (code + 8 * (x.signbit() & ~x.isnan())).to(torch.uint8)


def e2m1_to_float(codes: torch.Tensor) -> torch.Tensor:
    values = torch.tensor(E2M1_VALUES, device=codes.device)
    return torch.cat([values, -values])[codes.long()]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [..., K] to bytes [..., K/2]; the low nibble is the even column."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(data: torch.Tensor) -> torch.Tensor:
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)


def transpose_packed(data: torch.Tensor) -> torch.Tensor:
    """uint8 [M, K/2] to [K, M/2], M even."""
    return pack(unpack(data).t().contiguous())


# Two-level scales


def magnitude(x: torch.Tensor) -> torch.Tensor:
    """|x| in float32 with NaN as +inf: what an amax sees."""
    return torch.where(x.isnan(), torch.inf, x.float().abs())


def blocks(x: torch.Tensor, block_rows: int) -> torch.Tensor:
    """[M, K] cut into blocks [ceil(M/block_rows), ceil(K/16), block_rows, 16]; 0 past the edges."""
    rows, cols = x.shape
    x = torch.nn.functional.pad(x, (0, -cols % BLOCK, 0, -rows % block_rows))
    return x.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, block_rows)).transpose(1, 2)


def block_amax(x: torch.Tensor, block_rows: int) -> torch.Tensor:
    """float32 [ceil(M/block_rows), ceil(K/16)]: the largest magnitude of each block."""
    return blocks(magnitude(x), block_rows).amax(dim=(2, 3))


def divide(numerator: float, x: torch.Tensor) -> torch.Tensor:
    """numerator / x, rounded once. Python's `/` would multiply with the reciprocal and round twice."""
    return torch.full_like(x, numerator) / x


def encode_scale(amax: torch.Tensor) -> torch.Tensor:
    """S_enc, the global factor that maps the tensor's amax to 448 * 6."""
    encode = divide(E4M3_MAX * E2M1_MAX, amax).clamp(max=FLOAT32_MAX)
    return torch.where((amax == 0) | amax.isinf(), 1.0, encode)


def block_scale(amax_of_blocks: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """The E4M3 scale of each block. May be 0: a block of zeros, or one that underflows."""
    factor = encode_scale(amax) * (1 / 6)
    return (amax_of_blocks * factor).clamp(max=E4M3_MAX).to(SCALE_DTYPE)


def block_encode(scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """What the elements of a block are multiplied with before they are rounded to E2M1."""
    decode = divide(1.0, encode_scale(amax))
    encode = divide(1.0, scale.float() * decode).clamp(max=FLOAT32_MAX)
    return torch.where(scale.float() > 0, encode, FLOAT32_MAX)


def spread(per_block: torch.Tensor, block_rows: int, rows: int, cols: int) -> torch.Tensor:
    """One value per block to one per element of [rows, cols]."""
    return per_block.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]


def encode(x: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, block_rows: int) -> torch.Tensor:
    """uint8 codes [M, K] of a matrix whose block scales are known."""
    return float_to_e2m1(x.float() * spread(block_encode(scale, amax), block_rows, *x.shape))


# Whole tensors


def quantize(x: torch.Tensor, block_rows: int = BLOCK, amax: torch.Tensor | None = None) -> Quantized:
    """Quantize a [M, K] matrix of float32, bfloat16 or float16, K even.

    block_rows 16 is 2D scaling, where the columnwise copy is exactly the transpose; block_rows 1 scales 1x16
    blocks along the rows of x, and for the columnwise copy along the rows of its transpose.
    amax: float32 [1], taken from x when not given.
    """
    if amax is None:
        amax = magnitude(x).amax().reshape(1)
    scale = block_scale(block_amax(x, block_rows), amax)
    data = pack(encode(x, scale, amax, block_rows))
    if x.shape[0] % 2:
        return Quantized(data, scale, None, None, amax)
    if block_rows == BLOCK:
        return Quantized(data, scale, transpose_packed(data), scale.t().contiguous(), amax)
    transposed = x.t().contiguous()
    scale_t = block_scale(block_amax(transposed, block_rows), amax)
    return Quantized(data, scale, pack(encode(transposed, scale_t, amax, block_rows)), scale_t, amax)


def dequantize(
    data: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    block_rows: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """[M, K] values of packed codes [M, K/2] with compact scales."""
    codes = unpack(data)
    decode = (scale.float() * amax) * (1 / (E4M3_MAX * E2M1_MAX))
    return (e2m1_to_float(codes) * spread(decode, block_rows, *codes.shape)).to(dtype)


# Scale layouts


def expand_scale(scale: torch.Tensor, rows: int, cols: int, block_rows: int) -> torch.Tensor:
    """Compact scales to [round_up(rows, 128), round_up(ceil(cols/16), 4)], a byte per row; padding is 0."""
    compact = scale.view(torch.uint8)
    out = compact.new_zeros(scale_shape(rows, cols, block_rows, "expanded"))
    out[:rows, : compact.shape[1]] = compact.repeat_interleave(block_rows, 0)[:rows]
    return out.view(scale.dtype)


def swizzle_scale(expanded: torch.Tensor) -> torch.Tensor:
    """Expanded scales to the order in which cuBLASLt and torch's scaled_mm read them; the same shape."""
    rows, columns = expanded.shape
    i = torch.arange(rows, device=expanded.device).unsqueeze(1)
    j = torch.arange(columns, device=expanded.device)
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
    i = torch.arange(rows, device=swizzled.device).unsqueeze(1)
    j = torch.arange(columns, device=swizzled.device)
    flat = swizzled.view(torch.uint8).flatten()
    return flat[swizzled_offset(i, j, columns)].view(swizzled.dtype)


def compact_scale(expanded: torch.Tensor, rows: int, cols: int, block_rows: int) -> torch.Tensor:
    """The inverse of expand_scale."""
    return (
        expanded.view(torch.uint8)[:rows:block_rows, : ceil_div(cols, BLOCK)]
        .contiguous()
        .view(expanded.dtype)
    )


# Shards of FP32 masters


def place_shard(master: torch.Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The shard's elements rounded to the weight's dtype, at their place in a [M, K] matrix of zeros
    (float32).
    """
    rows, cols = as_matrix(shape)
    flat = torch.zeros(rows * cols, device=master.device)
    flat[start : start + master.numel()] = master.to(dtype).float()
    return flat.view(rows, cols)


def partial_amax(
    master: torch.Tensor, start: int, shape: torch.Size, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tile amaxes [ceil(M/16), ceil(K/16)] and amax [1] of a 1D shard; what it does not own counts as 0."""
    placed = place_shard(master, start, shape, dtype)
    return block_amax(placed, BLOCK), magnitude(placed).amax().reshape(1)


def partial_cast(
    master: torch.Tensor,
    start: int,
    shape: torch.Size,
    dtype: torch.dtype,
    tile_amax: torch.Tensor,
    amax: torch.Tensor,
    shard_data: torch.Tensor,
) -> None:
    """Write the codes of a 1D shard into shard_data, the uint8 bytes byte_range(shard) of the packed weight.

    tile_amax and amax are those of the whole weight. A nibble of the first or last byte that belongs to
    another shard keeps its value.
    """
    shard = Shard(start, master.numel())
    placed = place_shard(master, start, shape, dtype)
    codes = encode(placed, block_scale(tile_amax, amax), amax, BLOCK).flatten()
    first, _ = byte_range(shard)
    nibbles = unpack(shard_data)
    nibbles[start - 2 * first : shard.end - 2 * first] = codes[shard.start : shard.end]
    shard_data.copy_(pack(nibbles))
