"""A tensor of which a rank holds a flat range, and which torch.distributed.checkpoint saves and loads so."""

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from zerofp4.distributed import GroupReference, Stage
from zerofp4.engine import with_own_storage
from zerofp4.optim.seal import ATTRIBUTE, checksum, the_one
from zerofp4.shard import Rectangle, Shard, cut, rectangles

CHUNK = 2**24
"""Bytes of a file's chunk, at most: torch reads each into a new buffer."""


class Home:
    """The ranks that hold the pieces of a tensor, and the device on which they meet. Copies are the same."""

    def __init__(self, group: GroupReference, device: torch.device):
        self.group, self.device = group, device

    def __deepcopy__(self, memo: dict) -> "Home":
        return self

    @functools.cached_property
    def mesh(self):
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.group(), self.device.type)


class About(NamedTuple):
    """What a piece is a piece of.

    label: the name of the parameter and the entry, as a file has it; None without a name.
    home: the ranks that hold the other pieces; None for what torch.load has read.
    refusal: why no file can have it under its name: other ranks have other tensors of that name.
    unsound: why its values must not be saved: the optimizer is broken.
    saves: ids of the saves that its values are written by, or were read from.
    is_live: whether the values are those of an optimizer itself, and no copy.
    """

    label: str | None = None
    home: Home | None = None
    refusal: str | None = None
    unsound: str | None = None
    saves: tuple[str | None, ...] = (None,)
    is_live: bool = False


class Piece(torch.Tensor):
    """A tensor of the shape of a parameter, of which only elements [start, start + n) of the flat order are
    here: `values`, 1D. Of a tensor without dimensions a rank has the element, as others may, or nothing.

    torch.distributed.checkpoint writes it as the rectangles that the range covers, and reads these from
    whatever chunks a checkpoint has. What it reads goes to new memory, `loaded`: the optimizer's values stay
    as they are until load_state_dict() has checked everything.

    Copies, pickles and moves to another device are pieces too. copy_ into one loads it. Other operations see
    the whole tensor where it is all here, else they raise RuntimeError.
    """

    values: torch.Tensor
    start: int
    about: About
    loaded: torch.Tensor | None
    """What a load has read, or is to read; None if there was none."""
    received: list[tuple[str | None, int]] | None
    """By chunk that torch.distributed.checkpoint has read: the id of its save, and its number of elements."""
    boxes: dict[tuple[int, ...], Rectangle]
    """By their offsets, those that a save or a load has asked for."""

    # What it is, asked for often: of a tensor's own these would be functions of torch, each through a mode.
    shape = property(lambda self: self._shape)
    dtype = property(lambda self: self.values.dtype)
    device = property(lambda self: self.values.device)
    home = property(lambda self: self.about.home)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor, shape: Iterable[int], start: int = 0, about: About | None = None):
        shape = torch.Size(shape)
        piece = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=values.dtype, device=values.device)
        piece.values, piece.start, piece.about, piece._shape = values, start, about or About(), shape
        piece.loaded, piece.received, piece.boxes = None, None, {}
        return piece

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self._shape if dim is None else self._shape[dim]

    def dim(self) -> int:
        return len(self._shape)

    def numel(self) -> int:
        return self._shape.numel()

    @property
    def shard(self) -> Shard:
        return Shard(self.start, self.values.numel())

    @property
    def is_whole(self) -> bool:
        return self.values.numel() == self.numel()

    def present(self) -> torch.Tensor:
        """What was loaded into it, or else its values."""
        return self.values if self.loaded is None else self.loaded

    @property
    def saves(self) -> dict[str | None, str]:
        """Ids of the saves that present() is of, with the name of this piece: several if a folder mixes them,
        none if no elements were read.
        """
        ids = self.about.saves if self.received is None else [save_id for save_id, _ in self.received]
        return dict.fromkeys(ids, self.about.label or "a tensor")

    def has_unread(self) -> bool:
        """Whether a checkpoint that it was loaded from lacks some of its elements."""
        return self.received is not None and sum(n for _, n in self.received) != self.values.numel()

    def copied(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Piece":
        """A piece of the same elements, with what the function makes of their values."""
        about = self.about._replace(saves=tuple(self.saves), is_live=False)
        return type(self)(function(self.present()), self.shape, self.start, about)

    def load(self, source: torch.Tensor) -> "Piece":
        """Take the elements of a whole tensor, or of another such piece, as what was loaded."""
        if isinstance(source, Piece) and source.shard == self.shard:
            own = source.present()
        else:
            own = _whole(source).reshape(-1)[self.start : self.shard.end]
        saves = tuple(source.saves) if isinstance(source, Piece) else (None,)
        self.received, self.about = None, self.about._replace(saves=saves)
        self.loaded = torch.empty_like(self.values, memory_format=torch.contiguous_format).copy_(own)
        return self

    # torch.distributed.checkpoint

    def _chunks(self, boxes: Iterable[Rectangle]) -> list:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        if not self.numel():  # nobody owns an element, and it must be in the checkpoint
            return [ChunkStorageMetadata(torch.Size([0] * self.dim()), self.shape)]
        if self.about.refusal is not None:
            raise ValueError(self.about.refusal)
        self.boxes = {box.offsets: box for box in boxes}
        return [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in self.boxes.values()]

    def __create_write_items__(self, fqn: str, _: Any) -> list:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        self._check_sound()
        properties, most = TensorProperties.create_from_tensor(self.present()), CHUNK // self.dtype.itemsize
        parts = (part for box in rectangles(self.shape, self.shard) for part in cut(box, most))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self._chunks(parts)
        ]

    def __create_chunk_list__(self) -> list:
        """Only a load asks. Boxes are whole: a chunk of a file that several of them had a part of would be
        read once for each.
        """
        self.loaded = torch.empty_like(self.values, memory_format=torch.contiguous_format)
        self.received = []
        return self._chunks(rectangles(self.shape, self.shard))

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        if not self.numel():
            return self.present().view(self.shape)
        box = self.boxes[tuple(index.offset)]
        first = box.start - self.start
        values = with_own_storage(self.present().detach()[first : first + box.numel].view(box.sizes))
        return _chunk(values, self, box.start)

    # Copies

    def __deepcopy__(self, memo: dict) -> "Piece":
        return self.copied(torch.clone)

    def _check_sound(self) -> None:
        if self.about.unsound is not None:
            raise RuntimeError(self.about.unsound)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        self._check_sound()
        if not self.is_whole:
            warnings.warn(
                "torch.save writes this rank's part of the optimizer's state, and every rank must write its "
                "own to another file: what saves on rank 0 alone, as accelerate's save_state and Trainer do, "
                "loses the other parts. Call consolidate_state_dict() of the optimizer on every rank before "
                "such a save, or save with torch.distributed.checkpoint",
                stacklevel=2,
            )
        values = self.present().detach().to("cpu").clone()  # not the flat buffer that it is a view of
        about = tuple(self.shape), self.start, the_one(self.saves)
        return _rebuild_piece, (values, *about, checksum(values, *about))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        here = f"elements {self.start}..{self.shard.end - 1} of it here"
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, {here})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        piece, kwargs = args[0] if args else None, kwargs or {}
        if isinstance(piece, Piece):
            if func in _COPIES:
                return piece.copied(lambda values: func(values, **kwargs))
            if func is _aten.new_empty.default and tuple(args[1]) == tuple(piece.shape):
                # The stager of async_save puts copies of this one's attributes into it.
                return piece.copied(lambda values: torch.empty_like(values, device=kwargs.get("device")))
            if func is _aten.copy_.default:
                return piece.load(args[1])
        args, kwargs = torch.utils._pytree.tree_map(_whole, (args, kwargs))
        return func(*args, **kwargs)


_aten = torch.ops.aten
_COPIES = {_aten.alias.default, _aten.clone.default, _aten.detach.default, _aten._to_copy.default}
"""Operators that do with the values what they do with a tensor."""


def _whole(leaf: Any) -> Any:
    """The whole tensor of a piece; what is no piece as it is."""
    if not isinstance(leaf, Piece):
        return leaf
    if not leaf.is_whole:
        raise RuntimeError(
            f"of a tensor of shape {tuple(leaf.shape)} this rank holds {leaf.values.numel()} elements: "
            "full_tensor(), which is collective, gathers it"
        )
    return leaf.present().view(leaf.shape)


def _rebuild_piece(values: Any, shape: Any, start: Any, save_id: Any, expected: Any) -> Piece:
    if not isinstance(values, torch.Tensor) or checksum(values, shape, start, save_id) != expected:
        raise ValueError(f"elements of shape {shape} are not those that were saved: the file is damaged")
    # A clone: a file may set_ a tensor to another size.
    return Piece(values.detach().clone(), shape, start, About(saves=(save_id,)))


torch.serialization.add_safe_globals([_rebuild_piece])


# Chunks of files


class Chunk(torch.Tensor):
    """Elements of a piece on their way to a file or from one, which start at flat index `start`. Pickled, it
    is a plain tensor with a seal. copy_ into a part of it checks the seal of its source; a source without one
    is another optimizer's.
    """

    piece: Piece
    start: int
    __torch_function__ = torch._C._disabled_torch_function_impl

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> "Chunk":
        """Raises ValueError, before any element is written, if it is damaged or belongs elsewhere."""
        if self.numel():
            whole = source if source._base is None else source._base
            seal = vars(whole).get(ATTRIBUTE)
            if seal is not None:
                self._check(seal, whole, source.storage_offset() - whole.storage_offset())
            self.piece.received.append((None if seal is None else seal[3], self.numel()))
        return torch.Tensor.copy_(self, source, non_blocking)

    def _check(self, seal: tuple, whole: torch.Tensor, offset: int) -> None:
        """whole: as the file has it; its elements from `offset` on are needed."""
        own, what = self.piece.about.label, self.piece.about.label or "a tensor"
        label, first, shape, _, expected = seal
        if checksum(whole, *seal[:4]) != expected:
            raise ValueError(f"elements of {what} are not those that were saved: the file is damaged")
        needed = tuple(self.piece.shape), self.start + self.storage_offset()
        if (shape, first + offset) != needed or not (own is None or label in (None, own)):
            raise ValueError(
                f"elements of {label} of shape {shape} from {first + offset} on are in the file where those "
                f"of {what} of shape {needed[0]} from {needed[1]} on should be: it is damaged"
            )

    def __reduce_ex__(self, protocol: Any) -> tuple:
        plain, piece = self.as_subclass(torch.Tensor), self.piece
        about = piece.about.label, self.start, tuple(piece.shape), the_one(piece.saves)
        rebuild, arguments = plain.__reduce_ex__(protocol)
        attributes = {ATTRIBUTE: (*about, checksum(plain, *about))}
        return torch._tensor._rebuild_from_type_v2, (rebuild, torch.Tensor, arguments, attributes)


def _chunk(values: torch.Tensor, piece: Piece, start: int) -> Chunk:
    chunk = values.as_subclass(Chunk)
    chunk.piece, chunk.start = piece, start
    return chunk


def _keeping_chunk(function: Callable[..., torch.Tensor]) -> Callable[..., Chunk]:
    return lambda self, *args, **options: _chunk(function(self, *args, **options), self.piece, self.start)


for _name in ("clone", "cpu", "detach", "narrow", "to"):
    # What torch.distributed.checkpoint does with a tensor before it writes it or reads into it.
    setattr(Chunk, _name, _keeping_chunk(getattr(torch.Tensor, _name)))


# Several ranks


class _AsPieces(TorchDispatchMode):
    """Under it every operator does with pieces what Piece has for it, whatever else they are."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return Piece.__torch_dispatch__(func, types, args, kwargs)


@functools.cache
def sharded_piece() -> type[Piece]:
    from torch.distributed.tensor import DTensor, Replicate

    class ShardedPiece(Piece, DTensor):
        """A piece of a tensor whose other elements are on other ranks: a DTensor in name, since torch's full
        state dicts gather nothing else. It has the mesh, redistribute() and full_tensor(); the placement says
        that whoever distributes a whole tensor leaves it whole, which the optimizer cuts.
        """

        device_mesh = property(lambda self: self.home.mesh)
        placements = property(lambda self: (Replicate(),))

        def redistribute(self, device_mesh=None, placements=None, **_):
            """Collective: the whole tensor on every rank, as a replicated DTensor."""
            return DTensor.from_local(gathered(self), self.home.mesh, [Replicate()], run_check=False)

        def to_local(self, *, grad_placements=None):
            return self

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            """torch 2.11 takes every DTensor past its __torch_dispatch__, to operators that know no pieces. A
            mode comes before both.
            """
            with _AsPieces(), torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    return ShardedPiece


def gathered(piece: Piece) -> torch.Tensor:
    """Collective: the whole tensor, in its shape, from the ranges that the ranks hold, wherever these lie."""
    group, own = piece.home.group(), piece.present()
    if group is None:
        return own.view(piece.shape).clone()
    flat = torch.zeros(piece.numel(), dtype=piece.dtype, device=piece.home.device)
    flat[piece.start : piece.shard.end] = own.to(flat.device)
    if flat.numel():
        # Of the bytes: the others' are 0, and what several ranks have is the same. A sum makes -0 a 0.
        with Stage("gathering a whole tensor", group):
            dist.all_reduce(flat.view(-1).view(torch.uint8), dist.ReduceOp.MAX, group=group)
    return flat.view(piece.shape)
