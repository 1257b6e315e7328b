"""The id of a save, which its tensors and options keep in files, so that a load refuses a mixture of two."""

import secrets
from typing import Any

import torch

from zerofp4.distributed import OwnError, exchange


class Chunk(torch.Tensor):
    """Elements of a Piece on their way to a file or back. A file has a plain tensor with an attribute."""

    piece: Any
    __torch_function__ = torch._C._disabled_torch_function_impl

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> "Chunk":
        if self.numel():
            whole = source if source._base is None else source._base  # torch reads a part of a file's chunk
            self.piece.note_read(getattr(whole, "zerofp4_seal", (None, None))[-2], self.numel())
        return torch.Tensor.copy_(self, source, non_blocking)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        rebuild, arguments = self.as_subclass(torch.Tensor).__reduce_ex__(protocol)
        attributes = {"zerofp4_seal": (the_one(self.piece.saves), None)}  # where a checksum once was
        return torch._tensor._rebuild_from_type_v2, (rebuild, torch.Tensor, arguments, attributes)


def as_chunk(values: torch.Tensor, piece: Any) -> Chunk:
    chunk = values.as_subclass(Chunk)
    chunk.piece = piece
    return chunk


for _name in ("clone", "cpu", "detach", "narrow", "to"):  # torch calls these before it writes or reads
    _own = getattr(torch.Tensor, _name)
    setattr(Chunk, _name, lambda self, *a, _own=_own, **k: as_chunk(_own(self, *a, **k), self.piece))


class SavedOptions(tuple):
    """A changed copy is an ordinary tuple."""

    save_id: str | None = None

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _unseal, (tuple(self), self.save_id)


def _unseal(options: Any, save_id: Any, _: Any = None) -> SavedOptions:  # the last one was a checksum
    made = SavedOptions(options)
    made.save_id = save_id
    return made


torch.serialization.add_safe_globals([_unseal])


def the_one(saves: set[str]) -> str | None:
    """The id of what was read; None without one. Raises ValueError for several."""
    if len(saves) > 1:
        raise ValueError(
            f"state_dict mixes saves: {', '.join(sorted(saves))}. A save into a folder that holds an older "
            "one did not finish: load another checkpoint"
        )
    return next(iter(saves), None)


def agree_on_save(saves: set[str], error: OwnError, group: Any, call: str) -> tuple[str | None, str]:
    """The id that all ranks have read, and a new token. Raises an error of any rank. Collective."""
    told = exchange((saves, secrets.token_hex(8)), error, group, call)
    return the_one(set().union(*(own for own, _ in told))), told[0][1]
