"""How large buckets are, which positions lie in which, and which rank owns which whole matrix."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zerofp4.engine import find_bucket_mb
from zerofp4.engine.assignment import in_buckets, in_whole_slices, longest_first


def grouped(together):
    found = {}
    for i, number in enumerate(together):
        found.setdefault(number, []).append(i)
    return list(found.values())


@pytest.mark.parametrize(
    ("sizes", "together", "expected"),
    [
        ([], [], []),
        ([3, 3, 3, 3], [0, 1, 2, 3], [[0, 1, 2], [3]]),
        ([25, 1], [0, 1], [[0], [1]]),  # larger than a bucket, alone
        ([4, 4, 4, 4], [5, 1, 2, 5], [[0, 3], [1, 2]]),  # what is together comes where its first one is
        ([6, 6, 6, 1], [0, 0, 0, 1], [[0, 1, 2], [3]]),  # and is never parted
    ],
)
def test_buckets_of_at_most_ten(sizes, together, expected):
    assert in_buckets(grouped(together), sizes, 10) == expected


def test_the_first_bucket_is_done_last():
    """And is small, unless there is nothing before it."""
    buckets = functools.partial(in_buckets, first_last=True)
    expected = [[0], [1], [2], [3, 4, 5], list(range(6, 12)), list(range(12, 20))]
    assert buckets(grouped(range(20)), [1] * 20, 8) == expected
    assert buckets(grouped(range(8)), [1] * 8, 8) == [list(range(8))]
    assert buckets(grouped([0, 1, 2, 1, 3]), [1, 1, 6, 1, 6], 8) == [[0], [1, 3], [2], [4]]


@pytest.mark.parametrize(
    ("works", "world_size", "owners"),
    [
        ([], 2, []),
        ([5, 5, 5], 2, [0, 1, 0]),  # ties by index
        ([1, 9, 4, 4], 2, [1, 0, 1, 1]),
        ([3, 3, 2, 2, 2], 2, [0, 1, 0, 1, 0]),
    ],
)
def test_the_longest_goes_first_to_who_has_least(works, world_size, owners):
    assert longest_first(works, world_size) == owners


@given(st.data())
def test_buckets_have_every_position_once_and_no_rank_has_too_much(data):
    count, world_size, room = (data.draw(st.integers(*ends)) for ends in ((0, 12), (1, 4), (1, 40)))
    sizes, owners, together = (
        data.draw(st.lists(st.integers(0, most), min_size=count, max_size=count))
        for most in (50, world_size - 1, 6)
    )
    buckets = in_whole_slices(grouped(together), sizes, owners, room)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(count))
    for bucket in buckets:
        assert [owners[i] for i in bucket] == sorted(owners[i] for i in bucket)
        numbers = {together[i] for i in bucket}
        assert {i for i in range(count) if together[i] in numbers} == set(bucket)
        needed = [
            max(sum(sizes[i] for i in bucket if (owners[i], together[i]) == (rank, n)) for n in numbers)
            for rank in range(world_size)
        ]
        for rank in range(world_size):
            assert sum(sizes[i] for i in bucket if owners[i] == rank) <= max(room, *needed, 0)


@pytest.mark.parametrize(
    ("gigabytes", "wire", "expected"),
    [(0.5, None, 256), (7, None, 512), (13.02, None, 952.32), (140, None, 1024), (7, torch.float32, 1024)],
)
def test_the_size_of_buckets_follows_the_model_and_the_wire(gigabytes, wire, expected):
    half = nn.Parameter(torch.empty(int(gigabytes * 2**28), dtype=torch.bfloat16, device="meta"))
    assert find_bucket_mb([half, half], wire) == pytest.approx(expected)
