"""Where a shard lies: the flat range [start, start + numel) of a weight that one rank owns."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zerofp4.format import BLOCK, STATE_GROUP
from zerofp4.layout import ceil_div, round_up


class Shard(NamedTuple):
    """Flat elements [start, start + numel) of a weight; numel 0 when the rank owns nothing of it."""

    start: int
    numel: int

    @property
    def end(self) -> int:
        return self.start + self.numel


def byte_range(shard: Shard) -> tuple[int, int]:
    """[first, last) bytes of the packed weight that hold the shard's codes, at odd ends a neighbor's too."""
    return shard.start // 2, (shard.end + 1) // 2 if shard.numel else shard.start // 2


def row_block(element: int, cols: int) -> tuple[int, bool]:
    """The 1x16 block of a flat element of [M, cols], numbered along the rows, and whether the block begins
    with it. The last block of a row may be shorter; the element past the last one begins a block.
    """
    row, col = divmod(element, cols)
    return row * ceil_div(cols, BLOCK) + col // BLOCK, col % BLOCK == 0


def owned_blocks(shard: Shard, cols: int) -> tuple[int, int]:
    """[first, last) of the 1x16 blocks whose first element the shard has: each block belongs to one shard."""
    first, begins = row_block(shard.start, cols)
    last, ends = row_block(shard.end, cols)
    return first + (not begins), last + (not ends)


def cut_blocks(shard: Shard, cols: int) -> tuple[int | None, int | None]:
    """The 1x16 blocks that the shard cuts at its beginning and end, or None; maybe the same block."""
    if not shard.numel:
        return None, None
    first, begins = row_block(shard.start, cols)
    last, ends = row_block(shard.end, cols)
    last = last - 1 if ends else last
    if first == last and not (begins and ends):
        return first, first
    return None if begins else first, None if ends else last


def state_groups(shard: Shard, cols: int) -> Shard:
    """The groups of compact state, counted row by row of [M, cols], that have elements of the shard."""
    (row, col), (last_row, end) = divmod(shard.start, cols), divmod(shard.end, cols)
    of_row = ceil_div(cols, STATE_GROUP)
    first = row * of_row + col // STATE_GROUP
    last = last_row * of_row + ceil_div(end, STATE_GROUP)
    return Shard(first, last - first if shard.numel else 0)


def state_unit(cols: int) -> int:
    """Elements per cut unit: cuts at multiples of it split no group of compact state. cols: of the tensor."""
    return cols if cols % STATE_GROUP else STATE_GROUP


def check_bounds(what: str, shard: Shard, weight_name: str, weight_numel: int) -> None:
    """Raises ValueError unless the shard lies inside its weight."""
    if shard.start < 0:
        raise ValueError(f"{what}: start_offset must not be negative, got {shard.start}")
    if shard.end > weight_numel:
        raise ValueError(
            f"{what}: start_offset {shard.start} + {shard.numel} elements exceeds weight {weight_name} "
            f"with {weight_numel} elements"
        )


def find_overlap(shards: Sequence[Shard]) -> tuple[int, int, int, int] | None:
    """(rank a, rank b, first, last) of the first elements [first, last) that two ranks both own, or None."""
    owners = sorted((s.start, s.end, rank) for rank, s in enumerate(shards) if s.numel)
    for (_, end, a), (start, other_end, b) in itertools.pairwise(owners):
        if start < end:
            return a, b, start, min(end, other_end)
    return None


def find_gap(shards: Sequence[Shard], numel: int) -> tuple[int, int] | None:
    """The first elements [first, last) of [0, numel) that no rank owns, or None. Shards must not overlap."""
    covered = 0
    for start, end in sorted((s.start, s.end) for s in shards if s.numel):
        if start > covered:
            return covered, start
        covered = end
    return (covered, numel) if covered < numel else None


def equal_slices(
    sizes: Sequence[int], world_size: int, alignment: int, units: Sequence[int] | None = None
) -> tuple[list[int], int]:
    """(offsets of pieces laid one after the other in a flat buffer, length of each rank's equal slice),
    multiples of `alignment`: rank r owns [r * slice, (r + 1) * slice).

    units: by piece, it is cut at multiples of so many of its elements, with padding before it; or None.
    """
    steps = [math.lcm(unit, alignment) for unit in units or (1,) * len(sizes)]
    length = max(ceil_div(sum(round_up(size, alignment) for size in sizes), world_size), 1)
    while True:
        # A piece that is longer than a slice is cut at the same place of several slices.
        longer = [step for size, step in zip(sizes, steps, strict=True) if size > length]
        length = round_up(length, math.lcm(alignment, *longer))
        offsets, end = [], 0
        for size, step in zip(sizes, steps, strict=True):
            room = -end % length  # in the slice where the last piece ends
            if room < size:
                end += room % step
            offsets.append(end)
            end += round_up(size, alignment)
        if end <= world_size * length:
            return offsets, length
        length += ceil_div(end - world_size * length, world_size)


def whole_slices(
    sizes: Sequence[int], owners: Sequence[int], world_size: int, alignment: int
) -> tuple[list[int], int]:
    """As equal_slices(), with each piece whole in the slice of its owner: owners ascend by piece. Slices are
    as long as the longest, padded at their end.
    """
    ends, starts = [0] * world_size, []
    for size, owner in zip(sizes, owners, strict=True):
        starts.append(ends[owner])
        ends[owner] += round_up(size, alignment)
    length = max(*ends, alignment)
    return [owner * length + start for owner, start in zip(owners, starts, strict=True)], length


def intersect(offset: int, size: int, begin: int, end: int) -> Shard:
    """The part of a piece at [offset, offset + size) that lies in [begin, end), relative to the piece."""
    first, last = max(offset, begin), min(offset + size, end)
    return Shard(first - offset, last - first) if first < last else Shard(0, 0)


class Rectangle(NamedTuple):
    """A box inside a tensor whose elements are consecutive in its flat order, from `start` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def rectangles(shape: Sequence[int], shard: Shard) -> Iterator[Rectangle]:
    """The few boxes, 2 n - 1 at most for n dimensions, that a flat range covers in a tensor of this shape:
    the rest of a row, whole rows, the beginning of a row, for each dimension. Nothing of an empty range.
    """
    yield from _boxes(tuple(shape), shard.start, shard.end, (), 0)


def _boxes(
    shape: tuple[int, ...], first: int, last: int, outer: tuple[int, ...], base: int
) -> Iterator[Rectangle]:
    """Of elements [first, last) of the tensor of this shape at `outer`, whose first element is `base`."""
    if first >= last:
        return
    ones = (1,) * len(outer)
    if not shape:
        yield Rectangle(outer, ones, base)
        return
    row = math.prod(shape[1:])
    top, bottom = -(-first // row), last // row  # whole rows
    if top > bottom:  # a range inside one row
        skipped = bottom * row
        yield from _boxes(shape[1:], first - skipped, last - skipped, (*outer, bottom), base + skipped)
        return
    if first < top * row:
        at = top - 1
        yield from _boxes(shape[1:], first - at * row, row, (*outer, at), base + at * row)
    if top < bottom:
        inner = (0,) * (len(shape) - 1)
        yield Rectangle((*outer, top, *inner), (*ones, bottom - top, *shape[1:]), base + top * row)
    if bottom * row < last:
        yield from _boxes(shape[1:], 0, last - bottom * row, (*outer, bottom), base + bottom * row)


def cut(box: Rectangle, most: int) -> Iterator[Rectangle]:
    """Boxes of `most` elements at most that a box of rectangles() consists of, in its order; they end where
    those of any other shard do, but for the shards' ends.
    """
    dim = next((d for d, size in enumerate(box.sizes) if size > 1), None)
    if dim is None:
        yield box
        return
    row = math.prod(box.sizes[dim + 1 :])
    rows, first = max(most // row, 1), box.offsets[dim]
    at, end = first, first + box.sizes[dim]
    while at < end:
        stop = min((at // rows + 1) * rows, end)
        offsets = (*box.offsets[:dim], at, *box.offsets[dim + 1 :])
        sizes = (*box.sizes[:dim], stop - at, *box.sizes[dim + 1 :])
        part = Rectangle(offsets, sizes, box.start + (at - first) * row)
        yield from cut(part, most) if row > most else (part,)
        at = stop
