"""Which of a list of tensors holds a NaN or Inf, in one pass over them all."""

import operator
from collections.abc import Sequence

import torch

import zerofp4._C as _C
from zerofp4.ops.device import DTYPE_CODES, target_of

_dtype = operator.attrgetter("dtype")


def find_nonfinite(tensors: Sequence[torch.Tensor], words: Sequence[int], found: torch.Tensor) -> None:
    """Raise found[0], int32, to the largest word of a tensor that holds a NaN or Inf. Waits for nothing.

    tensors: contiguous, of one of format.WEIGHT_DTYPES, on the device of `found`, whatever their dtypes.
    words: above 0. Not an operator: it takes addresses, since a list of hundreds is looked at in every step.
    """
    target = target_of(found.device)
    dtypes = list(map(_dtype, tensors))
    for dtype in dict.fromkeys(dtypes):
        chosen, some = tensors, list(words)
        if dtypes.count(dtype) < len(dtypes):
            where = [i for i, other in enumerate(dtypes) if other == dtype]
            chosen, some = [tensors[i] for i in where], [words[i] for i in where]
        addresses = list(map(torch.Tensor.data_ptr, chosen))
        numels = list(map(torch.Tensor.numel, chosen))
        _C.find_nonfinite(target, addresses, numels, some, DTYPE_CODES[dtype], found.data_ptr())
