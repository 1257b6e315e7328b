"""From FP32 masters to the weights of every rank, bucket by bucket."""

from collections.abc import Callable, Sequence

import torch

from zerofp4.cast import CastPlan
from zerofp4.distributed import CollectiveError, Pending
from zerofp4.engine.flat import FlatBuffer
from zerofp4.engine.pipeline import Stage, run_in_turns


class Publication:
    """One publication of the weights in flat buffers. Collective; nothing waits for a GPU.

    plans: by buffer, what casts it; None for one that is rounded. prepare: what is to be done with each
    buffer first, such as the update of its masters; where a plan has no amaxes by then, it takes them.

    An error of a bucket's plan is raised at the end: this rank's part in what the others do must go on, or
    they would wait for it. No rank has changed an NVFP4 weight of a bucket that a rank could not take part
    in. What prepare raises, and a gather that cannot begin, is raised at once, and the others wait for the
    group's timeout.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        plans: Sequence[CastPlan | None],
        prepare: Callable[[int], None] | None,
    ):
        self._buffers, self._plans, self._prepare = buffers, plans, prepare
        self._gathers: list[Pending | None] = [None] * len(buffers)
        self._failed: set[int] = set()
        self._errors: list[Exception] = []

    def run(self) -> None:
        stages = [
            Stage(self._leave_amaxes),
            Stage(self._cast, self._start_cast),
            Stage(self._complete, self._start_gather),
        ]
        try:
            run_in_turns(len(self._buffers), stages)
        except CollectiveError as error:
            if not self._errors:
                raise
            # What went wrong here came first, and may be why the others have gone.
            raise self._errors[0] from error
        # As after any update in place, a backward pass through the old values must fail. Plans have said so
        # of their weights.
        rounded = [b for b, plan in zip(self._buffers, self._plans, strict=True) if plan is None]
        torch.autograd.graph.increment_version([p for buffer in rounded for p in buffer.parameters])
        if self._errors:
            raise self._errors[0]

    def _leave_amaxes(self, b: int) -> None:
        if self._prepare is not None:
            self._prepare(b)
        if self._plans[b] is not None and len(self._buffers) > 1:
            # Now, so that they are reduced while the next bucket is worked on.
            self._plans[b].leave_amaxes()

    def _start_cast(self, b: int) -> None:
        if self._plans[b] is not None:
            late = self._attempt(b, self._plans[b].start_step)
            if late is not None:
                self._errors.append(late)

    def _cast(self, b: int) -> None:
        if b not in self._failed:
            cast = self._buffers[b].cast if self._plans[b] is None else self._plans[b].finish_step
            self._attempt(b, cast)

    def _start_gather(self, b: int) -> None:
        self._gathers[b] = self._buffers[b].start_gather()

    def _complete(self, b: int) -> None:
        if self._gathers[b] is not None:
            self._gathers[b].wait()
        if self._plans[b] is not None and b not in self._failed:
            self._attempt(b, self._plans[b].post)

    def _attempt(self, b: int, work: Callable[[], RuntimeError | None]) -> RuntimeError | None:
        try:
            return work()
        except CollectiveError:
            raise  # there is nobody left who would wait
        except Exception as error:
            self._failed.add(b)
            self._errors.append(error)
            return None
