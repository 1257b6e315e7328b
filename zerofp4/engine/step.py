"""The program of an optimizer step: the same launches and collectives, in the same order, on every rank.

Four buckets are in flight. In turn t, in this order:

    gradients of bucket t are sent
    bucket t - 1 is updated, as soon as its gradients are here, and the all-reduce of its amaxes starts
    bucket t - 2 is cast, as soon as its amaxes are reduced, and the all-gather of its codes starts
    bucket t - 3 is transposed, as soon as its codes are here

Weights that are no codes have no amaxes and nothing to transpose.

Collectives run on the network's own stream, after what the current stream holds when they begin. The current
stream waits for them, never the host of a GPU. One thread queues everything, in an order that depends on the
buckets alone, so that ranks cannot wait for each other's collectives crosswise.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from zerofp4.distributed import CollectiveError, OwnError, in_phase
from zerofp4.engine.buckets import Bucket, GradientMemory, Gradients, is_sendable
from zerofp4.engine.late_gather import LateGathers, Waitable
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.ops import RankGradients, increment_versions
from zerofp4.storage import is_freed


class Arrived(NamedTuple):
    """The gradients of a bucket, not averaged yet, for an update that averages them as it reads them.

    own: by parameter of the bucket, this rank's own gradient of what it owns, contiguous; None where it has
        none, or owns nothing.
    rows: the same of all ranks; None in a bucket of one rank, whose own gradient is the mean.
    """

    own: Sequence[torch.Tensor | None]
    rows: RankGradients | None


UPDATE_DTYPES = (torch.float32, torch.bfloat16)
"""What an update can average as it reads it."""


class Transport(Protocol):
    """Moves the gradients and weights of some buckets. A verb that an implementation leaves out does nothing.

    A step calls prepare() before the ranks agree, then begin(), then send_gradients() of each bucket and
    arrived() or average() of each, in the same order: between both at most one other bucket is sent. A
    BackwardSchedule calls send_gradients() earlier. All verbs but prepare() and halfway() are collective, and
    what arrived() and average() raise is an error of this rank alone, whose part has taken place.

    By bucket:
    dtypes: what its gradients are sent as.
    memory: where this rank's own gradients are sent from; None in a bucket of one rank whose gradients are
        read in place, as the means.
    sent_bytes: what a rank sends of its gradients to their owners in a step, or these read from its memory.
    adds_in_update: whether an update averages its gradients as it reads them, from arrived(); else average()
        does before it.
    """

    buckets: Sequence[Bucket]
    dtypes: Sequence[torch.dtype]
    memory: Sequence[GradientMemory | None]
    sent_bytes: Sequence[int]
    adds_in_update: Sequence[bool]

    def prepare(self, gradients: Gradients, as_sent: bool = False) -> Gradients:
        """Do what can fail on this rank alone. Returns what the verbs below are given.

        gradients: of all buckets, or a mapping that has those of one. as_sent: whether are_as_sent() is known
        to hold.
        """
        return gradients

    # Gradients

    def begin(self) -> None:
        """A new exchange of all buckets begins."""

    def send_gradients(self, b: int, gradients: Gradients | None) -> None:
        """Begin to send the gradients of bucket b to the ranks that own them. A missing gradient counts as
        zeros. None in place of all sends whatever the memory holds, for discard().
        """

    def arrived(self, b: int, gradients: Gradients) -> Arrived:
        """What is queued next may read the gradients of bucket b, until bucket b + 2 is sent."""

    def average(self, b: int, gradients: Gradients, squares: torch.Tensor | None = None) -> None:
        """Average bucket b into its `gradients`, float32.

        squares: int64 ops.SQUARES, to which the squares of the means are added.
        """

    def discard(self, b: int) -> None:
        """Take this rank's part in the exchange of bucket b, of which nobody uses anything. Not for a bucket
        with replicas, whose average() has one more exchange.
        """

    def end(self) -> None:
        """Every rank has read the gradients of this exchange, which may be overwritten."""

    # Weights

    def open_weights(self) -> None:
        """Weights of all ranks may be overwritten from now on."""

    def halfway(self, b: int) -> tuple[int, int, Callable[[], None]] | None:
        """(position of a weight, its row, what to call): where the cast of bucket b may stop once, so that
        the codes before that row leave while the rest is cast. None where that gains nothing.
        """

    def gather(self, b: int) -> Waitable | None:
        """Begin to send this rank's slice of the weights of bucket b to the others. None in a bucket of one
        rank.
        """


def are_as_sent(transport: Transport, gradients: Gradients) -> bool:
    """Whether each gradient is contiguous and of the dtype in which it is sent, one of WEIGHT_DTYPES."""
    return set(transport.dtypes) <= set(WEIGHT_DTYPES) and all(
        gradients[i] is None or is_sendable(gradients[i], dtype)
        for bucket, dtype in zip(transport.buckets, transport.dtypes, strict=True)
        for i in bucket.indices
    )


def check_gradients(
    transport: Transport, b: int, gradients: Gradients, names: Sequence[str], are_known: bool = False
) -> None:
    """Raise RuntimeError for a gradient of bucket b that is sparse, elsewhere, freed, of another shape, or in
    the memory of another parameter's gradient; TypeError for one that would lose values on its way without
    gradient_wire.

    are_known: whether gradients of the same kinds have passed before.
    """
    bucket, memory = transport.buckets[b], transport.memory[b]
    for i, shape in () if are_known else zip(bucket.indices, bucket.shapes, strict=True):
        if gradients[i] is not None:
            _check_gradient(names[i], gradients[i], shape, bucket)
    if memory is not None:
        memory.check(gradients, names)


def _check_gradient(name: str, gradient: torch.Tensor, shape: torch.Size, bucket: Bucket) -> None:
    problem, dtype = None, bucket.sent_as
    if gradient.layout != torch.strided:
        problem = f"of layout {gradient.layout}: gradients must be dense"
    elif gradient.device != bucket.device:
        problem = f"on {gradient.device}, and its master is on {bucket.device}"
    elif is_freed(gradient) and not gradient._is_zerotensor():
        problem = "whose storage was freed in place (resize_)"
    elif gradient.shape != shape:
        problem = f"of shape {tuple(gradient.shape)}, and has shape {tuple(shape)}"
    if problem is not None:
        raise RuntimeError(f"{name} has a gradient {problem}")
    if bucket.wire is None and dtype != torch.float32 and gradient.dtype != dtype:
        raise TypeError(
            f"{name} has a gradient of {gradient.dtype}, which would be rounded to {dtype} to be added to "
            f"those of other ranks: build the optimizer with gradient_wire=torch.float32, or {dtype} if that "
            "is meant"
        )


Update = Callable[[int, Arrived | None], None]
"""update(b, arrived) updates the masters of bucket b, and leaves their amaxes. arrived: the gradients of all
ranks; None where the means are in the bucket's `gradients`.
"""


NOTHING: Gradients = ()
"""The gradients of a rank that only takes its part in the exchange: nobody uses what it sends."""


class Step:
    """Updates masters and publishes them as weights, bucket by bucket.

    run() is a whole step. What updates inside a backward pass calls the same verbs itself: begin(), then
    send(), update(), cast() and complete() of every bucket, and raises `failure` at the end.

    transport: of the buckets, those of each process group side by side.
    sends: whether a step sends gradients; False where backward passes have sent them.
    late: takes the gathers of NVFP4 weights that go on behind a step; None where a step waits for all.

    [Note: an error after the agreement] What fails on this rank while the program runs is kept in `failure`,
    and the program goes on, since the other ranks wait for this rank's part in every collective. From then on
    this rank updates nothing, and joins every further amax reduction with a flag, so that no rank changes the
    NVFP4 weights of those buckets; masters of other ranks, and weights that are no codes, do change. A bucket
    whose reduction it joined without the flag is cast and transposed all the same, as the other ranks do.
    run() raises the error at the end. A collective that failed is raised at once, since nobody is left who
    would wait.
    """

    def __init__(self, transport: Transport, sends: bool = True, late: LateGathers | None = None):
        self.buckets, self.transport = transport.buckets, transport
        self._sends, self._late = sends, late
        # Groups run one after the other: a rank never has collectives of two groups to begin whose order
        # would depend on how many buckets each has.
        pairs = enumerate(itertools.pairwise(self.buckets), start=1)
        starts = [b for b, (before, bucket) in pairs if not bucket.is_sharded_like(before)]
        self._groups = list(itertools.pairwise([0, *starts, len(self.buckets)]))
        """(first, end) of the buckets of each process group."""
        # Of one program:
        self.failure = OwnError()
        self._update: Update | None = None
        self._flagged: set[int] = set()
        """Buckets whose amax reduction this rank has joined with a flag, so that no rank casts them."""
        self._gathers: dict[int, Waitable | None] = {}
        """By bucket, the gather that was begun and not waited for."""

    def run(
        self,
        update: Update | None = None,
        gradients: Gradients | None = None,
        error: OwnError | None = None,
    ) -> None:
        """Update and publish. Collective; nothing waits for a GPU.

        update: None leaves the masters as they are.
        gradients: what transport.prepare() returned, to be averaged, or NOTHING; None where the means are in
            the buckets.
        error: of this rank, which takes part without changing anything and raises it.
        """
        try:
            self.begin(update, error or OwnError(), reduces=gradients is not None)
            for first, end in self._groups:
                for turn in range(first, end + 3):
                    if turn < end and gradients is not None:
                        self.send(turn, gradients)
                    if first <= turn - 1 < end:
                        self.update(turn - 1, gradients)
                    if first <= turn - 2 < end:
                        self.cast(turn - 2)
                    if first <= turn - 3:
                        self.complete(turn - 3)
            self._start_late_gathers(gradients is not None)
        except CollectiveError as gone:
            self.failure.raise_if_any(cause=gone)  # it came first, and may be why the others have gone
            raise
        finally:
            self._update = None
        self.failure.raise_if_any()

    # What run() does, for one bucket at a time

    def begin(self, update: Update | None, failure: OwnError, reduces: bool = True) -> None:
        """A new program begins. reduces: whether gradients are exchanged."""
        self._update, self.failure = update, failure
        self._flagged, self._gathers = set(), {}
        if reduces:
            in_phase("gradients", self.transport.begin)()

    def send(self, b: int, gradients: Gradients) -> None:
        """Begin to send the gradients of bucket b, while the one before is waited for."""
        if self._sends:
            sent = None if gradients is NOTHING else gradients
            in_phase("gradients", self.transport.send_gradients)(b, sent)

    def update(self, b: int, gradients: Gradients | None) -> None:
        """Update the masters, which leaves their amaxes; the all-reduce of amaxes starts."""
        bucket = self.buckets[b]
        if self._update is not None and gradients is not NOTHING:
            with self.failure:
                in_phase("update", self._read_and_update)(b, gradients)
        elif gradients is not None:
            in_phase("gradients", self.transport.discard)(b)
        if b == 0:
            in_phase("weights", self.transport.open_weights)()
        if bucket.plan is None:
            # As after any update in place, a backward pass through the old values fails. Plans note theirs.
            increment_versions(bucket.parameters)
            return
        if self.failure:
            in_phase("amaxes", bucket.plan.abstain)()
        else:
            with self.failure:  # start_step() itself joins with a flag where it raises
                # An error of an earlier step that it returns is one that the agreement has raised.
                in_phase("amaxes", bucket.plan.start_step)()
        if self.failure:
            self._flagged.add(b)

    def _read_and_update(self, b: int, gradients: Gradients | None) -> None:
        arrived = None
        if gradients is not None:
            if self.transport.adds_in_update[b]:
                arrived = in_phase("gradients", self.transport.arrived)(b, gradients)
            else:
                in_phase("gradients", self.transport.average)(b, gradients)
        if not self.failure:
            self._update(b, arrived)

    def cast(self, b: int) -> None:
        """Write scales and this rank's codes, from the reduced amaxes; the gather of codes starts."""
        plan, is_late = self.buckets[b].plan, self._is_late(b)
        with self.failure:
            if plan is not None and b not in self._flagged:
                in_phase("cast", plan.finish_step)(None if is_late else self.transport.halfway(b))
            elif plan is None and not self.failure:
                in_phase("cast", self.buckets[b].cast)()
        if not is_late:
            self._gathers[b] = in_phase("weights", self.transport.gather)(b)

    def complete(self, b: int) -> None:
        """Wait for the codes of all ranks, and transpose them; not of buckets whose gathers are late."""
        gather, plan = self._gathers.pop(b, None), self.buckets[b].plan
        if gather is not None:
            in_phase("weights", gather.wait)()
        if plan is not None and not self._is_late(b) and b not in self._flagged:
            with self.failure:
                in_phase("transpose", plan.complete)()

    def _is_late(self, b: int) -> bool:
        bucket = self.buckets[b]
        return self._late is not None and bucket.plan is not None and bucket.world_size > 1

    def _start_late_gathers(self, reduces: bool) -> None:
        """Behind everything that the step waits for; the gathers of the first parameters first."""
        late = filter(self._is_late, range(len(self.buckets)))
        late = sorted(late, key=lambda b: min(self.buckets[b].indices))
        if late and reduces:
            # A gather that is waited for proves that all ranks have read the gradients: here none is.
            in_phase("gradients", self.transport.end)()
        for b in late:
            bucket = self.buckets[b]
            gather = in_phase("weights", self.transport.gather)(b)
            with self.failure:
                self._late.add(bucket, gather, bucket.plan.derive_columns)
                if not self.failure:
                    bucket.plan.note_written()

    def average(self, gradients: Gradients, squares: torch.Tensor | None = None) -> OwnError:
        """Average the gradients of all buckets into their `gradients`. Collective.

        gradients, squares: as of run() and Transport.average().
        Returns what went wrong on this rank, which has taken its part in all exchanges.
        """
        error = OwnError()
        in_phase("gradients", self.transport.begin)()
        for first, end in self._groups:
            for turn in range(first, end + 1):
                if turn < end:
                    self.send(turn, gradients)
                if turn > first:
                    with error:
                        if gradients is not NOTHING:
                            in_phase("gradients", self.transport.average)(turn - 1, gradients, squares)
                        else:
                            in_phase("gradients", self.transport.discard)(turn - 1)
        in_phase("gradients", self.transport.end)()
        return error

    def describe(self) -> dict[str, Any]:
        """What lies in each bucket, what this rank sends for it in a step, and the sums of that by phase."""
        described = []
        for b, bucket in enumerate(self.buckets):
            size, amaxes = bucket.world_size, 0 if bucket.plan is None else bucket.plan.wire.nbytes
            kind = "nvfp4" if bucket.is_packed else str(bucket.parameters[0].dtype).removeprefix("torch.")
            described.append(
                {
                    "kind": kind,
                    "parameters": len(bucket.parameters),
                    "ranks": size,
                    "replicas": bucket.replica_count,
                    "elements": sum(parameter.numel() for parameter in bucket.parameters),
                    "whole_matrices": bucket.is_of_whole_matrices,
                    "gradients_travel_as": str(self.transport.dtypes[b]).removeprefix("torch."),
                    "gathered_in": None if size == 1 else "forward" if self._is_late(b) else "step",
                    "gradients": self.transport.sent_bytes[b],
                    # A ring sends every byte twice, but for the share of a rank.
                    "amaxes": 2 * (size - 1) * amaxes // size,
                    "weights": (size - 1) * sum(flat.nbytes for flat in bucket.gathered) // size,
                }
            )
        phases = ("gradients", "amaxes", "weights")
        sent = {phase: sum(bucket[phase] for bucket in described) for phase in phases}
        return {"buckets": described, "bytes_sent": sent}
