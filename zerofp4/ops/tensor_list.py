"""Lists of tensors that one kernel reads, whose dtypes differ: a launch has those of one dtype."""

import operator
from collections.abc import Sequence

import torch

from zerofp4.storage import addresses_of

_dtype = operator.attrgetter("dtype")


def by_dtype(tensors: Sequence[torch.Tensor]) -> dict[torch.dtype, list[int]]:
    """The positions of the tensors of each dtype."""
    dtypes = list(map(_dtype, tensors))
    kinds = dict.fromkeys(dtypes)
    if len(kinds) == 1:
        return {dtypes[0]: list(range(len(dtypes)))}
    return {kind: [i for i, dtype in enumerate(dtypes) if dtype == kind] for kind in kinds}


def places_of(tensors: Sequence[torch.Tensor], positions: Sequence[int]) -> tuple[list[int], list[int]]:
    """The addresses, and the numbers of elements, of those at some positions."""
    chosen = tensors if len(positions) == len(tensors) else [tensors[i] for i in positions]
    return addresses_of("tensors", chosen), list(map(torch.Tensor.numel, chosen))
