"""Where codes begin to leave while others are made."""

from __future__ import annotations

import pytest

import zerofp4
from zerofp4.engine import flat


@pytest.mark.parametrize(
    ("rank", "shared", "expected"),
    [(0, True, (2, 20480)), (1, True, None), (0, False, None)],
    ids=["near the middle", "one weight", "no shared memory"],
)
def test_halfway(monkeypatch, rank, shared, expected):
    """Rank 0 owns three weights, the last in part, and rank 1 the rest of that one."""
    monkeypatch.setattr(flat, "rank_and_size", lambda group: (rank, 2))
    weights = [zerofp4.empty(shape) for shape in ((64, 128), (128, 256), (512, 256))]
    buffer = flat.PackedBuffer(range(3), weights, None)
    assert buffer.slice_numel == 86016
    buffer.peers = object() if shared else None
    assert buffer.halfway == expected
