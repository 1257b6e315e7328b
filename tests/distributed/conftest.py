"""Gives all tests of one world size, from every module here, the same ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from distributed.processes import why_not
from distributed.run import Check, Launch, Outcome, Setting


def _setting(item: pytest.Item) -> Setting | None:
    """The setting of a test made by on_ranks; None for any other."""
    if not hasattr(getattr(item, "function", None), "on_each_rank"):
        return None
    return item.callspec.params["setting"]


def _check(item: pytest.Function) -> Check:
    arguments = {name: value for name, value in item.callspec.params.items() if name != "setting"}
    body = item.function.on_each_rank
    return Check(item.nodeid, f"{body.__module__}:{body.__name__}", arguments, item.function.time_limit)


def _is_skipped(item: pytest.Item) -> bool:
    """By a mark: nobody will ask for what the ranks made of it."""
    marks = item.iter_markers()
    return any(mark.name == "skip" or (mark.name == "skipif" and any(mark.args)) for mark in marks)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests of one setting side by side, after all others: their ranks then live while they run."""
    items.sort(key=lambda item: str(_setting(item) or ""))


@pytest.fixture(scope="session")
def launches(request) -> Iterator[Callable[[Setting], Launch]]:
    found: dict[Setting, Launch] = {}

    def launch_for(setting: Setting) -> Launch:
        for other, launch in found.items():
            if other != setting:
                launch.stop()
        if setting not in found:
            items = [item for item in request.session.items if _setting(item) == setting]
            checks = [_check(item) for item in items if not _is_skipped(item)]
            found[setting] = Launch(setting, checks)
        return found[setting]

    yield launch_for
    for launch in found.values():
        launch.stop()


@pytest.fixture
def run_on_ranks(request, launches) -> Callable[[], Outcome]:
    """What a test made by on_ranks calls."""
    setting = _setting(request.node)
    if (reason := why_not(setting.launcher)) is not None:
        pytest.skip(reason)
    return lambda: launches(setting).outcome(request.node.nodeid)
