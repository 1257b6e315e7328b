"""What all tests share: the devices they run on, real or not, and how hypothesis draws."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chosen_cases import representatives, shared, thinned
from early import Early, Work, asked_for
from helpers import why_no_cuda
from hypothesis import settings

# The same examples on every machine and in every run: a failure in CI is a failure at one's desk.
settings.register_profile("zerofp4", deadline=None, derandomize=True, max_examples=50, database=None)
settings.register_profile("quick", settings.get_profile("zerofp4"), max_examples=3)
# --hypothesis-profile=night: other examples in every run, for hours; a failure prints how to run it again.
settings.register_profile(
    "night", settings.get_profile("zerofp4"), derandomize=False, max_examples=10_000, print_blob=True
)
settings.load_profile("zerofp4")

BENCH = Path(__file__).with_name("bench")
EARLY = pytest.StashKey[Early]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="of each test the middle one of its cases, per device; nothing heavy, no benchmarks, 2 ranks",
    )
    parser.addoption(
        "--nightly",
        action="store_true",
        help="every combination of options in place of every pair, and what is marked nightly",
    )
    parser.addoption(
        "--part",
        metavar="K/N",
        type=lambda text: tuple(map(int, text.split("/"))),
        default=(1, 1),
        help="of N processes that share the tests the K-th, from 1",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Most tensors here are so small that more threads only wake and await each other; where other processes
    # want the cores too, that took nine tenths of the time.
    torch.set_num_threads(1)
    if config.option.quick:
        settings.load_profile("quick")


@pytest.hookimpl(trylast=True)  # -k and paths select among all cases
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == BENCH:
            item.add_marker("bench")
    if config.option.nightly:
        chosen = set(items)
    elif config.option.quick:
        chosen = set(representatives(items))
    else:
        chosen = set(thinned([item for item in items if item.get_closest_marker("nightly") is None]))
    k, n = config.option.part
    chosen = shared(chosen, n)[k - 1]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]
    # What waits for other processes comes last: meanwhile these do their work.
    items.sort(key=lambda item: bool(asked_for(item)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    early = session.config.stash[EARLY] = Early(sharing=session.config.option.part[1])
    if not session.config.option.collectonly:
        # Last tests first: what is asked for soonest would have to be waited for anyway, and the ranks that
        # work the longest are those of the last tests.
        for item in reversed(session.items):
            for work in asked_for(item):
                early.begin(work)
    # What lives now, half a million objects, lives to the end: each gc.collect(), of which tests make many
    # and python -m benchmarks one a file, would take half a second to look through it.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Others end meanwhile what has begun."""
    early = session.config.stash.get(EARLY, None)
    if early is not None:
        early.cancel()
    yield
    if early is not None:
        early.end()


@pytest.fixture
def early(request) -> Callable[[Work], Any]:
    """The result of work that this test's mark `early` has."""
    return request.config.stash[EARLY].result


@pytest.fixture(autouse=True)
def threads(request) -> Iterator[None]:
    """One thread, or three for a test marked `threads`."""
    torch.set_num_threads(1 if request.node.get_closest_marker("threads") is None else 3)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def device(request) -> torch.device:
    """The device under test: every test that takes it runs on the CPU and, where there is one, on the GPU."""
    if request.param == "cuda" and (reason := why_no_cuda()) is not None:
        pytest.skip(reason)
    return torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile has compiled nothing before a test, and keeps nothing of it."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def two_gpus(monkeypatch) -> None:
    """torch seems to see two GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
