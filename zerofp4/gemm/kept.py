"""Values of a record that exact products keep from one to the next."""

from collections.abc import Callable

import torch

from zerofp4.gemm.operand import Operand
from zerofp4.storage import Storage

_KEPT = "values for exact products"
"""Where a record's attachments hold them, by side and dtype."""

Make = Callable[[Operand, torch.dtype], torch.Tensor]


def keep_values(record: Storage) -> None:
    """From now on exact products of this record keep the values of the copies that they multiply, 2 bytes an
    element and copy in bfloat16, 4 on the CPU. Who writes to the record calls refresh_values.
    """
    record.attachments[_KEPT] = {}


def keeps_values(record: Storage) -> bool:
    return _KEPT in record.attachments


def kept_values(operand: Operand, dtype: torch.dtype, make: Make) -> torch.Tensor:
    """make(operand, dtype), or what it gave before where the record keeps its values."""
    kept = operand.record.attachments.get(_KEPT)
    if kept is None:
        return make(operand, dtype)
    found = kept.get((operand.side, dtype))
    if found is None:
        found = kept[operand.side, dtype] = make(operand, dtype)
    return found


def rewrite_values(record: Storage, make: Make) -> None:
    """What is kept anew, where it is: captured CUDA graphs read it there."""
    for (side, dtype), values in record.attachments.get(_KEPT, {}).items():
        values.copy_(make(Operand(record, side), dtype))
