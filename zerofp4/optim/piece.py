"""Tensors of which each rank holds a flat range, saved and loaded by torch.distributed.checkpoint.

Each save has an id, which its tensors and options keep in files: a load refuses a mixture of two saves.
"""

import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zerofp4.distributed import GroupReference, Stage
from zerofp4.engine import with_own_storage
from zerofp4.shard import Rectangle, Shard, cut, intersect, rectangles

CHUNK = 2**24  # the most bytes of a file's chunk: torch reads each into a new buffer

ONE_PART = (
    "torch.save writes one rank's part of the optimizer's state: call consolidate_state_dict() of the "
    "optimizer on every rank before a save on one rank, or save with torch.distributed.checkpoint"
)


class About(NamedTuple):
    """The tensor and the optimizer that a piece belongs to."""

    ranks: GroupReference | None = None  # that hold its pieces; None for a piece that torch.load has read
    device: torch.device | None = None  # where the ranks gather them
    refusal: str | None = None  # why no file can have it under its name, which is another tensor elsewhere
    unsound: str | None = None  # why its values must not be saved: the optimizer is broken

    def check_sound(self) -> None:
        if self.unsound is not None:
            raise RuntimeError(self.unsound)


class Piece(torch.Tensor):
    """A tensor of the shape of a parameter, of which this rank has only elements [start, start + n) of the
    flat order: `values`, 1D. A rank has the one element of a tensor without dimensions, or nothing.

    torch.distributed.checkpoint writes the rectangles that the range covers, and reads them from any chunks
    of a checkpoint. It reads into new memory, the new `values`, so that the optimizer's stay as they are
    until load_state_dict() has checked everything.

    Copies, pickles and moves to another device are pieces, too. copy_ loads a piece. Other operations take
    the whole tensor if this rank has all of it, else they raise RuntimeError.
    """

    values: torch.Tensor
    start: int
    about: About
    saves: set[str]  # the ids of the saves that the values come from: several if a folder mixes them
    unread: int | None  # how many values a load has not read; None if there was no load
    boxes: dict[tuple[int, ...], Rectangle]
    """The rectangles that the last save or load asked for, by their offsets."""

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
        """A piece of the same elements, whose values the function makes."""
        return Piece(function(self.values), self.shape, self.start, self.about, self.saves)

    # Collective

    def full_tensor(self) -> torch.Tensor:
        """Collective: the whole tensor, on every rank."""
        return self.gather(0, self.numel()).view(self.shape)

    def gather(self, first: int, numel: int) -> torch.Tensor:
        """Collective: elements [first, first + numel) of the whole tensor, 1D."""
        found, group = torch.zeros(numel, dtype=self.dtype, device=self.about.device), self.about.ranks()
        part = intersect(self.start, self.values.numel(), first, first + numel)
        if part.numel:
            at = self.start + part.start - first
            found[at : at + part.numel] = self.values[part.start : part.end].to(found.device)
        if numel and group is not None:
            # The maximum of bytes: where a rank has nothing they are 0. A sum would make -0 a 0.
            with Stage("gathering a tensor of the optimizer", group):
                dist.all_reduce(found.view(torch.uint8), dist.ReduceOp.MAX, group=group)
        return found

    # torch.distributed.checkpoint

    def _chunks(self, most: int) -> list[ChunkStorageMetadata]:
        """The rectangles of this rank's range, cut into chunks of at most this many elements."""
        if self.about.refusal is not None:
            raise ValueError(self.about.refusal)
        boxes = [part for box in rectangles(self.shape, self.shard) for part in cut(box, most)]
        if not self.numel():  # no rank owns an element, but the checkpoint must have the tensor
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
        """Only a load calls this. The rectangles are not cut: torch reads a chunk of a file once for each
        rectangle that has a part of it.
        """
        self._begin_load()
        return self._chunks(max(1, self.numel()))

    def __get_tensor_shard__(self, index: MetadataIndex) -> "Chunk":
        box = self.boxes[tuple(index.offset)]
        first = box.start - self.start
        values = self.values.detach()[first : first + box.numel].view(box.sizes)
        return _as_chunk(with_own_storage(values), self)

    def _begin_load(self) -> None:
        self.values = torch.empty_like(self.values, memory_format=torch.contiguous_format)
        self.saves, self.unread = set(), self.values.numel()

    def note_read(self, save_id: str | None, numel: int) -> None:
        """Count values that were read. save_id: None for another optimizer's."""
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
"""Operators that are applied to the values."""


def _whole(leaf: Any) -> Any:
    return leaf.whole() if isinstance(leaf, Piece) else leaf


class Chunk(torch.Tensor):
    """Elements of a Piece on their way to a file or back. A file has a plain tensor with an attribute."""

    piece: Piece
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


def _as_chunk(values: torch.Tensor, piece: Piece) -> Chunk:
    chunk = values.as_subclass(Chunk)
    chunk.piece = piece
    return chunk


for _name in ("clone", "cpu", "detach", "narrow", "to"):  # torch calls these before it writes or reads
    _own = getattr(torch.Tensor, _name)
    setattr(Chunk, _name, lambda self, *a, _own=_own, **k: _as_chunk(_own(self, *a, **k), self.piece))


class SavedOptions(tuple):
    """`param_groups` of a state dict, with the id of the save. A changed copy is an ordinary tuple."""

    save_id: str | None

    def __new__(cls, groups: Iterable[dict], save_id: str | None = None):
        made = super().__new__(cls, groups)
        made.save_id = save_id
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _unseal, (tuple(self), self.save_id)


def the_one(saves: set[str]) -> str | None:
    """The only id of these, or None. Raises ValueError for several."""
    if len(saves) > 1:
        raise ValueError(
            f"state_dict mixes saves: {', '.join(sorted(saves))}. A save into a folder that holds an older "
            "one did not finish: load another checkpoint"
        )
    return next(iter(saves), None)


# Files: these two names, and the last argument, where a checksum once was, are in them


def _rebuild_piece(values: Any, shape: Any, start: Any, save_id: Any, _: Any = None) -> Piece:
    return Piece(values, shape, start, saves={save_id} - {None})


def _unseal(groups: Any, save_id: Any, _: Any = None) -> SavedOptions:
    return SavedOptions(groups, save_id)


sys.modules["zerofp4.optim.seal"] = sys.modules[__name__]  # older files have _unseal under this name
torch.serialization.add_safe_globals([_rebuild_piece, _unseal, (_unseal, "zerofp4.optim.seal._unseal")])
