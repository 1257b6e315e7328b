"""A tensor of which a rank holds a flat range, and which torch.distributed.checkpoint saves and loads so."""

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from zerofp4.distributed import GroupReference, Stage
from zerofp4.optim.seal import Chunk, Place, checksum, the_one
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
    home: Home | None
    boxes: dict[tuple[int, ...], Rectangle]
    """By their offsets, those that a save or a load has asked for."""
    loaded: torch.Tensor | None
    """What a load has read, or is to read; None where nothing was asked for."""
    received: dict[tuple[int, tuple[int, ...]], str | None] | None
    """What of it was read into `loaded` (see seal.Place); None for all."""
    live: bool
    """Whether the values are those of an optimizer itself, and no copy."""
    label: str | None
    """Of the parameter and the entry, as a file has it."""
    unsound: str | None
    """Why its values must not be saved: the optimizer is broken."""
    refusal: str | None
    """Why no file can have it under its name: other ranks have other tensors of that name."""
    written_by: Iterable[str | None]
    """Ids of the saves that its values are written by, or were read from."""

    # What it is, asked for often: of a tensor's own these would be functions of torch, each through a mode.
    shape = property(lambda self: self._shape)
    dtype = property(lambda self: self.values.dtype)
    device = property(lambda self: self.values.device)
    ndim = property(lambda self: len(self._shape))

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values, shape, start=0, home=None, live=False):
        properties = {"dtype": values.dtype, "device": values.device}
        piece = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), **properties)
        piece.values, piece.start, piece.home = values, start, home
        piece.boxes, piece.loaded = {}, None
        piece.live, piece.label, piece.refusal, piece.unsound = live, None, None, None
        piece.received, piece.written_by, piece._shape = {}, (None,), torch.Size(shape)
        return piece

    def __init__(self, *_: Any, **__: Any):
        pass

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

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Piece":
        piece = type(self)(function(self.present()), self.shape, self.start, self.home)
        piece.label, piece.refusal, piece.unsound = self.label, self.refusal, self.unsound
        piece.written_by = tuple(self.save_ids)
        return piece

    @property
    def save_ids(self) -> dict[str | None, str]:
        """Of the saves that present() is of, with the name of this piece: several where a folder mixes them,
        none of no elements.
        """
        was_read = self.loaded is not None and self.received is not None
        ids = self.received.values() if was_read else self.written_by
        return dict.fromkeys(ids, self.label or "a tensor")

    def present(self) -> torch.Tensor:
        """What was loaded into it, or else its values."""
        return self.values if self.loaded is None else self.loaded

    def has_unread(self) -> bool:
        """Whether a checkpoint that it was loaded from lacks some of its elements."""
        if self.loaded is None or self.received is None:
            return False
        boxes = [(_unravel(start, self.shape), sizes) for start, sizes in self.received]
        overlap = any(_overlap(a, b) for i, a in enumerate(boxes) for b in boxes[:i])
        return overlap or sum(math.prod(sizes) for _, sizes in boxes) != self.values.numel()

    def settle(self) -> None:
        """What was loaded are its values from now on."""
        self.written_by = tuple(self.save_ids)
        self.values, self.loaded = self.present(), None

    # torch.distributed.checkpoint

    def _rectangles(self) -> Iterator[Rectangle]:
        return rectangles(self.shape, self.shard)

    def _chunks(self, boxes: Iterable[Rectangle]) -> list:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        if not self.numel():  # nobody owns an element, and it must be in the checkpoint
            return [ChunkStorageMetadata(torch.Size([0] * self.dim()), self.shape)]
        if self.refusal is not None:
            raise ValueError(self.refusal)
        self.boxes = {box.offsets: box for box in boxes}
        return [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in self.boxes.values()]

    def __create_write_items__(self, fqn: str, _: Any) -> list:
        self._check_sound()
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties, most = TensorProperties.create_from_tensor(self.present()), CHUNK // self.dtype.itemsize
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self._chunks(part for box in self._rectangles() for part in cut(box, most))
        ]

    def __create_chunk_list__(self) -> list:
        """Only a load asks. Boxes are whole: a chunk of a file that several of them had a part of would be
        read once for each.
        """
        self.loaded, self.received = torch.empty_like(self.values, memory_format=torch.contiguous_format), {}
        return self._chunks(self._rectangles())

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        if not self.numel():
            return self.present().view(self.shape)
        box = self.boxes[tuple(index.offset)]
        own = slice(box.start - self.start, box.start - self.start + box.numel)
        place = Place(self.label, box.start, tuple(self.shape), self.save_ids, self.received)
        return Chunk.of(self.present()[own].view(box.sizes), place)

    # Copies

    def __deepcopy__(self, memo: dict) -> "Piece":
        if id(self) not in memo:
            memo[id(self)] = self.map(torch.clone)
        return memo[id(self)]

    def _check_sound(self) -> None:
        if self.unsound is not None:
            raise RuntimeError(self.unsound)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        self._check_sound()
        if not self.is_whole:
            warnings.warn(
                "torch.save writes this rank's part of the optimizer's state, and every rank must write its "
                "own to another file: what saves on rank 0 alone, as accelerate's save_state and Trainer do, "
                "loses the other parts. Save with torch.distributed.checkpoint",
                stacklevel=2,
            )
        values = self.present().detach().to("cpu").clone()  # not the flat buffer that it is a view of
        about = tuple(self.shape), self.start, the_one(self.save_ids)
        return _rebuild_piece, (values, *about, checksum(values, *about))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        first, last = self.start, self.shard.end
        what = (
            "all of it"
            if self.is_whole
            else f"elements {first}..{last - 1} of it"
            if last > first
            else "none of it"
        )
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, {what} here)"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        pieces = torch.utils._pytree.tree_map(lambda leaf: _whole(leaf, func), (args, kwargs or {}))
        return func(*pieces[0], **pieces[1])


def _whole(leaf: Any, func: Any = None) -> Any:
    if not isinstance(leaf, Piece):
        return leaf
    if not leaf.is_whole:
        raise RuntimeError(
            f"{func}: of a tensor of shape {tuple(leaf.shape)} this rank holds {leaf.values.numel()} "
            "elements: full_tensor(), which is collective, gathers it"
        )
    return leaf.present().view(leaf.shape)


def _unravel(flat: int, shape: Sequence[int]) -> list[int]:
    """The index of an element by dimension."""
    index: list[int] = []
    for size in reversed(shape):
        flat, offset = divmod(flat, size)
        index.insert(0, offset)
    return index


def _overlap(one: tuple[Sequence[int], Sequence[int]], other: tuple[Sequence[int], Sequence[int]]) -> bool:
    """Whether two boxes, offsets and sizes, have an element in common."""
    return all(a < b + m and b < a + n for a, n, b, m in zip(*one, *other, strict=True))


def _rebuild_piece(values: Any, shape: Any, start: Any, save_id: Any, expected: Any) -> Piece:
    if not (type(values) is torch.Tensor and values.dim() == 1 and values.layout == torch.strided):
        raise TypeError(f"values of a piece must be a 1D tensor, got {type(values).__name__}")
    if type(shape) is not tuple or any(type(n) is not int or n < 0 for n in shape) or type(start) is not int:
        raise TypeError(f"shape and start of a piece must be integers, got {shape!r} and {start!r}")
    if start < 0 or start + values.numel() > math.prod(shape):
        raise ValueError(f"a piece has elements {start}..{start + values.numel() - 1} of shape {shape}")
    if values.device.type != "meta" and checksum(values, shape, start, save_id) != expected:
        raise ValueError(f"elements of shape {shape} are not those that were saved: the file is damaged")
    piece = Piece(values.detach().clone(), shape, start)  # what a file may set_ to another size
    piece.written_by = (save_id,)
    return piece


torch.serialization.add_safe_globals([_rebuild_piece])


# Handlers of __torch_dispatch__


def _to_copy(piece: Piece, *, dtype=None, device=None, non_blocking=False, **_) -> Piece:
    return piece.map(
        lambda values: values.to(device=device, dtype=dtype, non_blocking=non_blocking, copy=True)
    )


def _new_empty(piece: Piece, size, *, dtype=None, device=None, **_) -> torch.Tensor:
    """Of its size: a piece, into which the stager of async_save puts a copy of this one's attributes."""
    if tuple(size) != tuple(piece.shape) or dtype not in (None, piece.dtype):
        return torch.empty(size, dtype=dtype or piece.dtype, device=device or piece.device)
    return piece.map(lambda values: torch.empty_like(values, device=device))


def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(target, Piece):
        return target.copy_(_whole(source, "copy_"), non_blocking)
    if target.loaded is None:
        target.loaded = torch.empty_like(target.values, memory_format=torch.contiguous_format)
    target.received = None
    target.written_by = tuple(source.save_ids) if isinstance(source, Piece) else (None,)
    if isinstance(source, Piece) and source.shard == target.shard:
        target.present().copy_(source.present(), non_blocking)
    else:
        own = _whole(source, "copy_").reshape(-1)[target.start : target.shard.end]
        target.present().copy_(own, non_blocking)
    return target


_aten = torch.ops.aten
_HANDLERS = {
    _aten.alias.default: lambda piece: piece.map(torch.Tensor.detach),
    _aten.detach.default: lambda piece: piece.map(torch.Tensor.detach),
    _aten.clone.default: lambda piece, **_: piece.map(torch.clone),
    _aten.copy_.default: _copy_,
    _aten.empty_like.default: lambda piece, **options: _new_empty(piece, piece.shape, **options),
    _aten.new_empty.default: _new_empty,
    _aten._to_copy.default: _to_copy,
}


# Several ranks


def make_piece(values: torch.Tensor, shape: Any, start: int, home: Home) -> Piece:
    """Where there are several ranks it is a DTensor in name, so that what asks for a full state dict gathers
    it.
    """
    kind = Piece if home.group() is None else _sharded_piece()
    return kind(values, shape, start, home, live=True)


class _AsPieces(TorchDispatchMode):
    """Under it every operator does with pieces what Piece has for it, whatever else they are."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return Piece.__torch_dispatch__(func, types, args, kwargs)


@functools.cache
def _sharded_piece() -> type[Piece]:
    from torch.distributed.tensor import DTensor, Replicate

    class ShardedPiece(Piece, DTensor):
        """A piece of a tensor whose other elements are on other ranks.

        torch's full state dicts gather nothing but DTensors. Of one it has the mesh, redistribute() and
        full_tensor(); the placement says that whoever distributes a whole tensor leaves it whole, which the
        optimizer cuts.
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
