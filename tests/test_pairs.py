"""Every two values of a test's parameters meet in a case that runs."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace

from pairs import FEW, thinned


class Item:
    """What pairs.py reads of a pytest.Item."""

    def __init__(self, nodeid: str, **params):
        self.nodeid = nodeid
        if params:
            self.callspec = SimpleNamespace(params=params)


def cases(**values: list) -> list[Item]:
    """One for each combination of the values of each parameter."""
    combined = (dict(zip(values, case, strict=True)) for case in product(*values.values()))
    return [Item(f"a.py::t[{i}]", **case) for i, case in enumerate(combined)]


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
    one = [*cases(a=list(range(2 * FEW))), Item("a.py::u")]
    assert thinned(one) == one
