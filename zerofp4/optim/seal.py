"""Checksums and ids of saves, by which a load finds damaged files and mixtures of two saves.

torch checks nothing in its files, and a save into a folder that holds an older one may be killed before every
rank has written. So each chunk of a tensor carries a seal, an attribute of the tensor in the file: (label,
flat start, shape of the parameter, save id, checksum). Options pickle the last two.

A save id is a token and the number of steps. The ranks agree on a new random token when an optimizer is built
and in each load, so two saves of one id have the same bytes; docs/checkpoints.md names three exceptions. Ids
and checksums have a fixed width: chunks of two saves lie in the same places, so that a mixture can be read.
"""

import json
import secrets
import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from zerofp4.distributed import OwnError, exchange

ATTRIBUTE = "zerofp4_seal"
ROWS, COLUMNS = 64, 512
BLOCK = 8 * ROWS * COLUMNS
"""Bytes whose sums are taken together: 256 KB, which stay in the cache of a core."""


def checksum(values: torch.Tensor, *about: Any) -> str:
    """Checksum of the elements of a tensor in their order, and of what is said about them.

    A CRC of the sums of rows and columns of 64-bit words in each block: as fast as memory, where a CRC of all
    bytes takes longer than to write them. Finds any change within 8 bytes, and two words that were swapped.
    """
    data = values.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy()
    whole = data.size - data.size % BLOCK
    found = zlib.crc32(repr((str(values.dtype), *about)).encode())
    for block in data[:whole].view("int64").reshape(-1, ROWS, COLUMNS):
        found = zlib.crc32(block.sum(1), zlib.crc32(block.sum(0), found))
    return f"{zlib.crc32(data[whole:], found):08x}"


def digest(*values: Any) -> str:
    """Checksum of plain values and tensors; of an object of another kind, of its type."""
    kinds = {"default": lambda v: v.tolist() if torch.is_tensor(v) else str(type(v)), "skipkeys": True}
    return f"{zlib.crc32(json.dumps(values, **kinds).encode()):08x}"


# Chunks of tensors and options in files


class Chunk(torch.Tensor):
    """Elements of a Piece on their way to a file or from one, which start at flat index `start`. Pickled, it
    is a plain tensor with a seal. copy_ into a part of it checks the seal of its source; a source without one
    is another optimizer's.
    """

    piece: Any
    start: int
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(values: torch.Tensor, piece: Any, start: int) -> "Chunk":
        chunk = values.as_subclass(Chunk)
        chunk.piece, chunk.start = piece, start
        return chunk

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> "Chunk":
        """Raises ValueError, before any element is written, if it is damaged or belongs elsewhere."""
        if self.numel():
            whole = source if source._base is None else source._base  # torch reads a part of a file's chunk
            seal, save_id = vars(whole).get(ATTRIBUTE), None
            if seal is not None:
                label, _, _, save_id, expected = seal
                own = self.piece.about.label
                first = self.start + self.storage_offset() - source.storage_offset() + whole.storage_offset()
                about = label and (own or label), first, tuple(self.piece.shape), save_id
                if checksum(whole, *about) != expected:
                    raise ValueError(
                        f"elements of {own or 'a tensor'} are not those that were saved: the file is damaged"
                    )
            self.piece.note_read(save_id, self.numel())
        return torch.Tensor.copy_(self, source, non_blocking)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        plain, piece = self.as_subclass(torch.Tensor), self.piece
        about = piece.about.label, self.start, tuple(piece.shape), the_one(piece.saves)
        rebuild, arguments = plain.__reduce_ex__(protocol)
        attributes = {ATTRIBUTE: (*about, checksum(plain, *about))}
        return torch._tensor._rebuild_from_type_v2, (rebuild, torch.Tensor, arguments, attributes)


def _keep_chunk(name: str) -> None:
    function = getattr(torch.Tensor, name)
    setattr(Chunk, name, lambda self, *a, **k: Chunk.of(function(self, *a, **k), self.piece, self.start))


for _name in ("clone", "cpu", "detach", "narrow", "to"):
    _keep_chunk(_name)  # what torch.distributed.checkpoint does before it writes a tensor or reads into it


class SealedTuple(tuple):
    """Options, pickled with a save id and a checksum. A changed copy is an ordinary tuple."""

    save_id: str | None

    def __new__(cls, options: Iterable = (), save_id: str | None = None) -> "SealedTuple":
        sealed = super().__new__(cls, options)
        sealed.save_id = save_id
        return sealed

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _unseal, (tuple(self), self.save_id, digest(tuple(self), self.save_id))


def _unseal(value: Any, save_id: Any, expected: Any) -> SealedTuple:
    if type(value) is not tuple or digest(value, save_id) != expected:
        raise ValueError("options are not those that were saved: the file is damaged")
    return SealedTuple(value, save_id)


torch.serialization.add_safe_globals([_unseal])

# Saves

Saves = set[str | None]
"""The ids of the saves that something was read from; None for what has no id."""


def draw_token() -> str:
    """A new token. Seeds of torch and Python, which two runs may share, do not determine it."""
    return secrets.token_hex(8)


def make_id(token: str, steps: int) -> str:
    return f"{token}-{steps:012d}"


def the_one(saves: Saves) -> str | None:
    """The save id of what was read; None without seals. Raises ValueError for several ids."""
    if len(saves) > 1:
        ids = [f"{i.partition('-')[0]} at step {steps_of(i)}" for i in sorted(saves - {None})]
        raise ValueError(
            f"state_dict mixes saves: {', '.join(ids)}{', one without an id' * (None in saves)}. A save into "
            "a folder that holds an older one did not finish: load another checkpoint"
        )
    return next(iter(saves), None)


def steps_of(save_id: str) -> int:
    return int(save_id.partition("-")[2])


def agree_on_save(
    saves: Saves, error: OwnError, group: dist.ProcessGroup | None, call: str
) -> tuple[str | None, str]:
    """Raise an error of any rank, and ValueError if the ranks have read several saves together. Collective.

    saves: what this rank has read. Returns the id that all have read, and a new token, the same on every
    rank.
    """
    told = exchange((saves, draw_token()), error, group, call)
    return the_one(set().union(*(own for own, _ in told))), told[0][1]
