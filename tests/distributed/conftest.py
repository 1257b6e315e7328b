"""Gives all tests of one world size, from every module here, the same ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distributed.processes import device_for, why_not
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


class Launches:
    """The launch of each setting, one at a time."""

    def __init__(self, items: list[pytest.Item]):
        self._items = items
        self._found: dict[Setting, Launch] = {}

    def launch_for(self, setting: Setting) -> Launch:
        for other, launch in self._found.items():
            if other != setting:
                launch.stop()
        if setting not in self._found:
            items = [item for item in self._items if _setting(item) == setting]
            checks = [_check(item) for item in items if not _is_skipped(item)]
            self._found[setting] = Launch(setting, checks)
        return self._found[setting]

    def stop(self) -> None:
        for launch in self._found.values():
            launch.stop()


_LAUNCHES = pytest.StashKey[Launches]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """The first ranks start before the other tests, which leave a core idle; not on GPUs, which all share."""
    launches = session.config.stash[_LAUNCHES] = Launches(session.items)
    settings = [setting for setting in map(_setting, session.items) if setting is not None]
    if not settings or session.config.option.collectonly:
        return
    first = settings[0]
    if why_not(first.launcher) is None and device_for(first.world_size) == "cpu":
        launches.launch_for(first).start()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _LAUNCHES in session.config.stash:
        session.config.stash[_LAUNCHES].stop()


@pytest.fixture
def run_on_ranks(request) -> Callable[[], Outcome]:
    """What a test made by on_ranks calls."""
    setting = _setting(request.node)
    if (reason := why_not(setting.launcher)) is not None:
        pytest.skip(reason)
    return lambda: request.config.stash[_LAUNCHES].launch_for(setting).outcome(request.node.nodeid)
