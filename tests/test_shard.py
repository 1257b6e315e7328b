"""Where shards lie."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from zerofp4.shard import (
    Shard,
    cut,
    cut_blocks,
    equal_slices,
    find_gap,
    find_overlap,
    intersect,
    owned_blocks,
    rectangles,
    whole_slices,
)


@given(st.integers(1, 5), st.integers(1, 25).map(lambda half: 2 * half), st.data())
def test_blocks_of_a_shard_are_those_of_its_elements(rows, cols, data):
    """Of elements that are numbered with their blocks, one by one."""
    numbers, members = [], {}
    for row in range(rows):
        for col in range(cols):
            numbers.append(row * math.ceil(cols / 16) + col // 16)
            members.setdefault(numbers[-1], []).append(len(numbers) - 1)
    start, end = sorted(data.draw(st.lists(st.integers(0, rows * cols), min_size=2, max_size=2)))
    shard = Shard(start, end - start)
    first, last = owned_blocks(shard, cols)
    assert list(range(first, last)) == [b for b, elements in members.items() if start <= elements[0] < end]
    partly = [b for b, e in members.items() if 0 < sum(start <= i < end for i in e) < len(e)]
    found = cut_blocks(shard, cols)
    assert sorted({b for b in found if b is not None}) == partly
    assert found[0] in (None, numbers[start] if shard.numel else None)
    assert found[1] in (None, numbers[end - 1] if shard.numel else None)


def test_overlap_and_gap():
    assert find_overlap([Shard(0, 5), Shard(0, 0), Shard(5, 3)]) is None
    assert find_overlap([Shard(4, 4), Shard(0, 5)]) == (1, 0, 4, 5)
    assert find_overlap([Shard(0, 10), Shard(2, 2), Shard(6, 2)]) == (0, 1, 2, 4)  # behind a longer one
    assert find_gap([Shard(0, 5), Shard(5, 3)], 8) is None
    assert find_gap([Shard(0, 5), Shard(6, 2)], 8) == (5, 6)
    assert find_gap([Shard(0, 0)], 8) == (0, 8)
    assert find_gap([Shard(0, 6)], 8) == (6, 8)


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.sampled_from([1, 16, 36, 50])), max_size=8),
    st.integers(1, 5),
    st.sampled_from([1, 2, 32]),
)
def test_equal_slices_cover_every_piece_exactly_once(pieces, world_size, alignment):
    sizes, units = [size for size, _ in pieces], [unit for _, unit in pieces]
    offsets, slice_length = equal_slices(sizes, world_size, alignment, units)
    assert slice_length % alignment == 0 and slice_length > 0
    end = 0
    for offset, size, unit in zip(offsets, sizes, units, strict=True):
        assert offset % alignment == 0 and offset >= end
        end = offset + size
        parts = [intersect(offset, size, r * slice_length, (r + 1) * slice_length) for r in range(world_size)]
        assert sum(part.numel for part in parts) == size
        assert find_overlap(parts) is None and find_gap(parts, size) is None
        assert all(part.start % unit == 0 for part in parts)
    assert end <= world_size * slice_length


@given(st.lists(st.integers(0, 1000), max_size=8), st.integers(1, 5), st.sampled_from([1, 2, 32]))
def test_equal_slices_leave_nothing_free_between_pieces_that_are_cut_anywhere(sizes, world_size, alignment):
    offsets, slice_length = equal_slices(sizes, world_size, alignment)
    rounded = [math.ceil(size / alignment) * alignment for size in sizes]
    assert offsets == [sum(rounded[:i]) for i in range(len(sizes))]
    assert slice_length == math.ceil(max(math.ceil(sum(rounded) / world_size), 1) / alignment) * alignment


def test_what_cuts_between_rows_of_tiles_leave_free():
    """Of the weights of a layer of Llama-3-8B: less in a slice than what both kinds of rows divide."""
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
    shapes += [(14336, 4096), (14336, 4096), (4096, 14336)]
    sizes, units = [rows * cols for rows, cols in shapes], [16 * cols for _, cols in shapes]
    for world_size in (2, 3, 8, 64):
        _, slice_length = equal_slices(sizes, world_size, 256, units)
        free = slice_length - sum(sizes) // world_size
        assert free < math.lcm(16 * 4096, 16 * 14336), world_size


@given(st.data())
def test_whole_slices_cut_nothing(data):
    world_size, alignment = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 2, 32]))
    sizes = data.draw(st.lists(st.integers(0, 1000), max_size=8))
    owners = sorted(
        data.draw(st.lists(st.integers(0, world_size - 1), min_size=len(sizes), max_size=len(sizes)))
    )
    offsets, slice_length = whole_slices(sizes, owners, world_size, alignment)
    assert slice_length % alignment == 0 and slice_length > 0
    end, filled = 0, [0] * world_size
    for offset, size, owner in zip(offsets, sizes, owners, strict=True):
        assert offset % alignment == 0 and offset >= end
        end = offset + size
        assert (
            size == 0
            or intersect(offset, size, owner * slice_length, (owner + 1) * slice_length).numel == size
        )
        filled[owner] = end - owner * slice_length
    assert slice_length < max([*filled, 1]) + alignment


def test_rectangles_cover_a_range_once_and_in_order():
    for shape in [(), (7,), (0, 3), (3, 5), (3, 4, 5), (1, 1, 6), (2, 3, 2, 4)]:
        numel = math.prod(shape)
        index = torch.arange(numel).view(shape)
        for start in range(numel + 1):
            for end in range(start, numel + 1):
                boxes = list(rectangles(shape, Shard(start, end - start)))
                assert len(boxes) <= max(1, 2 * len(shape) - 1)
                covered = []
                for box in boxes:
                    part = index[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
                    covered += part.reshape(-1).tolist()
                    assert part.reshape(-1)[0] == box.start and part.numel() == box.numel
                assert covered == list(range(start, end))


@given(st.data())
def test_a_box_is_cut_in_order_where_those_of_other_shards_are(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    numel, most = math.prod(shape), data.draw(st.integers(1, 30))
    start = data.draw(st.integers(0, numel))
    shard = Shard(start, data.draw(st.integers(0, numel - start)))
    index = torch.arange(numel).view(shape)
    parts = [part for box in rectangles(shape, shard) for part in cut(box, most)]
    covered = []
    for offsets, sizes, first in parts:
        elements = index[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].reshape(-1)
        assert 0 < len(elements) <= most and elements[0] == first
        covered += elements.tolist()
    assert covered == list(range(shard.start, shard.end))
    whole = {part.start for box in rectangles(shape, Shard(0, numel)) for part in cut(box, most)}
    ends = {box.start for box in rectangles(shape, shard)}
    assert whole & set(covered) <= {part.start for part in parts} <= whole | ends
