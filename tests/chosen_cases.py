"""Which cases of the tests run, and in which of several processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations_with_replacement, groupby
from zlib import crc32

import pytest
from distributed.run import Setting

FEW = 4  # cases of a test on one device: up to so many, all run
LEFT_OUT = {"heavy", "nightly", "bench", "slow", "skip"}  # marks
RANKS = Setting(2)  # the only setting of tests on ranks, so that they share one launch


def _parameters(item: pytest.Item) -> dict:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _rule(item: pytest.Item) -> tuple[str, str]:
    """A test function on a device."""
    return item.nodeid.partition("[")[0], str(_parameters(item).get("device"))


# --quick: one case of each test


def representatives(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """The middle case of each test function on each device: the first is often the smallest, an edge.

    Left out are only rules of which one case takes seconds, and the benchmarks' tooling.
    """
    for _, cases in groupby(sorted(filter(_is_quick, items), key=_rule), key=_rule):
        found = list(cases)
        yield found[len(found) // 2]


def _is_quick(item: pytest.Item) -> bool:
    world = _parameters(item).get("world")
    marks = {mark.name for mark in item.iter_markers()}
    return not marks & LEFT_OUT and (world == RANKS or not isinstance(world, Setting))


# Otherwise: cases in which every two options meet


def thinned(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of each test with more than a few cases on a device, cases that together have all pairs of values.

    Options that meet in three or more are a test of their own. `scripts/test.sh --nightly` runs all cases.
    """
    rules: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        rules.setdefault(_rule(item), []).append(item)
    run = {case for cases in rules.values() for case in (cases if len(cases) <= FEW else _covering(cases))}
    return [item for item in items if item in run]


def _covering(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Greedily: always the case with most pairs that no chosen one has; the first of equals."""
    # Cases share the objects that were given.
    values = [sorted((name, id(value)) for name, value in _parameters(case).items()) for case in cases]
    pairs = [set(combinations_with_replacement(each, 2)) for each in values]
    missing, chosen = set().union(*pairs), set()
    while missing:
        best = max(range(len(cases)), key=lambda i: len(pairs[i] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [cases[i] for i in sorted(chosen)]


# --part


def shared(items: Iterable[pytest.Item], n: int) -> list[set[pytest.Item]]:
    """The items of each of n processes: whole files in turn, and tests on ranks by their world size.

    On a machine of four GPUs ranks take up to half a minute to start: so a process has few world sizes. Long
    tests of one file go to different processes.
    """
    shares: list[set[pytest.Item]] = [set() for _ in range(n)]
    worlds = {item: world for item in items if isinstance(world := _parameters(item).get("world"), Setting)}
    others = [item for item in items if item not in worlds]
    files = {path: i for i, path in enumerate(sorted({item.path for item in others}))}
    for item in others:
        shares[files[item.path] % n].add(item)
    total, before = sum(world.world_size for world in worlds.values()), 0
    for item in sorted(worlds, key=lambda item: (str(worlds[item]), crc32(item.nodeid.encode()))):
        shares[before * n // total].add(item)
        before += worlds[item].world_size
    return shares
