"""What is measured: named lists of weights, and what this process owns of each."""

import argparse
import dataclasses
import time
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch

import zerofp4
from zerofp4.format import BLOCK
from zerofp4.layout import ceil_div, scale_shape
from zerofp4.shard import Shard, intersect

RANK, RANKS = 1, 4  # whose slice of the Llama list is owned
SMALL_SHAPES = ((768, 768), (256, 2880), (256, 2872))  # 2872 is no multiple of 16
TE_SHAPES = ((8192, 5120), (8192, 11328), (11328, 8192), (14336, 16384))


class Piece(NamedTuple):
    """A weight of [rows, cols] and the part of it that this process owns."""

    shape: tuple[int, int]
    shard: Shard

    @property
    def tiles(self) -> int:
        return ceil_div(self.shape[0], BLOCK) * ceil_div(self.shape[1], BLOCK)

    @property
    def owned_tiles(self) -> int:
        """Tiles with at least one owned element: all but those of the first and last tile row are whole."""
        if not self.shard.numel:
            return 0
        cols = self.shape[1]
        first, last = self.shard.start // cols // BLOCK, (self.shard.end - 1) // cols // BLOCK
        between = max(last - first - 1, 0) * ceil_div(cols, BLOCK)
        return between + sum(self._owned_in_tile_row(tile_row) for tile_row in {first, last})

    def _owned_in_tile_row(self, tile_row: int) -> int:
        rows, cols = self.shape
        tiles: set[int] = set()
        for row in range(tile_row * BLOCK, min((tile_row + 1) * BLOCK, rows)):
            owned = intersect(row * cols, cols, self.shard.start, self.shard.end)
            if owned.numel == cols:
                return ceil_div(cols, BLOCK)
            tiles.update(range(owned.start // BLOCK, ceil_div(owned.end, BLOCK)))
        return len(tiles)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A list of weights. Its rows are called operation/name; those of what depends on the owner
    operation/name/part.
    """

    name: str
    pieces: tuple[Piece, ...]
    part: str | None = None
    scale_layouts: tuple[str, ...] = ("compact",)

    @property
    def part_name(self) -> str:
        return self.name if self.part is None else f"{self.name}/{self.part}"

    @cached_property
    def elements(self) -> int:
        return sum(rows * cols for (rows, cols), _ in self.pieces)

    @cached_property
    def owned(self) -> int:
        return sum(piece.shard.numel for piece in self.pieces)

    @cached_property
    def tiles(self) -> int:
        return sum(piece.tiles for piece in self.pieces)

    @cached_property
    def owned_tiles(self) -> int:
        return sum(piece.owned_tiles for piece in self.pieces)

    @cached_property
    def scale_bytes(self) -> int:
        """Of all scale buffers, rowwise and columnwise, padding included."""
        sides = (side for (rows, cols), _ in self.pieces for side in ((rows, cols), (cols, rows)))
        shapes = (scale_shape(*side, BLOCK, layout) for side in sides for layout in self.scale_layouts)
        return sum(rows * columns for rows, columns in shapes)


def square(size: int) -> Workload:
    """One weight of size x size, owned whole."""
    return whole(str(size), [(size, size)])


def whole(name: str, shapes: Iterable[tuple[int, int]]) -> Workload:
    """Weights of these shapes, owned whole."""
    return Workload(name, tuple(Piece(shape, Shard(0, shape[0] * shape[1])) for shape in shapes))


def reduced(size: int, scale: int) -> int:
    """A dimension divided by scale, even."""
    return max(2, size // scale // 2 * 2)


def te_shapes(scale: int = 1) -> Workload:
    """The shapes that TransformerEngine #3011 gives figures of."""
    shapes = [(reduced(rows, scale), reduced(cols, scale)) for rows, cols in TE_SHAPES]
    return whole(scaled("te-3011", scale), shapes)


def large(scale: int = 1) -> Workload:
    """A matrix whose scales of 1x16 blocks are 268 MB."""
    shape = (reduced(131072, scale), 32768)
    return whole(shape_name(shape), [shape])


def groups(scale: int = 1) -> Workload:
    """64 matrices of one shape."""
    shape = (reduced(4096, scale), reduced(2048, scale))
    return whole(f"64x{shape_name(shape)}", [shape] * 64)


def llama_sizes(scale: int) -> Iterator[tuple[tuple[int, int], bool]]:
    """(rows, cols) of every parameter of Llama-3-8B in module order, and whether it is an NVFP4 weight.

    scale: divides every dimension but the number of layers; dimensions stay even.
    """
    vocabulary, width, key_value, hidden = (reduced(size, scale) for size in (128256, 4096, 1024, 14336))
    layer = [(width, width), (key_value, width), (key_value, width), (width, width)]
    mlp = [(hidden, width), (hidden, width), (width, hidden)]
    yield (vocabulary, width), False
    for _ in range(32):
        for norm, weights in (((1, width), layer), ((1, width), mlp)):
            yield norm, False
            yield from ((shape, True) for shape in weights)
    yield (1, width), False
    yield (vocabulary, width), False


def llama(scale: int = 1) -> Workload:
    """The 224 linear weights of Llama-3-8B's layers; owned is what lies in the second of four equal slices of
    the whole model's flat buffer, embeddings and norms included.
    """
    sizes = list(llama_sizes(scale))
    total = sum(rows * cols for (rows, cols), _ in sizes)
    begin, end = total * RANK // RANKS, total * (RANK + 1) // RANKS
    pieces, offset = [], 0
    for (rows, cols), is_linear in sizes:
        if is_linear:
            pieces.append(Piece((rows, cols), intersect(offset, rows * cols, begin, end)))
        offset += rows * cols
    return Workload(scaled("llama3-8b", scale), tuple(pieces), f"rank{RANK}of{RANKS}")


def small(scale: int = 1) -> Workload:
    """2,000 small weights (divided by scale), each owned from an odd element to an odd end."""
    count = max(1, 2000 // scale)
    pieces = []
    for i in range(count):
        shape = SMALL_SHAPES[i % len(SMALL_SHAPES)]
        start, left_out = 1 + 2 * (i % 50), 1 + 2 * (i % 7)
        pieces.append(Piece(shape, Shard(start, shape[0] * shape[1] - start - left_out)))
    return Workload(f"{count}-small", tuple(pieces))


def many(count: int) -> Workload:
    """`count` weights so small that a step's time on the host is not that of its work."""
    return Workload(f"{count} of 32x32", (Piece((32, 32), Shard(1, 1022)),) * count)


def scaled(name: str, scale: int) -> str:
    return name if scale == 1 else f"{name}-scale{scale}"


def shape_name(shape: tuple[int, int]) -> str:
    return "x".join(map(str, shape))


NAMES = {
    "square": lambda options: square(options.size),
    "llama3-8b": lambda options: llama(options.scale),
    "2000-small": lambda options: small(options.scale),
    "te-3011": lambda options: te_shapes(options.scale),
    "268mb-scales": lambda options: large(options.scale),
    "64-groups": lambda options: groups(options.scale),
}
"""What --workload takes."""

LISTS = ("square", "llama3-8b", "2000-small")
"""Those of which a cast owns a part."""


def chosen(options: argparse.Namespace) -> Iterator[Workload]:
    """The workloads that the options ask for, in the layouts that they ask for."""
    layouts = tuple(options.scale_layouts)
    for key in options.workload:
        workload = NAMES[key](options)
        name = "+".join((workload.name, *(layout for layout in layouts if layout != "compact")))
        yield dataclasses.replace(workload, name=name, scale_layouts=layouts)


class Tensors:
    """The tensors of a workload: weights with random codes, and masters that are views of one flat buffer of
    normal values, one piece after the other, at whatever alignment that gives.
    """

    def __init__(self, workload: Workload, device: torch.device):
        begin = time.perf_counter()
        print(
            f"building {workload.part_name}: weights {len(workload.pieces):,}, elements "
            f"{workload.elements:,}, owned {workload.owned:,} ... ",
            end="",
            flush=True,
        )
        torch.manual_seed(0)
        self.workload = workload
        options = {"device": device, "scale_layouts": workload.scale_layouts}
        self.weights = [zerofp4.empty(shape, **options) for shape, _ in workload.pieces]
        for weight in self.weights:
            weight.rowwise_data.random_()
        self.flat = torch.randn(workload.owned, device=device)
        parts = iter(self.flat.split([shard.numel for _, shard in workload.pieces if shard.numel]))
        self.masters = [next(parts) if shard.numel else None for _, shard in workload.pieces]
        self.starts = [shard.start if shard.numel else None for _, shard in workload.pieces]
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(f"{time.perf_counter() - begin:.1f} s", flush=True)

    def plan(self) -> zerofp4.CastPlan:
        """A plan for a world of one. Elements that nobody owns keep their codes."""
        return zerofp4.CastPlan(self.weights, self.masters, self.starts)
