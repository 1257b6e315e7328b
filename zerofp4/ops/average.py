"""zerofp4::average: the mean of gradients of all ranks, added in rank order."""

import torch

import zerofp4._C as _C
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.ops.device import DTYPE_CODES, target_of
from zerofp4.ops.operator import backend
from zerofp4.storage import check_buffer, check_memory

torch.library.define("zerofp4::average", "(Tensor pieces, Tensor(a!) out) -> ()")


def _check(pieces: torch.Tensor, out: torch.Tensor) -> None:
    if pieces.dtype not in WEIGHT_DTYPES:
        raise TypeError(f"pieces must have one of the dtypes {WEIGHT_DTYPES}, got {pieces.dtype}")
    if pieces.dim() != 2 or pieces.shape[0] == 0 or not pieces.is_contiguous():
        raise ValueError(
            "pieces must be a contiguous matrix with a row for each rank, got shape "
            f"{tuple(pieces.shape)} and strides {pieces.stride()}"
        )
    check_memory("pieces", pieces)
    check_buffer("out", out, pieces.shape[1:], torch.float32, pieces.device)


def average(pieces: torch.Tensor, out: torch.Tensor) -> None:
    """out = ((pieces[0] + pieces[1]) + ...) / len(pieces), in float32 whatever the pieces are.

    pieces: float32, bfloat16 or float16 [ranks, n], contiguous. out: float32 [n].
    Raises TypeError or ValueError for others.
    """
    _check(pieces, out)
    count, numel = pieces.shape
    code = DTYPE_CODES[pieces.dtype]
    _C.average(target_of(pieces.device), pieces.data_ptr(), code, count, numel, out.data_ptr())


backend("average")(average)
torch.library.register_fake("zerofp4::average", _check)
