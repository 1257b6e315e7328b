"""Values of a record that exact products keep from one to the next."""

from collections.abc import Callable, Sequence

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


def find_values(operand: Operand, dtype: torch.dtype) -> torch.Tensor | None:
    """What is kept of that operand in this dtype, if anything."""
    return operand.record.attachments.get(_KEPT, {}).get((operand.side, dtype))


def note_values(operand: Operand, values: torch.Tensor) -> None:
    """Keep what was made of that operand, where its record keeps its values."""
    kept = operand.record.attachments.get(_KEPT)
    if kept is not None:
        kept[operand.side, values.dtype] = values


def kept_values(operand: Operand, dtype: torch.dtype, make: Make) -> torch.Tensor:
    """make(operand, dtype), or what it gave before where the record keeps its values."""
    kept = operand.record.attachments.get(_KEPT)
    if kept is None:
        return make(operand, dtype)
    found = kept.get((operand.side, dtype))
    if found is None:
        found = kept[operand.side, dtype] = make(operand, dtype)
    return found


def kept_stack(
    records: Sequence[Storage], side: str, dtype: torch.dtype, make: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """make(), the values [E, rows, contraction] of that side of all records, or what it gave before where all
    of them keep theirs: each its part of the stack, or the record of a stack all.
    """
    if not all(map(keeps_values, records)):
        return make()
    in_one = getattr(records[0], "experts", None) is not None
    kept = [record.attachments[_KEPT].get((side, dtype)) for record in records]
    stack = kept[0] if in_one else _stack_of(kept)
    if stack is None:
        stack = make()
        for record, values in zip(records, [stack] if in_one else stack, strict=True):
            record.attachments[_KEPT][side, dtype] = values
    return stack


def _stack_of(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The stack of which these are all matrices in their order; None where there is none."""
    first, last = parts[0], parts[-1]
    if any(part is None for part in parts):
        return None
    step = first.numel()
    place, distance = first.data_ptr(), step * first.itemsize
    if any(part.data_ptr() != place + e * distance for e, part in enumerate(parts)):
        return None
    if first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return None  # neighbours by chance
    return first.as_strided((len(parts), *first.shape), (step, *first.stride()))


def rewrite_values(record: Storage, make: Callable[[Storage, str, torch.dtype], torch.Tensor]) -> None:
    """What is kept anew, where it is: captured CUDA graphs read it there."""
    for (side, dtype), values in record.attachments.get(_KEPT, {}).items():
        values.copy_(make(record, side, dtype).view(values.shape))
