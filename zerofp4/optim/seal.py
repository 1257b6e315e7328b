"""Seals on what an optimizer writes, by which a load finds damaged files and mixtures of two saves.

torch checks nothing in its files, and a save into a folder that holds an older one may be killed before every
rank has written. So each chunk of a tensor carries a seal, an attribute that torch reads and leaves alone:
(label, flat start, shape of the parameter, save id, checksum). Options and steps pickle the last two.

A save id is a token and the number of steps taken. The ranks agree on a new random token when an optimizer is
built and whenever it loads. While the token and the number of steps stay, so do masters and moments: two
saves of one id have the same bytes, and may mix. docs/checkpoints.md names two exceptions. Ids and checksums
have a fixed width: files of two saves then have their chunks in the same places, and their mixture is read
and found to be one.
"""

import json
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

ATTRIBUTE = "zerofp4_seal"
ROWS, COLUMNS = 64, 512
BLOCK = 8 * ROWS * COLUMNS
"""Bytes whose sums are taken together: 256 KB, which stay in the cache of a core."""


def checksum(values: torch.Tensor, *about: Any) -> str:
    """Of the elements of a tensor in their order, and of what is said about them.

    A CRC of the sums of rows and columns of 64-bit words in each block: as fast as memory, where a CRC of all
    bytes takes longer than to write them. Finds any change within 8 bytes, and two words that were swapped.
    """
    data = values.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy()
    whole = data.size - data.size % BLOCK
    found = zlib.crc32(repr((str(values.dtype), *about)).encode())
    for block in data[:whole].view("int64").reshape(-1, ROWS, COLUMNS):
        found = zlib.crc32(block.sum(1), zlib.crc32(block.sum(0), found))
    return f"{zlib.crc32(data[whole:], found):08x}"


# Tensors


class Place(NamedTuple):
    """label: of the parameter and the entry, None where they have no name. start: flat index of the first
    element in a tensor of this shape. save_ids: what the_one() takes, of these elements. received: by flat
    start and sizes, the id of the save that wrote what was read. origin: storage offset of the first element.
    """

    label: str | None
    start: int
    shape: tuple[int, ...]
    save_ids: Mapping[str | None, str]
    received: dict[tuple[int, tuple[int, ...]], str | None]
    origin: int = 0


class Chunk(torch.Tensor):
    """Elements between a piece and a file: pickled, a plain tensor with a seal. copy_ into them checks the
    seal of its source, notes what was read, and raises ValueError for elements that were damaged or belong
    elsewhere, before it writes any. A source without a seal is another optimizer's.
    """

    place: Place
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(values: torch.Tensor, place: Place) -> "Chunk":
        if values.is_cpu and values.is_contiguous() and values.numel():
            # The same memory, in a storage of its size: torch clones a part of a larger one to write it.
            alone = torch.from_numpy(values.detach().view(-1).view(torch.uint8).numpy())
            values = alone.view(values.dtype).view(values.shape)
        return _placed(values, place._replace(origin=values.storage_offset()))

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> "Chunk":
        place, whole = self.place, source if source._base is None else source._base
        seal, start = vars(whole).get(ATTRIBUTE), place.start + self.storage_offset() - place.origin
        if seal is not None and self.numel():
            _check(seal, whole, source.storage_offset() - whole.storage_offset(), start, place)
        torch.Tensor.copy_(self, source, non_blocking)
        if self.numel():
            place.received[start, tuple(self.shape)] = None if seal is None else seal[3]
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple:
        plain, place = self.as_subclass(torch.Tensor), self.place
        about = place.label, place.start, place.shape, the_one(place.save_ids)
        rebuild, arguments = plain.__reduce_ex__(protocol)
        attributes = {ATTRIBUTE: (*about, checksum(plain, *about))}
        return torch._tensor._rebuild_from_type_v2, (rebuild, torch.Tensor, arguments, attributes)


def _placed(values: torch.Tensor, place: Place) -> Chunk:
    chunk = values.as_subclass(Chunk)
    chunk.place = place
    return chunk


def _keeping_place(function: Callable[..., torch.Tensor]) -> Callable[..., Chunk]:
    return lambda self, *args, **options: _placed(function(self, *args, **options), self.place)


for _name in ("clone", "cpu", "detach", "narrow", "to"):
    # What torch.distributed.checkpoint does with a tensor before it writes it or reads into it.
    setattr(Chunk, _name, _keeping_place(getattr(torch.Tensor, _name)))


def _check(seal: Any, whole: torch.Tensor, offset: int, start: int, place: Place) -> None:
    """seal: of all that was written, of which the elements from `offset` on are to be read to `start`."""
    what = place.label or "a tensor"
    if not (type(seal) is tuple and len(seal) == 5 and checksum(whole, *seal[:4]) == seal[4]):
        raise ValueError(f"elements of {what} are not those that were saved: the file is damaged")
    label, first, shape = seal[:3]
    same_name = place.label is None or label in (None, place.label)
    if not same_name or (shape, first + offset) != (place.shape, start):
        raise ValueError(
            f"elements of {label} of shape {shape} from {first + offset} on are in the file where those of "
            f"{what} of shape {place.shape} from {start} on should be: it is damaged"
        )


# Other values


class SealedTuple(tuple):
    """Options with a checksum in their pickle. A changed copy is an ordinary tuple."""

    save_id: str | None = None

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _unseal, (tuple(self), self.save_id, digest(tuple(self), self.save_id))


class SealedInt(int):
    """The same for an int."""

    save_id: str | None = None

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _unseal, (int(self), self.save_id, digest(int(self), self.save_id))


def sealed(value: tuple | int, save_id: str | None) -> SealedTuple | SealedInt:
    made = SealedTuple(value) if isinstance(value, tuple) else SealedInt(value)
    made.save_id = save_id
    return made


def digest(*values: Any) -> str:
    """Of plain values and tensors; of an object of another kind, its type."""
    kinds = {"default": lambda v: v.tolist() if torch.is_tensor(v) else str(type(v)), "skipkeys": True}
    return f"{zlib.crc32(json.dumps(values, **kinds).encode()):08x}"


def _unseal(value: Any, save_id: Any, expected: Any) -> SealedTuple | SealedInt:
    if type(value) not in (tuple, int) or digest(value, save_id) != expected:
        raise ValueError("options or steps are not those that were saved: the file is damaged")
    return sealed(value, save_id)


torch.serialization.add_safe_globals([_unseal])

# Saves


def draw_token() -> str:
    """A new token. Seeds of torch and Python, which two runs may share, do not determine it."""
    return secrets.token_hex(8)


def make_id(token: str, steps: int) -> str:
    return f"{token}-{steps:012d}"


def the_one(found: Mapping[str | None, str]) -> str | None:
    """The save id of what was read, by id (None of a tensor without a seal) the name of an entry. Raises
    ValueError for several.
    """
    if len(found) > 1:
        ids = [(save_id or "").partition("-") for save_id in found]
        saves = [f"save {token} at step {int(n)}" if n else "a save without an id" for token, _, n in ids]
        parts = [f"{name} of {save}" for name, save in zip(found.values(), saves, strict=True)]
        raise ValueError(
            f"state_dict mixes {len(found)} saves: it has {' and '.join(parts[:2])}. A save into a folder "
            "that holds an older one did not finish: load another checkpoint"
        )
    return next(iter(found), None)


def check_one_save(by_rank: Sequence[tuple[dict[str | None, str], dict[str, str]]]) -> None:
    """Raises ValueError, the same on every rank, where the ranks have read what two saves wrote.

    by_rank: what the_one() takes, of tensors and of other values. Tools that convert checkpoints drop the
    seals of tensors, so other values count only beside sealed tensors.
    """
    found = {save_id: name for tensors, _ in by_rank for save_id, name in tensors.items()}
    if found.keys() != {None}:
        found |= {save_id: name for _, values in by_rank for save_id, name in values.items()}
    the_one(found)
