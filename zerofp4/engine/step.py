"""The program of an optimizer step: the same launches and collectives, in the same order, on every rank.

Four buckets are in flight. In turn b, in this order:

    gradients of bucket b + 1 are sent
    bucket b is updated, as soon as its gradients are here, and the all-reduce of its amaxes starts
    bucket b - 1 is cast, as soon as its amaxes are reduced, and the all-gather of its codes starts
    bucket b - 2 is transposed, as soon as its codes are here

Collectives run on the network's own stream, after what the current stream holds when they begin. The current
stream waits for them, never the host of a GPU. One thread queues everything, in an order that depends on the
number of buckets alone, so that ranks cannot wait for each other's collectives crosswise.
"""

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch

from zerofp4.cast import StagedPlan
from zerofp4.distributed import CollectiveError, OwnError, in_phase
from zerofp4.engine.backward import ArrivingMeans
from zerofp4.engine.flat import FlatBuffer
from zerofp4.engine.late_gather import LateGathers
from zerofp4.engine.transport import Arrived, Gradients, Transport, Waitable


class Update(Protocol):
    """Updates the masters of one bucket after the other."""

    def adds(self, b: int) -> bool:
        """Whether it averages the gradients of bucket b as it reads them."""

    def __call__(self, b: int, arrived: Arrived | None) -> None:
        """Update the masters of bucket b, and leave their amaxes.

        arrived: the gradients of all ranks; None where the means are in the bucket's `gradients`.
        """


class Step:
    """Updates masters and publishes them as weights, bucket by bucket.

    buckets: those of each process group side by side.
    plans: by bucket, what casts its masters; None where they are rounded.
    transport: of the buckets.
    exchange: where gradients come from that backward passes have sent, so that a step sends none.
    late: what takes the gathers of NVFP4 weights that go on behind a step; None where a step waits for all.

    [Note: an error after the agreement] What fails on this rank while the program runs is kept in `_failure`,
    and the program goes on, since the other ranks wait for this rank's part in every collective. From then on
    this rank updates nothing, and joins every further amax reduction with a flag, so that no rank changes the
    NVFP4 weights of those buckets. A bucket whose reduction it joined without the flag is cast and transposed
    all the same, as the other ranks do. run() raises the error at the end. A collective that failed is raised
    at once, since nobody is left who would wait.
    """

    def __init__(
        self,
        buckets: Sequence[FlatBuffer],
        plans: Sequence[StagedPlan | None],
        transport: Transport,
        exchange: Transport | ArrivingMeans | None = None,
        late: LateGathers | None = None,
    ):
        self.buckets, self.plans, self.transport = buckets, plans, transport
        self._exchange, self._late = exchange or transport, late
        self._sends = exchange is None
        self._groups = _group_ranges(buckets)
        self._gathers: list[Waitable | None] = [None] * len(buckets)
        # Of one run():
        self._update: Update | None = None
        self._gradients: Gradients | None = None
        self._failure = OwnError()
        self._flagged: set[int] = set()
        """Buckets whose amax reduction this rank has joined with a flag, so that no rank casts them."""

    def run(
        self,
        update: Update | None = None,
        gradients: Gradients | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Update and publish. Collective; nothing waits for a GPU.

        update: updates the masters of each bucket first; None leaves them as they are.
        gradients: what transport.prepare() returned, to be averaged; None where the means are in the buckets;
            empty where this rank only takes its part in the exchange of gradients, which nobody uses.
        error: of this rank, which then takes part without changing anything, and raises it.
        """
        self._update, self._gradients, self._failure = update, gradients, OwnError(error)
        self._flagged = set()
        try:
            if gradients is not None:
                in_phase("gradients", self._exchange.begin)()
            for first, end in self._groups:
                self._run_group(first, end)
            self._start_late_gathers()
        except CollectiveError as gone:
            self._failure.raise_if_any(cause=gone)  # it came first, and may be why the others have gone
            raise
        finally:
            del error  # see OwnError
            self._update = self._gradients = None
            self._note_written()
        self._failure.raise_if_any()

    def _run_group(self, first: int, end: int) -> None:
        self._send_gradients(first)
        for turn in range(first, end + 2):
            if turn < end:
                self._update_bucket(turn, is_last=turn + 1 == end)
            if first <= turn - 1 < end:
                self._cast(turn - 1)
            if first <= turn - 2:
                self._complete(turn - 2)

    def _send_gradients(self, b: int) -> None:
        if self._gradients is not None and self._sends:
            in_phase("gradients", self.transport.send_gradients)(b, self._gradients or None)

    def _update_bucket(self, b: int, is_last: bool) -> None:
        """Update the masters, which leaves their amaxes; the all-reduce of amaxes starts."""
        if not is_last:
            self._send_gradients(b + 1)  # before this one is waited for: the network works on both
        if self._update is not None:
            with self._failure:
                in_phase("update", self._read_and_update)(b)
        elif self._gradients is not None:
            in_phase("gradients", self.transport.discard)(b)
        if b == 0:
            in_phase("weights", self.transport.open_weights)()
        plan = self.plans[b]
        if plan is None:
            return
        if self._failure:
            in_phase("amaxes", plan.abstain)()
        else:
            with self._failure:  # start_step() itself joins with a flag where it raises
                # It returns an error of an earlier step on another rank, which the agreement has told by now.
                in_phase("amaxes", plan.start_step)()
        if self._failure:
            self._flagged.add(b)

    def _read_and_update(self, b: int) -> None:
        arrived = None
        if self._gradients is not None:
            if self._update.adds(b):
                arrived = in_phase("gradients", self._exchange.arrived)(b, self._gradients)
            else:
                in_phase("gradients", self._exchange.average)(b, self._gradients)
        if not self._failure:
            self._update(b, arrived)

    def _cast(self, b: int) -> None:
        """Write scales and this rank's codes, from the reduced amaxes; the gather of codes starts."""
        plan, is_late = self.plans[b], self._is_late(b)
        with self._failure:
            if plan is not None and b not in self._flagged:
                in_phase("cast", plan.finish_step)(None if is_late else self.transport.halfway(b))
            elif plan is None and not self._failure:
                in_phase("cast", self.buckets[b].cast)()
        if not is_late:
            self._gathers[b] = in_phase("weights", self.transport.gather)(b)

    def _complete(self, b: int) -> None:
        """Wait for the codes of all ranks, and transpose them."""
        gather, self._gathers[b] = self._gathers[b], None
        if gather is not None:
            in_phase("weights", gather.wait)()
        if self.plans[b] is not None and not self._is_late(b) and b not in self._flagged:
            with self._failure:
                in_phase("transpose", self.plans[b].complete)()

    def _is_late(self, b: int) -> bool:
        return self._late is not None and self.plans[b] is not None and self.buckets[b].world_size > 1

    def _start_late_gathers(self) -> None:
        """Behind everything that the step waits for, since a network takes one thing after the other; the
        gathers of the first parameters first.
        """
        late = sorted(
            filter(self._is_late, range(len(self.buckets))), key=lambda b: min(self.buckets[b].indices)
        )
        if late and self._gradients is not None:
            # No gather that the current stream waits for says that the other ranks have read their rows.
            in_phase("gradients", self._exchange.end)()
        for b in late:
            gather = in_phase("weights", self.transport.gather)(b)
            with self._failure:
                self._late.add(self.buckets[b], gather, self.plans[b].derive_columns)
                if not self._failure:
                    self.plans[b].note_written()

    def _note_written(self) -> None:
        """As after any update in place, a backward pass through the old values fails. Plans note their
        weights.
        """
        rounded = [b for b, plan in zip(self.buckets, self.plans, strict=True) if plan is None]
        torch.autograd.graph.increment_version([p for bucket in rounded for p in bucket.parameters])

    def average(self, gradients: Gradients, squares: torch.Tensor | None = None) -> OwnError:
        """Average the gradients of all buckets into their `gradients`. Collective.

        gradients, squares: as of run() and Transport.average(); `gradients` as they are where this rank only
            takes its part.
        Returns what went wrong on this rank, which has taken its part in all exchanges.
        """
        error, self._gradients = OwnError(), gradients
        try:
            in_phase("gradients", self._exchange.begin)()
            for first, end in self._groups:
                self._send_gradients(first)
                for b in range(first, end):
                    if b + 1 < end:
                        self._send_gradients(b + 1)
                    with error:
                        if gradients:
                            in_phase("gradients", self._exchange.average)(b, gradients, squares)
                        else:
                            in_phase("gradients", self.transport.discard)(b)
            in_phase("gradients", self._exchange.end)()
        finally:
            self._gradients = None
        return error


def _group_ranges(buckets: Sequence[FlatBuffer]) -> list[tuple[int, int]]:
    """(first, end) of the buckets of each process group.

    Groups run one after the other: a rank never has collectives of two groups to begin whose order would
    depend on how many buckets each has.
    """
    starts = [b for b, (a, c) in enumerate(itertools.pairwise(buckets), start=1) if not c.is_sharded_like(a)]
    return list(itertools.pairwise([0, *starts, len(buckets)]))
