"""A tensor of which a rank holds a flat range, and which torch.distributed.checkpoint saves and loads so."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zerofp4.distributed import GroupReference, Stage
from zerofp4.engine import with_own_storage
from zerofp4.optim.seal import Chunk, as_chunk, the_one
from zerofp4.shard import Rectangle, Shard, cut, intersect, rectangles

CHUNK = 2**24
"""Bytes of a file's chunk, at most: torch reads each into a new buffer."""

ONE_PART = (
    "torch.save writes one rank's part of the optimizer's state: call consolidate_state_dict() of the "
    "optimizer on every rank before a save on one rank, or save with torch.distributed.checkpoint"
)


class Home:
    """The ranks that hold the pieces of a tensor, and the device on which they meet. Copies are the same."""

    def __init__(self, group: GroupReference, device: torch.device):
        self.group, self.device = group, device

    def __deepcopy__(self, memo: dict) -> "Home":
        return self


class About(NamedTuple):
    """What a piece is a piece of.

    home: the ranks that hold the other pieces; None for what torch.load has read.
    refusal: why no file can have it under its name: other ranks have other tensors of that name.
    unsound: why its values must not be saved: the optimizer is broken.
    is_overwritten: whether somebody wrote to the weight, whose values make the master that is saved.
    """

    home: Home | None = None
    refusal: str | None = None
    unsound: str | None = None
    is_overwritten: bool = False

    def check_sound(self) -> None:
        if self.unsound is not None:
            raise RuntimeError(self.unsound)


class Piece(torch.Tensor):
    """A tensor of the shape of a parameter, of which only elements [start, start + n) of the flat order are
    here: `values`, 1D. Of a tensor without dimensions a rank has the element, as others may, or nothing.

    torch.distributed.checkpoint writes it as the rectangles that the range covers, and reads these from
    whatever chunks a checkpoint has. What it reads goes to new memory, the new `values`: the optimizer's stay
    as they are until load_state_dict() has checked everything.

    Copies, pickles and moves to another device are pieces too. copy_ into one loads it. Other operations see
    the whole tensor where it is all here, else they raise RuntimeError.
    """

    values: torch.Tensor
    start: int
    about: About
    saves: set[str]
    """The ids of the saves that the values are of: several if a folder mixes them."""
    unread: int | None
    """How many of the values a load has not read; None if there was no load."""
    boxes: dict[tuple[int, ...], Rectangle]
    """The rectangles that the last save or load has asked for, by their offsets."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls,
        values: torch.Tensor,
        shape: Iterable[int],
        start: int = 0,
        about: About = About(),  # noqa: B008
        saves: Iterable[str] = (),
    ):
        shape = torch.Size(shape)
        piece = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=values.dtype, device=values.device)
        piece.values, piece.start, piece.about = values, start, about
        piece.saves, piece.unread, piece.boxes = set(saves), None, {}
        return piece

    @property
    def shard(self) -> Shard:
        return Shard(self.start, self.values.numel())

    @property
    def is_whole(self) -> bool:
        return self.values.numel() == self.numel()

    def whole(self) -> torch.Tensor:
        if not self.is_whole:
            raise RuntimeError(
                f"of a tensor of shape {tuple(self.shape)} this rank holds {self.values.numel()} elements: "
                "full_tensor(), which is collective, gathers it"
            )
        return self.values.view(self.shape)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Piece":
        """A piece of the same elements, with what the function makes of their values."""
        return Piece(function(self.values), self.shape, self.start, self.about, self.saves)

    # Collective

    def full_tensor(self) -> torch.Tensor:
        """Collective: the whole tensor, on every rank, from the ranges that the ranks hold."""
        return self.gather(0, self.numel()).view(self.shape)

    def gather(self, first: int, numel: int) -> torch.Tensor:
        """Collective: elements [first, first + numel) of the whole tensor, 1D."""
        group, device = self.about.home.group(), self.about.home.device
        found = torch.zeros(numel, dtype=self.dtype, device=device)
        part = intersect(self.start, self.values.numel(), first, first + numel)
        if part.numel:
            at = self.start + part.start - first
            found[at : at + part.numel] = self.values[part.start : part.end].to(device)
        if numel and group is not None:
            # Of the bytes: the others' are 0, and what several ranks have is the same. A sum makes -0 a 0.
            with Stage("gathering a tensor of the optimizer", group):
                dist.all_reduce(found.view(torch.uint8), dist.ReduceOp.MAX, group=group)
        return found

    # torch.distributed.checkpoint

    def _chunks(self, most: int) -> list[ChunkStorageMetadata]:
        """The rectangles of this rank's range, cut into chunks of at most this many elements."""
        if self.about.refusal is not None:
            raise ValueError(self.about.refusal)
        boxes = [part for box in rectangles(self.shape, self.shard) for part in cut(box, most)]
        if not self.numel():  # nobody owns an element, and it must be in the checkpoint
            boxes = [Rectangle((0,) * self.dim(), tuple(self.shape), 0)]
        self.boxes = {box.offsets: box for box in boxes}
        return [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in boxes]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        self.about.check_sound()
        properties = TensorProperties.create_from_tensor(self.values)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self._chunks(CHUNK // self.dtype.itemsize)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Only a load calls this. It asks for uncut rectangles: torch reads a chunk of a file once for each
        rectangle that has a part of it.
        """
        self._begin_load()
        return self._chunks(max(1, self.numel()))

    def __get_tensor_shard__(self, index: MetadataIndex) -> Chunk:
        box = self.boxes[tuple(index.offset)]
        first = box.start - self.start
        values = self.values.detach()[first : first + box.numel].view(box.sizes)
        return as_chunk(with_own_storage(values), self)

    def _begin_load(self) -> None:
        self.values = torch.empty_like(self.values, memory_format=torch.contiguous_format)
        self.saves, self.unread = set(), self.values.numel()

    def note_read(self, save_id: str | None, numel: int) -> None:
        """A chunk has been read. save_id: None for another optimizer's."""
        self.saves |= {save_id} - {None}
        self.unread -= numel

    # Copies

    def __deepcopy__(self, memo: dict) -> "Piece":
        return self.map(torch.clone)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        self.about.check_sound()
        if not self.is_whole:
            warnings.warn(ONE_PART, stacklevel=2)
        values = self.values.detach().to("cpu").clone()  # not the flat buffer that it is a view of
        return _rebuild_piece, (values, tuple(self.shape), self.start, the_one(self.saves))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        here = f"elements {self.start}..{self.shard.end - 1} of it here"
        return f"Piece(shape={tuple(self.shape)}, dtype={self.dtype}, {here})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        piece, kwargs = args[0], kwargs or {}
        if isinstance(piece, Piece):
            if func in _COPIES:
                return piece.map(lambda values: func(values, **kwargs))
            if func is _aten.new_empty.default and tuple(args[1]) == tuple(piece.shape):
                # The stager of async_save puts copies of this one's attributes into it.
                return piece.map(lambda values: torch.empty_like(values, device=kwargs.get("device")))
            if func is _aten.copy_.default:
                own = _whole(args[1]).reshape(-1)[piece.start : piece.shard.end]
                piece._begin_load()
                piece.values.copy_(own)
                piece.note_read(None, own.numel())
                return piece
        args, kwargs = torch.utils._pytree.tree_map(_whole, (args, kwargs))
        return func(*args, **kwargs)


_aten = torch.ops.aten
_COPIES = {_aten.alias.default, _aten.clone.default, _aten.detach.default, _aten._to_copy.default}
"""Operators that do with the values what they do with a tensor."""


def _whole(leaf: Any) -> Any:
    return leaf.whole() if isinstance(leaf, Piece) else leaf


def _rebuild_piece(values: Any, shape: Any, start: Any, save_id: Any, _: Any = None) -> Piece:
    return Piece(values, shape, start, saves={save_id} - {None})


torch.serialization.add_safe_globals([_rebuild_piece])
