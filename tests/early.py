"""Work in other processes that tests wait for: it begins with the session, beside the tests before them.

    def compiled(folder):
        return subprocess.run(...)

    @waits_for(compiled)
    def test_it_compiles(early):
        assert early(compiled).returncode == 0

Starting Python, torch and ranks takes most of the time of such work, on one core or two; the tests of this
process use one. Several tests may wait for the same work.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

Work = Callable[[Path], Any]


def waits_for(*works: Work) -> pytest.MarkDecorator:
    """The mark: called by itself with one function, pytest would take that for the test."""
    return pytest.mark.early.with_args(*works)


def asked_for(item: pytest.Item) -> list[Work]:
    """What a test that will run waits for."""
    return [] if is_skipped(item) else [work for mark in item.iter_markers("early") for work in mark.args]


def is_skipped(item: pytest.Item) -> bool:
    """By a mark."""
    marks = item.iter_markers()
    return any(mark.name == "skip" or (mark.name == "skipif" and any(mark.args)) for mark in marks)


class Early:
    """Works one after another, on half of the cores; one that is asked for before its turn has it now.

    sharing: how many processes share these cores.
    """

    def __init__(self, sharing: int = 1):
        self._folder = TemporaryDirectory(prefix="zerofp4-early-")
        self._pool = ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2 // sharing))
        self._folders: dict[Work, Path] = {}
        self._futures: dict[Work, Future] = {}

    def begin(self, work: Work) -> None:
        if work not in self._futures:
            folder = self._folders[work] = Path(self._folder.name, str(len(self._folders)))
            folder.mkdir()
            self._futures[work] = self._pool.submit(work, folder)

    def result(self, work: Work) -> Any:
        """What work(folder of its own) returned; raises what it raised."""
        self.begin(work)
        if self._futures[work].cancel():
            self._futures[work] = own = Future()
            try:
                own.set_result(work(self._folders[work]))
            except Exception as error:
                own.set_exception(error)
        return self._futures[work].result()

    def cancel(self) -> None:
        """Nothing begins any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def end(self) -> None:
        """The same, and what has begun is awaited."""
        self._pool.shutdown(cancel_futures=True)
        self._folder.cleanup()
