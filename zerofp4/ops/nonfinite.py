"""Which of a list of tensors holds a NaN or Inf, in one pass over them all."""

from collections.abc import Sequence

import torch

import zerofp4._C as _C
from zerofp4.ops.device import DTYPE_CODES, target_of
from zerofp4.ops.tensor_list import by_dtype, places_of
from zerofp4.storage import address_of


def find_nonfinite(
    tensors: Sequence[torch.Tensor],
    words: Sequence[int],
    found: torch.Tensor,
    when: torch.Tensor | None = None,
) -> None:
    """Raise found[0], int32, to the largest word of a tensor that holds a NaN or Inf. Waits for nothing.

    tensors: contiguous, of one of format.WEIGHT_DTYPES, on the device of `found`, whatever their dtypes.
    words: above 0.
    when: int64 [2] on the device: nothing is looked at where both are 0.

    Not an operator: it takes addresses, since a list of hundreds is looked at in every step.
    """
    target = target_of(found.device)
    for dtype, positions in by_dtype(tensors).items():
        places = places_of(tensors, positions)
        some = [words[i] for i in positions]
        addresses = address_of("found", found), address_of("when", when)
        _C.find_nonfinite(target, *places, some, DTYPE_CODES[dtype], *addresses)
