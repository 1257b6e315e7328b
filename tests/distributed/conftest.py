"""Gives all tests of one world size, from every module here, the same ranks."""

from __future__ import annotations

import pytest
from early import is_skipped, waits_for

from distributed.processes import NotRun, device_for, why_not
from distributed.run import Check, Launch, Setting

_LAUNCHES = pytest.StashKey[dict[Setting, Launch]]()


def _setting(item: pytest.Item) -> Setting | None:
    """The setting of a test made by on_ranks; None for any other."""
    world = item.callspec.params.get("world") if hasattr(item, "callspec") else None
    return world if isinstance(world, Setting) else None


def _started(setting: Setting, config: pytest.Config) -> Setting:
    """Under torchrun in the nightly run: there sets of strings have an order of their own on each rank."""
    is_nightly = config.option.nightly and setting.launcher == "fork"
    return Setting(setting.world_size, "torchrun") if is_nightly else setting


def _check(item: pytest.Function) -> Check:
    arguments = {name: value for name, value in item.callspec.params.items() if name != "world"}
    body = item.function
    return Check(item.nodeid, f"{body.__module__}:{body.__name__}", arguments, body.time_limit)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the tests of one setting side by side, after all others: most of their ranks have then run ahead.
    Those on GPUs do not, which all share.
    """
    items.sort(key=lambda item: (str(_setting(item) or ""), _setting(item) and item.function.new_group))
    launches = config.stash[_LAUNCHES] = {}
    for setting in filter(None, dict.fromkeys(map(_setting, items))):
        own = [item for item in items if _setting(item) == setting and not is_skipped(item)]
        launch = launches[setting] = Launch(_started(setting, config), [_check(item) for item in own])
        if own and why_not(setting.launcher) is None and device_for(setting.world_size) == "cpu":
            own[0].add_marker(waits_for(launch.run_ahead))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """In place of calling a test made by on_ranks here: what its ranks have made of it."""
    setting = _setting(pyfuncitem)
    if setting is None:
        return None
    if (reason := why_not(setting.launcher)) is not None:
        pytest.skip(reason)
    values = pyfuncitem.config.stash[_LAUNCHES][setting].outcome(pyfuncitem.nodeid)
    left_out = [value.reason for value in values if isinstance(value, NotRun)]
    if left_out and len(left_out) == len(values):  # else a rank has waited for others
        pytest.skip(left_out[0])
    assert not left_out, f"some ranks left out what others did: {left_out}"
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    for launch in session.config.stash.get(_LAUNCHES, {}).values():
        launch.stop()
