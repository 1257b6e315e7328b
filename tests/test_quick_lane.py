"""--quick: every rule has a representative."""

from __future__ import annotations

from types import SimpleNamespace

from distributed.run import Setting
from quick_lane import representatives


def item(nodeid: str, *marks: str, **params) -> SimpleNamespace:
    made = SimpleNamespace(nodeid=nodeid, iter_markers=lambda: [SimpleNamespace(name=mark) for mark in marks])
    if params:
        made.callspec = SimpleNamespace(params=params)
    return made


def chosen(*items: SimpleNamespace) -> list[str]:
    return sorted(found.nodeid for found in representatives(items))


def test_the_middle_case_on_each_device_stands_for_a_test():
    cases = [
        item(f"a.py::t[{device}-{i}]", device=device, i=i) for device in ("cpu", "cuda") for i in range(5)
    ]
    assert chosen(*cases, item("a.py::u")) == ["a.py::t[cpu-2]", "a.py::t[cuda-2]", "a.py::u"]


def test_what_takes_seconds_and_other_worlds_are_left_out():
    ranks = [item(f"d.py::t[fork-{n}]", world=Setting(n)) for n in (1, 2, 3)]
    marked = [item(f"m.py::{mark}", mark) for mark in ("heavy", "bench", "slow", "skip", "threads")]
    assert chosen(*ranks, *marked) == ["d.py::t[fork-2]", "m.py::threads"]


def test_a_heavy_case_leaves_the_others():
    cases = [item("a.py::t[0]", i=0), item("a.py::t[1]", "heavy", i=1), item("a.py::t[2]", "heavy", i=2)]
    assert chosen(*cases) == ["a.py::t[0]"]
