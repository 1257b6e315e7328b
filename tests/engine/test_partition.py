"""Which positions lie in which bucket."""

from __future__ import annotations

import pytest

from zerofp4.engine.partition import in_buckets


@pytest.mark.parametrize(
    ("sizes", "together", "expected"),
    [
        ([], [], []),
        ([3, 3, 3, 3], [0, 1, 2, 3], [[0, 1, 2], [3]]),
        ([9, 2, 9], [0, 1, 2], [[0], [1], [2]]),
        ([25, 1], [0, 1], [[0], [1]]),  # larger than a bucket, alone
        ([4, 5, 1, 1], [0, 1, 2, 3], [[0, 1, 2], [3]]),
        ([4, 4, 4, 4], [5, 1, 2, 5], [[0, 3], [1, 2]]),  # what is together comes where its first one is
        ([6, 6, 6, 1], [0, 0, 0, 1], [[0, 1, 2], [3]]),  # and is never parted
        ([0, 0], [0, 1], [[0, 1]]),
    ],
)
def test_buckets_of_at_most_ten(sizes, together, expected):
    assert in_buckets(sizes, together, 10) == expected


@pytest.mark.parametrize(
    ("sizes", "together", "expected"),
    [
        ([1] * 16, range(16), [[0], [1], [2, 3], [4, 5, 6, 7], list(range(8, 16))]),
        ([1] * 20, range(20), [[0], [1], [2], [3, 4, 5], list(range(6, 12)), list(range(12, 20))]),
        ([1] * 9, range(9), [[0], [1], [2], [3, 4], [5, 6, 7, 8]]),
        ([1] * 8, range(8), [list(range(8))]),  # one bucket has nothing before it
        ([3, 3, 3], range(3), [[0], [1], [2]]),  # what is larger, alone
        ([1, 1, 6, 1, 6], [0, 1, 2, 1, 3], [[0], [1, 3], [2], [4]]),
    ],
)
def test_buckets_of_at_most_eight_of_which_the_first_is_done_last(sizes, together, expected):
    assert in_buckets(sizes, list(together), 8, first_last=True) == expected
