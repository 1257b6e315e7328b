"""Gives all tests of one world size, from every module here, the same ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from early import is_skipped, waits_for

from distributed.processes import NotRun, device_for, why_not
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


_LAUNCHES = pytest.StashKey[dict[Setting, Launch]]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the tests of one setting side by side, after all others: most of their ranks have then run ahead.
    Those on GPUs do not, which all share.
    """
    items.sort(key=lambda item: str(_setting(item) or ""))
    launches = config.stash[_LAUNCHES] = {}
    for setting in filter(None, dict.fromkeys(map(_setting, items))):
        own = [item for item in items if _setting(item) == setting and not is_skipped(item)]
        launch = launches[setting] = Launch(setting, [_check(item) for item in own])
        if own and why_not(setting.launcher) is None and device_for(setting.world_size) == "cpu":
            own[0].add_marker(waits_for(launch.run_ahead))


def pytest_sessionfinish(session: pytest.Session) -> None:
    for launch in session.config.stash.get(_LAUNCHES, {}).values():
        launch.stop()


@pytest.fixture
def run_on_ranks(request) -> Callable[[], Outcome]:
    """What a test made by on_ranks calls."""
    setting = _setting(request.node)
    if (reason := why_not(setting.launcher)) is not None:
        pytest.skip(reason)

    def run() -> Outcome:
        outcome = request.config.stash[_LAUNCHES][setting].outcome(request.node.nodeid)
        left_out = [value.reason for value in outcome.values if isinstance(value, NotRun)]
        if left_out and len(left_out) == len(outcome.values):  # else a rank has waited for others
            pytest.skip(left_out[0])
        assert not left_out, f"some ranks left out what others did: {left_out}"
        return outcome

    return run
