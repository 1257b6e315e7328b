"""Four over six: of two scales for a block, which map its amax to 6 and to 4, that of the smaller error."""

import torch

from zerofp4.format import BLOCK, E2M1_MAX, E4M3_MAX, SCALE_DTYPE, FourOverSix
from zerofp4.reference.elements import e2m1_to_float
from zerofp4.reference.scales import block_amax, blocks, divide, encode, encode_scale, spread


def scale_candidates(
    amax_of_blocks: torch.Tensor, amax: torch.Tensor, e4m3_max: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The E4M3 scales of each block that map its amax to 6 and to 4. Unlike in block_scale, the amax is
    divided by 6 before it meets the tensor's scale.
    """
    base = divide(amax_of_blocks, E2M1_MAX) * encode_scale(amax, e4m3_max)
    return base.clamp(max=E4M3_MAX).to(SCALE_DTYPE), (base * 1.5).clamp(max=E4M3_MAX).to(SCALE_DTYPE)


def block_error(
    x: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, block_rows: int, choice: FourOverSix
) -> torch.Tensor:
    """float32 [ceil(M/block_rows), ceil(K/16)]: the error of each block of [M, K] under these scales.

    The elements of a block's row are added one after the other, the 16 sums of a tile's rows as a tree.
    """
    x = x.float()
    value = e2m1_to_float(encode(x, scale, amax, block_rows, choice.e4m3_max))
    scaled = (value * spread(scale.float(), block_rows, *x.shape)) * amax
    d = divide(scaled, E2M1_MAX * choice.e4m3_max) - x
    columns = blocks(d.abs() if choice.error == "mae" else d * d, block_rows).unbind(-1)
    error = columns[0]
    for column in columns[1:]:
        error = error + column
    if block_rows == BLOCK:
        for half in (8, 4, 2, 1):
            error = error[..., :half] + error[..., half:]
    return error.squeeze(-1)


def four_over_six_scale(
    x: torch.Tensor, amax: torch.Tensor, block_rows: int, choice: FourOverSix
) -> torch.Tensor:
    """E4M3 [ceil(M/block_rows), ceil(K/16)]: of each block's two scales that with the smaller error; the one
    for 6 where the errors are equal or not numbers.
    """
    six, four = scale_candidates(block_amax(x, block_rows), amax, choice.e4m3_max)
    errors = [block_error(x, scale, amax, block_rows, choice) for scale in (four, six)]
    chosen = torch.where(errors[0] < errors[1], four.view(torch.uint8), six.view(torch.uint8))
    return chosen.view(SCALE_DTYPE)
