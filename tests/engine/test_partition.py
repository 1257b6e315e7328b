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
