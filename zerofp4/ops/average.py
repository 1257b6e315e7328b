"""zerofp4::average: the mean of gradients of all ranks, added in rank order, and the sums of its squares."""

import math

import torch

import zerofp4._C as _C
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.ops.device import DTYPE_CODES, target_of
from zerofp4.ops.operator import backend, fake
from zerofp4.storage import address_of, check_buffer, check_memory

torch.library.define(
    "zerofp4::average",
    "(Tensor pieces, Tensor(a!) out, Tensor? own=None, int rank=0, Tensor(b!)? squares=None) -> ()",
)

SQUARES: tuple[int, int] = (_C.SQUARE_COPIES, _C.SQUARE_WORDS)
"""The shape of sums of squares, int64: copies of words, to be added up. A word stands for a range of 8
exponents; the last two count infinite chunks and those with NaN.
"""


def _check(
    pieces: torch.Tensor,
    out: torch.Tensor,
    own: torch.Tensor | None = None,
    rank: int = 0,
    squares: torch.Tensor | None = None,
) -> None:
    if pieces.dtype not in WEIGHT_DTYPES:
        raise TypeError(f"pieces must have one of the dtypes {WEIGHT_DTYPES}, got {pieces.dtype}")
    if pieces.dim() != 2 or pieces.shape[0] == 0 or not pieces.is_contiguous():
        raise ValueError(
            "pieces must be a contiguous matrix with a row for each rank, got shape "
            f"{tuple(pieces.shape)} and strides {pieces.stride()}"
        )
    check_memory("pieces", pieces)
    check_buffer("out", out, pieces.shape[1:], torch.float32, pieces.device)
    if own is not None:
        check_buffer("own", own, pieces.shape[1:], pieces.dtype, pieces.device)
        if not 0 <= rank < pieces.shape[0]:
            raise ValueError(f"rank must be one of the {pieces.shape[0]} rows of pieces, got {rank}")
    if squares is not None:
        check_buffer("squares", squares, SQUARES, torch.int64, pieces.device)


def average(
    pieces: torch.Tensor,
    out: torch.Tensor,
    own: torch.Tensor | None = None,
    rank: int = 0,
    squares: torch.Tensor | None = None,
) -> None:
    """out = ((pieces[0] + pieces[1]) + ...) / len(pieces), in float32 whatever the pieces are.

    pieces: float32, bfloat16 or float16 [ranks, n], contiguous. out: float32 [n]. own: [n] of the dtype of
    pieces, which is read in place of pieces[rank]. squares: int64 SQUARES, to which those of the means are
    added, of each 128 neighbours from the first on; for norm_of_squares().
    Raises TypeError or ValueError for others.
    """
    _check(pieces, out, own, rank, squares)
    _C.average(
        target=target_of(pieces.device),
        pieces=address_of("pieces", pieces),
        own=address_of("own", own),
        dtype=DTYPE_CODES[pieces.dtype],
        rank=rank,
        count=pieces.shape[0],
        numel=pieces.shape[1],
        output=address_of("out", out),
        squares=address_of("squares", squares),
    )


backend("average")(average)
fake("average")(_check)


def norm_of_squares(words: torch.Tensor) -> torch.Tensor:
    """float32 []: the root of the sum that words stand for, int64 [SQUARES[1]], copies and ranks added up.
    Waits for nothing.
    """
    # 2 ** (8 i - 150), as bits: for exp2() of float64, torch compiles a kernel at run time.
    exponents = torch.arange(_C.SQUARE_RANGES, dtype=torch.int64, device=words.device) * 8 - 150
    powers = ((exponents + 1023) << 52).view(torch.float64)
    total = (words[: _C.SQUARE_RANGES].double() * powers).sum()
    infinite, nan = words[_C.SQUARE_RANGES :].unbind()
    return total.sqrt().masked_fill(infinite != 0, math.inf).masked_fill(nan != 0, math.nan).float()
