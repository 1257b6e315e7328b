"""Every test has a case that runs in one process; every two values meet in one, but with --quick."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace

from chosen_cases import FEW, representatives, shared, thinned
from distributed.run import Setting


class Item(SimpleNamespace):
    """What is read of a pytest.Item."""

    __hash__ = object.__hash__


def item(nodeid: str, *marks: str, path: str = "", **params) -> Item:
    made = Item(nodeid=nodeid, path=path, iter_markers=lambda: [SimpleNamespace(name=mark) for mark in marks])
    if params:
        made.callspec = SimpleNamespace(params=params)
    return made


def cases(**values: list) -> list[Item]:
    """One for each combination of the values of each parameter."""
    combined = (dict(zip(values, case, strict=True)) for case in product(*values.values()))
    return [item(f"a.py::t[{i}]", **case) for i, case in enumerate(combined)]


def pairs_in(items: list[Item]) -> set:
    return {pair for item in items for pair in combinations(sorted(item.callspec.params.items()), 2)}


def test_all_pairs_meet_in_fewer_cases_on_each_device():
    every = cases(a=[1, 2, 3], b=["x", "y", "z"], c=[0.5, 1.5, 2.5], device=["cpu", "cuda"])
    run = thinned(every)
    assert pairs_in(run) == pairs_in(every) and len(run) <= len(every) // 2
    assert [item for item in every if item in run] == run


def test_few_cases_and_values_of_one_parameter_all_run():
    few = cases(a=list(range(FEW // 4)), b=[1, 2], c=[1, 2])
    assert thinned(few) == few
    one = [*cases(a=list(range(2 * FEW))), item("a.py::u")]
    assert thinned(one) == one


def chosen(*items: Item) -> list[str]:
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


def test_processes_share_files_and_world_sizes():
    files = [item(f"{name}.py::t[{i}]", path=name) for name in "abc" for i in range(3)]
    ranks = [item(f"d.py::t[{i}-fork-{n}]", path="d", world=Setting(n)) for n in (1, 2, 3) for i in range(6)]
    shares = shared([*ranks, *files], 4)
    assert sum(map(len, shares)) == len(files + ranks) and set().union(*shares) == {*files, *ranks}
    names = [sorted({item.path for item in share}) for share in shares]
    assert names == [["a", "d"], ["b", "d"], ["c", "d"], ["d"]]
    worlds = [{item.nodeid[-2] for item in share if item.path == "d"} for share in shares]
    assert worlds == [{"1", "2"}, {"2"}, {"3"}, {"3"}]
    assert shared(files, 1) == [set(files)]
