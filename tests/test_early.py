"""What runs beside the tests: once, in a folder of its own, in their order or when it is asked for."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from early import Early, asked_for, waits_for


@pytest.fixture
def one_core(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    early = Early()
    yield early
    early.end()


def test_each_work_runs_once_in_its_folder(one_core):
    def first(folder):
        (folder / "file").write_text("x")
        return folder

    def second(folder):
        return [path.name for path in folder.iterdir()]

    for work in (first, second, first):
        one_core.begin(work)
    assert one_core.result(first) is one_core.result(first)
    assert one_core.result(second) == [] and (one_core.result(first) / "file").exists()


def test_what_is_asked_for_does_not_wait_for_its_turn(one_core):
    go_on = threading.Event()
    one_core.begin(long := lambda _: go_on.wait(60))
    one_core.begin(short := lambda _: threading.current_thread())
    assert one_core.result(short) is threading.main_thread()
    go_on.set()
    assert one_core.result(long)


def test_an_error_is_raised_in_every_test(one_core):
    def fails(folder):
        raise ValueError("bad")

    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            one_core.result(fails)


def test_skipped_tests_ask_for_nothing():
    def item(*marks):
        return SimpleNamespace(iter_markers=lambda name=None: (m for m in marks if name in (None, m.name)))

    work = waits_for(print).mark
    assert asked_for(item(work, waits_for(len, repr).mark)) == [print, len, repr]
    assert asked_for(item(work, pytest.mark.skipif(False, reason="").mark)) == [print]
    assert asked_for(item(work, pytest.mark.skipif(True, reason="").mark)) == []
