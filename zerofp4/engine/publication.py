"""From FP32 masters to the weights of every rank, bucket by bucket."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerofp4.cast import CastPlan
from zerofp4.distributed import CollectiveError, OwnError, Pending, in_phase
from zerofp4.engine.arrivals import Arrivals
from zerofp4.engine.flat import FlatBuffer
from zerofp4.engine.peers import PeerGather
from zerofp4.engine.pipeline import Stage, run_in_turns


def _nothing() -> None: ...


class Publication:
    """One publication of the weights in flat buffers. Collective; nothing waits for a GPU. Whoever asks for
    one has looked for weights and masters that have moved.

    plans: by buffer, what casts it; None for one that is rounded. prepare: what is to be done with each
    buffer first, such as the update of its masters; where a plan has no amaxes by then, it takes them. error:
    what has gone wrong on this rank before, so that it gives no bucket anything new. arrivals: what the
    gathers of NVFP4 weights are left to, which begin at the end, those of the first parameters first: a
    network takes one thing after the other, and nothing that is waited for may come behind them. None where
    all weights are complete for what is queued behind a publication.

    An error is raised at the end: this rank's part in what the others do must go on, or they would wait for
    it. No rank changes an NVFP4 weight of a bucket that a rank could not take part in, and of a bucket that
    is rounded that rank's slice stays as it is on all of them. Of such a bucket the others do not hear:
    the error has an attribute `unheard`, and whoever catches it tells them.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        plans: Sequence[CastPlan | None],
        prepare: Callable[[int], None] | None,
        error: Exception | None = None,
        arrivals: Arrivals | None = None,
    ):
        self._buffers, self._plans, self._prepare = buffers, plans, prepare
        self._arrivals = arrivals
        self._peers = buffers[0].peers
        self._gathers: list[Pending | PeerGather | None] = [None] * len(buffers)
        self._own = OwnError(error)
        self._heard = OwnError()  # what other ranks could not do, in this step
        self._late = OwnError()  # and in earlier ones
        self._told = False  # whether others hear that this rank could not take part
        self._failed = [error is not None] * len(buffers)

    def run(self) -> None:
        leave = Stage(in_phase("amaxes", self._leave_amaxes))
        start_cast, complete = in_phase("amaxes", self._start_cast), in_phase("transpose", self._complete)
        if self._peers is None:
            stages = [
                leave,
                Stage(in_phase("cast", self._cast), start_cast),
                Stage(complete, self._start_gather),
            ]
        else:
            stages = [leave, Stage(in_phase("cast", self._cast_and_send), start_cast), Stage(complete)]
        try:
            run_in_turns(len(self._buffers), stages)
            left = list(filter(self._is_left, range(len(self._buffers))))
            if left and self._peers is not None:
                # Gradients that others read in their updates may be written over next, and no gather that the
                # current stream waits for has seen to that.
                in_phase("gradients", self._peers.arrive)()
            for b in sorted(left, key=lambda b: min(self._buffers[b].indices)):
                self._leave(b)
        except CollectiveError as error:
            # What went wrong here came first, and may be why the others have gone.
            self._raise_first(from_error=error)
            raise
        finally:
            self._note_written()
        self._raise_first()

    def _raise_first(self, from_error: Exception | None = None) -> None:
        """This rank's own error before what it heard of others, and this step's before an earlier one's."""
        late = self._late.take()
        first = self._own.take() or self._heard.take()
        try:
            if first is not None:
                pairs = zip(self._failed, self._plans, strict=True)
                if not self._told and any(failed and plan is None for failed, plan in pairs):
                    first.unheard = True
                raise first from (from_error or first.__cause__ or late)
            if late is not None and from_error is None:
                raise late
        finally:  # see OwnError
            del first, late

    def _note_written(self) -> None:
        """As after any update in place, a backward pass through the old values must fail. Plans have said so
        of their weights.
        """
        rounded = [b for b, plan in zip(self._buffers, self._plans, strict=True) if plan is None]
        torch.autograd.graph.increment_version([p for buffer in rounded for p in buffer.parameters])

    def _leave_amaxes(self, b: int) -> None:
        if self._prepare is not None:
            self._attempt(b, self._own, self._prepare, b)
        if self._plans[b] is not None and len(self._buffers) > 1 and not self._failed[b]:
            # Now, so that they are reduced while the next bucket is worked on.
            self._attempt(b, self._own, self._plans[b].leave_amaxes)

    def _start_cast(self, b: int) -> None:
        if b == 0 and self._peers is not None:  # before the first gather, and behind an update
            in_phase("weights", self._peers.open)()
        if self._plans[b] is None:
            return
        if not self._failed[b]:
            late = self._attempt(b, self._own, self._plans[b].start_step)
            self._late = self._late or OwnError(late)
            self._told = self._told or self._failed[b]
        else:
            self._plans[b].abstain()
            self._told = True

    def _cast(self, b: int, *halfway: tuple[int, int, Callable[[], None]]) -> None:
        if self._failed[b]:
            return
        if self._plans[b] is None:
            self._attempt(b, self._own, self._buffers[b].cast)
        else:
            self._attempt(b, self._heard, self._plans[b].finish_step, *halfway)

    def _cast_and_send(self, b: int) -> None:
        """Codes leave at once, beside what completes the bucket before; with updates the first leave while
        the others are made, since one that reads gradients of other ranks waits until NVLink is its own
        (Peers.wait_until_sent).
        """
        buffer = self._buffers[b]
        if self._is_left(b):
            self._cast(b)
        elif self._prepare is None or buffer.halfway is None:
            self._cast(b)
            self._start_gather(b)
        else:
            position, row, _ = buffer.halfway
            self._cast(b, (position, row, in_phase("weights", buffer.start_sending)))
            self._gathers[b] = in_phase("weights", buffer.start_gather)(begun=True)

    def _start_gather(self, b: int) -> None:
        if not self._is_left(b):
            self._gathers[b] = in_phase("weights", self._buffers[b].start_gather)()

    def _complete(self, b: int) -> None:
        if self._is_left(b):
            return
        if self._gathers[b] is not None:
            in_phase("weights", self._gathers[b].wait)()
        if self._plans[b] is not None and not self._failed[b]:
            self._attempt(b, self._own, self._plans[b].complete)

    def _is_left(self, b: int) -> bool:
        """Whether others wait for the gather of bucket b."""
        return self._arrivals is not None and self._plans[b] is not None and self._buffers[b].world_size > 1

    def _leave(self, b: int) -> None:
        """Begin to gather bucket b, and leave the rest to arrivals."""
        buffer, plan = self._buffers[b], self._plans[b]
        complete = _nothing if self._failed[b] else plan.derive_columns
        gather = in_phase("weights", buffer.start_gather)()
        self._attempt(b, self._own, self._arrivals.add, buffer, gather, complete)
        if not self._failed[b]:
            plan.note_written()

    def _attempt(self, b: int, error: OwnError, work: Callable, *arguments: Any) -> Any:
        with error:
            return work(*arguments)
        self._failed[b] = True
        return None
