"""Which tests --quick runs: a test function is a rule, and one of its cases stands for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

import pytest
from distributed.run import Setting

LEFT_OUT = {"heavy", "nightly", "bench", "slow", "skip"}  # marks
RANKS = Setting(2)  # the only setting of tests on ranks, so that they share one launch


def representatives(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """The middle case of each test function on each device: the first is often the smallest, an edge.

    Left out are only rules of which one case takes seconds, and the benchmarks' tooling.
    """
    for _, cases in groupby(sorted(filter(_is_quick, items), key=_rule), key=_rule):
        found = list(cases)
        yield found[len(found) // 2]


def _parameters(item: pytest.Item) -> dict:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _rule(item: pytest.Item) -> tuple[str, str]:
    return item.nodeid.partition("[")[0], str(_parameters(item).get("device"))


def _is_quick(item: pytest.Item) -> bool:
    world = _parameters(item).get("world")
    marks = {mark.name for mark in item.iter_markers()}
    return not marks & LEFT_OUT and (world == RANKS or not isinstance(world, Setting))
