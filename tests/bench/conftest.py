"""Copies of gigabytes say how fast a device is, which no test here asks."""

import pytest

from benchmarks import session
from benchmarks.session import Clock


@pytest.fixture(autouse=True)
def quick_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy ceiling is 10 GB/s, and caches are soon cold."""
    monkeypatch.setattr(session, "CPU_FLUSH_BYTES", 1 << 20)
    monkeypatch.setattr(Clock, "copy_gbps", lambda self: 10.0)
