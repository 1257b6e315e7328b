"""Checksums and ids of saves, by which a load finds damaged files and mixtures of two saves.

torch checks nothing in its files, and a save into a folder that holds an older one may be killed before every
rank has written. So each chunk of a tensor carries a seal, an attribute of the tensor in the file: (label,
flat start, shape of the parameter, save id, checksum). Options and steps pickle the last two.

A save id is a token and the number of steps. The ranks agree on a new random token when an optimizer is built
and in each load, so two saves of one id have the same bytes; docs/checkpoints.md names two exceptions. Ids
and checksums have a fixed width: chunks of two saves lie in the same places, so that a mixture can be read.
"""

import json
import secrets
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

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


class Sealed:
    """Options or a step count, pickled with a save id and a checksum. A changed copy is an ordinary value."""

    plain: type
    save_id: str | None = None

    def __new__(cls, value: Any, save_id: str | None = None) -> "Sealed":
        sealed = super().__new__(cls, value)
        sealed.save_id = save_id
        return sealed

    def __reduce_ex__(self, protocol: Any) -> tuple:
        value = self.plain(self)
        return _unseal, (value, self.save_id, digest(value, self.save_id))


class SealedTuple(Sealed, tuple):
    plain = tuple


class SealedInt(Sealed, int):
    plain = int


def _unseal(value: Any, save_id: Any, expected: Any) -> Sealed:
    if type(value) not in (tuple, int) or digest(value, save_id) != expected:
        raise ValueError("options or steps are not those that were saved: the file is damaged")
    return (SealedTuple if type(value) is tuple else SealedInt)(value, save_id)


torch.serialization.add_safe_globals([_unseal])

# Saves


def draw_token() -> str:
    """A new token. Seeds of torch and Python, which two runs may share, do not determine it."""
    return secrets.token_hex(8)


def make_id(token: str, steps: int) -> str:
    return f"{token}-{steps:012d}"


def the_one(saves: Mapping[str | None, str]) -> str | None:
    """The save id of what was read; None of tensors without a seal, and of nothing.

    saves: by id, the name of an entry that has it. Raises ValueError for several ids.
    """
    if len(saves) > 1:
        parts = []
        for save_id, name in saves.items():
            token, _, steps = (save_id or "").partition("-")
            parts.append(
                f"{name} of " + (f"save {token} at step {int(steps)}" if steps else "a save without an id")
            )
        raise ValueError(
            f"state_dict mixes {len(saves)} saves: it has {' and '.join(parts[:2])}. A save into a folder "
            "that holds an older one did not finish: load another checkpoint"
        )
    return next(iter(saves), None)


def check_one_save(by_rank: Sequence[Mapping[str | None, str]]) -> None:
    """Raise ValueError, the same on every rank, if find_saves() found two saves on all ranks together."""
    the_one({save_id: name for saves in by_rank for save_id, name in saves.items()})
