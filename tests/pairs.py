"""Which cases of a test run: those in which every two of its options still meet."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest

FEW = 4  # cases of a test on one device: up to so many, all run


def thinned(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of each test with more than a few cases on a device, cases that together have all pairs of values.

    Options that meet in three or more are a test of their own. `scripts/test.sh --nightly` runs all cases.
    """
    rules: dict[object, list[pytest.Item]] = {}
    for item in items:
        rules.setdefault(_rule(item), []).append(item)
    run = {case for cases in rules.values() for case in (cases if len(cases) <= FEW else _covering(cases))}
    return [item for item in items if item in run]


def _rule(item: pytest.Item) -> tuple[str, object]:
    return item.nodeid.partition("[")[0], _values(item).get("device")


def _values(item: pytest.Item) -> dict[str, int]:
    """For each parameter, which value this case has: cases share the objects that were given."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return {name: id(value) for name, value in params.items()}


def _covering(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Greedily: always the case with most pairs that no chosen one has; the first of equals."""
    pairs = [set(combinations_with_replacement(sorted(_values(case).items()), 2)) for case in cases]
    missing, chosen = set().union(*pairs), set()
    while missing:
        best = max(range(len(cases)), key=lambda i: len(pairs[i] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [cases[i] for i in sorted(chosen)]
