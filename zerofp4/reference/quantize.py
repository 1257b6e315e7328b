"""Whole tensors, and stacks of matrices [E, N, K]: each is quantized alone, with an amax of its own."""

from typing import NamedTuple

import torch

from zerofp4.format import BLOCK, E2M1_MAX, E4M3_MAX, FourOverSix
from zerofp4.reference.elements import e2m1_to_float, float_to_e2m1, pack, transpose_packed, unpack
from zerofp4.reference.four_over_six import four_over_six_scale
from zerofp4.reference.hadamard import hadamard_transform
from zerofp4.reference.layouts import expand_scale, swizzle_scale
from zerofp4.reference.scales import block_amax, block_scale, magnitude, scale_value, scaled, spread
from zerofp4.reference.stochastic import (
    COLUMNWISE_STREAM,
    ROWWISE_STREAM,
    float_to_e2m1_stochastic,
    random_bytes,
)


class Quantized(NamedTuple):
    """Codes and compact scales of a [M, K] matrix; the columnwise side is None where M is odd, unless it is
    that of the Hadamard transform.

    rowwise_data uint8 [M, K/2], rowwise_scale E4M3 [ceil(M/block_rows), ceil(K/16)], columnwise_data uint8
    [K, M/2], with the transform [K, round_up(M, 16)/2], columnwise_scale E4M3 [ceil(K/block_rows),
    ceil(M/16)], amax and columnwise_amax float32 [1], the same tensor unless there is a transform or two were
    given.
    """

    rowwise_data: torch.Tensor
    rowwise_scale: torch.Tensor
    columnwise_data: torch.Tensor | None
    columnwise_scale: torch.Tensor | None
    amax: torch.Tensor
    columnwise_amax: torch.Tensor | None

    def buffers(self, matrix: tuple[int, int], block_rows: int) -> dict[str, torch.Tensor | None]:
        """The fields by name, and the scales in padded layouts. matrix: (M, K), of each matrix of a stack."""
        found = self._asdict()
        for side, shape in (("rowwise", matrix), ("columnwise", matrix[::-1])):
            compact = found[f"{side}_scale"]
            if compact is not None:
                each = compact.reshape(-1, *compact.shape[-2:])
                expanded = torch.stack([expand_scale(scale, *shape, block_rows) for scale in each])
                swizzled = torch.stack([swizzle_scale(scale) for scale in expanded])
                for layout, scales in (("expanded", expanded), ("swizzled", swizzled)):
                    found[f"{side}_scale_{layout}"] = scales if compact.dim() == 3 else scales[0]
        return found


def quantize(
    x: torch.Tensor,
    block_rows: int = BLOCK,
    amax: torch.Tensor | None = None,
    columnwise_amax: torch.Tensor | None = None,
    *,
    hadamard: bool = False,
    random_signs: bool = True,
    rng_state: torch.Tensor | None = None,
    four_over_six: FourOverSix | None = None,
) -> Quantized:
    """Quantize a [M, K] matrix of float32, bfloat16 or float16, K even.

    block_rows 16 is 2D scaling, where the columnwise copy is exactly the transpose, however x was rounded;
    block_rows 1 scales 1x16 blocks along the rows of x, and for the columnwise copy along the rows of its
    transpose, or with `hadamard` (block_rows 1 only) along those of the transpose of x's Hadamard transform.
    amax: float32 [1], taken from x when not given. columnwise_amax (block_rows 1 only): that of the
    columnwise copy; when not given, amax, or that of the transform. rng_state: int64 [2], (seed, offset);
    rounding is stochastic then.
    """
    if amax is None:
        amax = tensor_amax(x)
    options = (block_rows, rng_state, four_over_six)
    data, scale = _quantize_side(x, amax, ROWWISE_STREAM, *options)
    if x.shape[0] % 2 and not hadamard:
        return Quantized(data, scale, None, None, amax, None)
    if block_rows == BLOCK:
        return Quantized(data, scale, transpose_packed(data), scale.t().contiguous(), amax, amax)
    source = x
    if hadamard:
        source = hadamard_transform(x, random_signs)
        columnwise_amax = tensor_amax(source) if columnwise_amax is None else columnwise_amax
    elif columnwise_amax is None:
        columnwise_amax = amax
    transposed = source.t().contiguous()
    data_t, scale_t = _quantize_side(transposed, columnwise_amax, COLUMNWISE_STREAM, *options)
    return Quantized(data, scale, data_t, scale_t, amax, columnwise_amax)


def quantize_experts(
    x: torch.Tensor,
    amax: torch.Tensor | None = None,
    *,
    block_rows: int = BLOCK,
    rng_state: torch.Tensor | None = None,
    four_over_six: FourOverSix | None = None,
) -> Quantized:
    """What quantize makes of each matrix of x [E, N, K], E at least 1, stacked: every field has E as its
    first dimension, amaxes are float32 [E].

    amax: float32 [E], taken from x when not given. rng_state: int64 [E, 2].
    """
    nothing = [None] * len(x)
    given = nothing if amax is None else amax.split(1), nothing if rng_state is None else rng_state
    made = [
        quantize(matrix, block_rows, own, rng_state=state, four_over_six=four_over_six)
        for matrix, own, state in zip(x, *given, strict=True)
    ]
    *codes, amaxes, columnwise_amaxes = zip(*made, strict=True)
    stacked = [None if parts[0] is None else torch.stack(parts) for parts in codes]
    own = torch.cat(amaxes)
    return Quantized(*stacked, own, None if columnwise_amaxes[0] is None else own)


def _quantize_side(
    x, amax, stream: int, block_rows: int, rng_state, four_over_six: FourOverSix | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes and compact scales of a matrix in the orientation in which it is stored."""
    if four_over_six is None:
        e4m3_max = E4M3_MAX
        scale = block_scale(block_amax(x, block_rows), amax)
    else:
        e4m3_max = four_over_six.e4m3_max
        scale = four_over_six_scale(x, amax, block_rows, four_over_six)
    y = scaled(x, scale, amax, block_rows, e4m3_max)
    if rng_state is None:
        return pack(float_to_e2m1(y)), scale
    return pack(float_to_e2m1_stochastic(y, random_bytes(rng_state, y.shape, stream))), scale


def tensor_amax(x: torch.Tensor) -> torch.Tensor:
    """float32 [1]: the largest magnitude of a tensor, +inf where there is a NaN."""
    return magnitude(x).amax().reshape(1)


def dequantize(
    data: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    block_rows: int,
    dtype: torch.dtype = torch.float32,
    e4m3_max: float = E4M3_MAX,
) -> torch.Tensor:
    """[M, K] values of packed codes [M, K/2] with compact scales, of a stack [E, M, K] those of each matrix;
    e4m3_max is 256 only for four over six with that maximum. The product is a float32 that is rounded once to
    dtype.
    """
    if data.dim() == 3:
        matrices = zip(data, scale, amax.split(1), strict=True)
        return torch.stack([dequantize(*matrix, block_rows, dtype, e4m3_max) for matrix in matrices])
    codes = unpack(data)
    decode = (scale_value(scale) * amax) * (1 / (E2M1_MAX * e4m3_max))
    return (e2m1_to_float(codes) * spread(decode, block_rows, *codes.shape)).to(dtype)
