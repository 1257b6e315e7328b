"""What all tests share: the devices they run on, real or not, and how hypothesis draws."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers import why_no_cuda
from hypothesis import settings

# The same examples on every machine and in every run: a failure in CI is a failure at one's desk.
settings.register_profile("zerofp4", deadline=None, derandomize=True, max_examples=50, database=None)
settings.load_profile("zerofp4")


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def device(request) -> torch.device:
    """The device under test: every test that takes it runs on the CPU and, where there is one, on the GPU."""
    if request.param == "cuda" and (reason := why_no_cuda()) is not None:
        pytest.skip(reason)
    return torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture
def two_gpus(monkeypatch) -> None:
    """torch seems to see two GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
