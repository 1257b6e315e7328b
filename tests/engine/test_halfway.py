"""Where codes begin to leave while others are made."""

from __future__ import annotations

import pytest

import zerofp4
from zerofp4.engine import flat


@pytest.mark.parametrize(
    ("rank", "shared", "expected"),
    [(0, True, (2, 0, 20480)), (1, True, (2, 336, 20480)), (0, False, None)],
    ids=["between weights", "inside of one", "no shared memory"],
)
def test_halfway(monkeypatch, rank, shared, expected):
    """Rank 0 owns three weights, the last in part, and rank 1 the rest of that one."""
    monkeypatch.setattr(flat, "rank_and_size", lambda group: (rank, 2))
    weights = [zerofp4.empty(shape) for shape in ((64, 128), (128, 256), (512, 256))]
    buffer = flat.PackedBuffer(range(3), weights)
    assert buffer.slice_numel == 86016
    buffer.peers = object() if shared else None
    assert buffer.halfway == expected


@pytest.mark.parametrize(("rank", "expected"), [(0, (0, 16, 512)), (1, (0, 80, 640))])
def test_halfway_of_a_stack(monkeypatch, rank, expected):
    """Rows of tiles are those of each matrix."""
    monkeypatch.setattr(flat, "rank_and_size", lambda group: (rank, 2))
    buffer = flat.PackedBuffer(range(1), [zerofp4.empty((3, 40, 64))])
    buffer.peers = object()
    assert buffer.halfway == expected
