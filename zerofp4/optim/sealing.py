"""What an optimizer writes into a file says what it is, so that a damaged file is found when it is read.

torch's files have no checksums that torch looks at. A tensor that torch.distributed.checkpoint writes carries
one as an attribute, which any torch can read and leave alone; a value that is pickled carries one in its
pickle.
"""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

ATTRIBUTE = "zerofp4_seal"
"""Of a tensor in a file: (label, shape of the parameter, flat index of its first element, checksum)."""

COLUMNS, ROWS = 512, 64
"""Words of 8 bytes whose sums are taken at a time: 256 KB, which stay in a core's cache."""


class DamagedFileError(ValueError):
    """What was read is not what was written."""


def checksum(values: torch.Tensor, *about: Any) -> int:
    """Of the elements of a tensor in their order, and of what is said about them.

    Sums of rows and of columns of words, modulo 2**64, and a CRC of these: as fast as memory, where a CRC of
    all bytes would take longer than to write them. Any change within 8 bytes is found, and any two words that
    changed places.
    """
    found = zlib.crc32(repr((str(values.dtype), *about)).encode())
    flat = values.detach().reshape(-1).contiguous()
    if flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone()  # words are read where they are aligned
    data = flat.view(torch.uint8)
    whole = data.numel() - data.numel() % (8 * COLUMNS)
    for block in data[:whole].view(torch.int64).split(ROWS * COLUMNS):
        table = block.view(-1, COLUMNS)
        for sums in (table.sum(0), table.sum(1)):
            found = zlib.crc32(sums.cpu().numpy(), found)
    return zlib.crc32(data[whole:].cpu().numpy(), found)


# Tensors


class Box(NamedTuple):
    """Elements of a tensor: [offset, offset + size) in each of its dimensions."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def overlaps(self, other: "Box") -> bool:
        sides = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(a < b + m and b < a + n for a, n, b, m in sides)


class Place(NamedTuple):
    """Where a box of a parameter lies, whose elements are [start, start + numel) of the flat order.

    label: of the parameter and the entry, None where they have no name. origin: storage offset of the box.
    received: where is noted what was read into it.
    """

    label: str | None
    shape: tuple[int, ...]
    start: int
    origin: int
    received: list[Box] | None

    def first(self, view: torch.Tensor) -> int:
        """The flat index of the first element of a part of the box."""
        return self.start + view.storage_offset() - self.origin

    def box(self, view: torch.Tensor) -> Box:
        offsets, rest = [], self.first(view)
        for size in reversed(self.shape):
            rest, offset = divmod(rest, size)
            offsets.append(offset)
        sizes = tuple(view.shape)
        return Box(tuple(reversed(offsets)), sizes)


class Chunk(torch.Tensor):
    """Elements on their way between a piece and a file. Written, they carry a checksum; read into, by copy_,
    they look whether the tensor that they are part of has the one that it was written with, and whether it is
    where it belongs, and note what was read.

    Raises DamagedFileError. A tensor without a checksum is one that another optimizer wrote.
    """

    place: Place

    @staticmethod
    def of(
        values: torch.Tensor,
        label: str | None,
        shape: Sequence[int],
        start: int,
        received: list[Box] | None = None,
    ) -> "Chunk":
        return _placed(values, Place(label, tuple(shape), start, values.storage_offset(), received))

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            reads = func is torch.Tensor.copy_ and isinstance(args[0], Chunk)
            if reads:
                _check(args[0], args[1])
            result = func(*args, **(kwargs or {}))
            if reads and args[0].place.received is not None and args[0].numel():
                args[0].place.received.append(args[0].place.box(args[0]))
            return _placed(result, args[0].place) if func in _KEEP_PLACE else result

    def __reduce_ex__(self, protocol: Any) -> tuple:
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.as_subclass(torch.Tensor)
            label, shape, start, *_ = self.place
            seal = (label, shape, start, checksum(plain, label, shape, start))
            rebuild, arguments = plain.__reduce_ex__(protocol)
        return torch._tensor._rebuild_from_type_v2, (rebuild, torch.Tensor, arguments, {ATTRIBUTE: seal})


_KEEP_PLACE = {getattr(torch.Tensor, name) for name in ("clone", "cpu", "detach", "narrow", "to")}
"""What torch.distributed.checkpoint does with a tensor before it writes it or reads into it."""


def _placed(values: torch.Tensor, place: Place) -> Chunk:
    chunk = values.as_subclass(Chunk)
    chunk.place = place
    return chunk


def _check(target: Chunk, source: torch.Tensor) -> None:
    whole = source if source._base is None else source._base
    seal = vars(whole).get(ATTRIBUTE)
    if seal is None:
        return
    place = target.place
    what = place.label or "a tensor"
    try:
        label, shape, start, expected = seal
        if checksum(whole, label, shape, start) != expected:
            raise DamagedFileError(
                f"the elements of {what} are not those that were saved: the file is damaged"
            )
        first = start + source.storage_offset() - whole.storage_offset()
    except (TypeError, ValueError) as error:
        if isinstance(error, DamagedFileError):
            raise
        raise DamagedFileError(f"the seal of {what} is {seal!r}: the file is damaged") from error
    same_name = None in (label, place.label) or label == place.label
    at = place.first(target)
    if not same_name or shape != place.shape or (first != at and target.numel()):
        raise DamagedFileError(
            f"elements of {label} of shape {shape} from {first} on are in the file where those of {what} of "
            f"shape {place.shape} from {at} on should be: it is damaged"
        )


# Other values


class SealedTuple(tuple):
    """A tuple of options whose pickle has a checksum. Where it is changed it is an ordinary one."""

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _unseal, (tuple(self), _checksum_of(tuple(self)))


class SealedInt(int):
    """The same of an int."""

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _unseal, (int(self), _checksum_of(int(self)))


def _checksum_of(value: Any) -> int:
    return zlib.crc32(repr(_plain(value)).encode())


def same_values(one: tuple, other: tuple) -> bool:
    return _checksum_of(tuple(one)) == _checksum_of(tuple(other))


def _plain(value: Any) -> Any:
    """What a pickle keeps of it in any case; of an object that is not known, its type."""
    if isinstance(value, torch.Tensor):
        return checksum(value, tuple(value.shape))
    if isinstance(value, dict):
        return [(_plain(key), _plain(entry)) for key, entry in value.items()]
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, int):
        return int(value), getattr(value, "name", None)
    return type(value).__qualname__


def _unseal(value: Any, expected: Any) -> SealedTuple | SealedInt:
    if type(value) not in (tuple, int) or _checksum_of(value) != expected:
        raise DamagedFileError("options or steps are not those that were saved: the file is damaged")
    return SealedTuple(value) if type(value) is tuple else SealedInt(value)


torch.serialization.add_safe_globals([_unseal])
