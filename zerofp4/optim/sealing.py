"""What an optimizer writes into a file says what it is, so that a damaged file is found when it is read.

torch's files have no checksums that torch looks at. A tensor that torch.distributed.checkpoint writes carries
one as an attribute, which any torch can read and leave alone; a value that is pickled carries one in its
pickle.
"""

import functools
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from zerofp4.optim.checksums import BLOCK, begin_checksum, checksum
from zerofp4.optim.save_id import ATTRIBUTE as SAVE
from zerofp4.optim.save_id import id_of, stamp, the_one

ATTRIBUTE = "zerofp4_seal"
"""Of a tensor in a file: (label, shape of the parameter, flat index of its first element, checksum)."""

LONG = 2**32
"""Added to the checksum of a chunk: pickles of all are equally long. So files of two saves have their chunks
in the same places, and whoever mixes them hears of two saves, and not of a file that cannot be read.
"""


class DamagedFileError(ValueError):
    """What was read is not what was written."""


# Tensors


class Box(NamedTuple):
    """Elements of a tensor: [offset, offset + size) in each of its dimensions."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def overlaps(self, other: "Box") -> bool:
        sides = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(a < b + m and b < a + n for a, n, b, m in sides)


class Part(NamedTuple):
    """What was read into a box, whether it had a checksum, and the id of the save that wrote it."""

    box: Box
    sealed: bool
    save_id: str | None = None


class Place(NamedTuple):
    """Where a box of a parameter lies, whose elements are [start, start + numel) of the flat order.

    label: of the parameter and the entry, None where they have no name. origin: storage offset of the box.
    received: where is noted what was read into it. save_ids: of what it is written from. checksum: what
    returns that of its elements, where a GPU takes it. written: whether it is in a file, and no longer here.
    """

    label: str | None
    shape: tuple[int, ...]
    start: int
    origin: int
    received: list[Part] | None = None
    save_ids: Iterable[str | None] = ()
    checksum: Callable[[], int] | None = None
    written: bool = False

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

    torch.distributed.checkpoint clones what is a part of a storage, and keeps what it has written until the
    file ends. So a chunk on a CPU has a storage of its own size over the same memory, and a copy of one on a
    GPU gives its memory away when it is written: pickling it once more raises RuntimeError.
    """

    place: Place
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(
        values: torch.Tensor,
        label: str | None,
        shape: Sequence[int],
        start: int,
        save_ids: Iterable[str | None] = (),
    ) -> "Chunk":
        """To be written."""
        values = _alone(values)
        place = Place(label, tuple(shape), start, values.storage_offset(), save_ids=save_ids)
        return _placed(values, place)

    @staticmethod
    def into(
        values: torch.Tensor,
        label: str | None,
        shape: Sequence[int],
        start: int,
        received: list[Part] | None = None,
        save_ids: Iterable[str | None] = (),
    ) -> "Chunk":
        """To be read into, or written again after that."""
        origin = values.storage_offset()
        return _placed(values, Place(label, tuple(shape), start, origin, received, save_ids))

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> "Chunk":
        seal, whole = _seal_of(source)
        _read(self, source, whole, seal, non_blocking)
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple:
        plain, place = self.as_subclass(torch.Tensor), self.place
        if place.written:
            raise RuntimeError(f"{place.label or 'a tensor'} was written already, and its memory given away")
        found = checksum(plain, *place[:3]) if place.checksum is None else place.checksum()
        seal, save_id = (place.label, place.shape, place.start, found + LONG), the_one(place.save_ids)
        attributes = {ATTRIBUTE: seal} | ({} if save_id is None else {SAVE: save_id})
        rebuild, arguments = plain.__reduce_ex__(protocol)
        if place.checksum is not None:
            self.place, self.data = (
                place._replace(written=True, checksum=None),
                torch.empty(0, dtype=plain.dtype),
            )
        return torch._tensor._rebuild_from_type_v2, (rebuild, torch.Tensor, arguments, attributes)


def _keeping_place(name: str) -> Callable[..., Chunk]:
    function = getattr(torch.Tensor, name)

    @functools.wraps(function)
    def method(self: Chunk, *args: Any, **kwargs: Any) -> Chunk:
        result, place = function(self, *args, **kwargs), self.place
        if self.is_cuda and not result.is_cuda:  # where that takes no time
            place = place._replace(checksum=begin_checksum(self.as_subclass(torch.Tensor), *place[:3]))
        return _placed(result, place)

    return method


for _name in ("clone", "cpu", "detach", "narrow", "to"):
    # What torch.distributed.checkpoint does with a tensor before it writes it or reads into it.
    setattr(Chunk, _name, _keeping_place(_name))


def _alone(values: torch.Tensor) -> torch.Tensor:
    """The same memory in a storage that has nothing else, where they are contiguous on a CPU."""
    if values.device.type != "cpu" or not values.is_contiguous() or not values.numel():
        return values
    whole = torch.from_numpy(values.detach().view(-1).view(torch.uint8).numpy())
    return whole.view(values.dtype).view(values.shape)


def _placed(values: torch.Tensor, place: Place) -> Chunk:
    chunk = values.as_subclass(Chunk)
    chunk.place = place
    return chunk


def _seal_of(source: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """The seal of what a file had, None where it had none, and all that was written with it."""
    whole = source if source._base is None else source._base
    return vars(whole).get(ATTRIBUTE), whole


def _read(target: Chunk, source: torch.Tensor, whole: torch.Tensor, seal: Any, non_blocking: bool) -> None:
    """copy_, of what was found to be right: on a GPU after it is there, where all of a chunk is read that is
    no less than what a CPU has looked at meanwhile.
    """
    if seal is not None:
        expected = _check_place(target, source, whole, seal)
        same = (target.shape, target.dtype) == (whole.shape, whole.dtype)
        on_gpu = target.is_cuda and target.is_contiguous() and same and target.nbytes >= BLOCK
        if not on_gpu:
            _check_elements(target, whole, seal, expected)
    torch.Tensor.copy_(target, source, non_blocking)
    if seal is not None and on_gpu:
        _check_elements(target, target.as_subclass(torch.Tensor), seal, expected)
    if target.place.received is not None and target.numel():
        target.place.received.append(Part(target.place.box(target), seal is not None, id_of(whole)))


def _check_place(target: Chunk, source: torch.Tensor, whole: torch.Tensor, seal: Any) -> int:
    """The checksum of all that was written, once it belongs to where a part of it is to be read."""
    place = target.place
    what = place.label or "a tensor"
    try:
        label, shape, start, expected = seal
        first = start + source.storage_offset() - whole.storage_offset()
    except (TypeError, ValueError) as error:
        raise DamagedFileError(f"the seal of {what} is {seal!r}: the file is damaged") from error
    same_name = None in (label, place.label) or label == place.label
    at = place.first(target)
    if not same_name or shape != place.shape or (first != at and target.numel()):
        raise DamagedFileError(
            f"elements of {label} of shape {shape} from {first} on are in the file where those of {what} of "
            f"shape {place.shape} from {at} on should be: it is damaged"
        )
    return expected


def _check_elements(target: Chunk, values: torch.Tensor, seal: Any, expected: int) -> None:
    label, shape, start, _ = seal
    found = checksum(values, label, shape, start)
    if expected not in (found + LONG, found):  # the latter in older files
        what = target.place.label or "a tensor"
        raise DamagedFileError(f"elements of {what} are not those that were saved: the file is damaged")


# Other values


class SealedTuple(tuple):
    """A tuple of options whose pickle has a checksum. Where it is changed it is an ordinary one."""

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _unseal, (tuple(self), _checksum_of(tuple(self)), id_of(self))


class SealedInt(int):
    """The same of an int."""

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _unseal, (int(self), _checksum_of(int(self)), id_of(self))


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


def _unseal(value: Any, expected: Any, save_id: Any = None) -> SealedTuple | SealedInt:
    if type(value) not in (tuple, int) or _checksum_of(value) != expected:
        raise DamagedFileError("options or steps are not those that were saved: the file is damaged")
    return stamp(SealedTuple(value) if type(value) is tuple else SealedInt(value), save_id)


torch.serialization.add_safe_globals([_unseal])
