"""The program of an optimizer step: the same launches and collectives, in the same order, on every rank.

Four buckets are in flight. In turn t, in this order:

    gradients of bucket t are sent
    bucket t - 1 is updated, after its gradients have arrived, and the all-reduce of its amaxes starts
    bucket t - 2 is cast, after its amaxes are reduced, and the all-gather of its codes starts
    bucket t - 3 is transposed, after its codes have arrived

Weights without codes have no amaxes and no transposes.

Collectives run on the network's stream, after the work on the current stream, which waits for them. On a GPU
the host waits only for gradients and amaxes of offloaded buckets, which it updates (offload.py). One thread
queues everything, in an order that depends on the buckets alone, so that ranks cannot deadlock.
"""

import itertools
from collections.abc import Callable, Sequence

import torch

from zerofp4.distributed import CollectiveError, OwnError, in_phase
from zerofp4.engine.buckets import Gradients
from zerofp4.engine.exchange import ABSTAIN, Abstain, Arrived, BucketExchange, Waitable
from zerofp4.engine.late_gather import LateGathers
from zerofp4.engine.peers import Peers
from zerofp4.ops import increment_versions

Update = Callable[[BucketExchange, Arrived | None], None]
"""Updates the masters of a bucket, and leaves their amaxes. None: the means are in `bucket.gradients`."""


class Step:
    """Updates masters and publishes them as weights, bucket by bucket.

    run() is a whole step. A scheduler that updates inside a backward pass calls begin() and turn() itself,
    and raises `failure` at the end.

    exchanges: of all buckets; the buckets of one process group are neighbours.
    peers: the ranks that share memory, if any.
    sends: whether a step sends gradients; False if backward passes have sent them.
    late: takes the gathers of NVFP4 weights, which then go on after a step; None if a step waits for them.

    [Note: an error after the vote] If this rank fails in the program, it keeps the error in `failure` and
    joins all further collectives, since the other ranks wait for them. It updates no further bucket, and
    joins each further amax reduction with a flag, so that no rank casts those buckets. Buckets reduced
    without the flag are still cast and transposed, as on the other ranks. Masters of other ranks, and weights
    without codes, do change. run() raises the error at the end, but a failed collective at once, since no
    rank is left that would wait.
    """

    def __init__(
        self, exchanges: Sequence[BucketExchange], peers: Peers | None, sends: bool, late: LateGathers | None
    ):
        self.exchanges, self._peers, self._sends, self._late = exchanges, peers, sends, late
        # Groups run one after the other: else the order of collectives of two groups would depend on how many
        # buckets each has, and differ between ranks.
        together = itertools.groupby(exchanges, lambda e: (e.bucket.group(), e.bucket.replicas()))
        self._groups = [list(group) for _, group in together]
        # The state of one program:
        self.failure = OwnError()
        self._update: Update | None = None
        self._reduces = False
        self._gradients: dict[BucketExchange, Gradients | Abstain] = {}  # between send and update
        self._flagged: set[BucketExchange] = set()  # this rank has joined their amax reductions with a flag
        self._gathers: dict[BucketExchange, Waitable | None] = {}  # between cast and transpose

    def run(
        self, update: Update | None, gradients: Gradients | Abstain | None, error: OwnError | None
    ) -> None:
        """Update and publish. Collective; the host waits for no GPU, unless buckets are offloaded.

        update: None leaves the masters as they are.
        gradients: to be averaged, as of in_place(); None if the means are in the buckets, or there is no
            update.
        error: of this rank, which then joins the collectives, changes nothing and raises it.
        """
        try:
            self.begin(update, error or OwnError(), reduces=gradients is not None)
            for exchanges in self._groups:
                for t in range(len(exchanges) + 3):
                    self.turn(exchanges, t, lambda e: _of_bucket(gradients, e))
            self._start_late_gathers()
        except CollectiveError as gone:
            self.failure.raise_if_any(cause=gone)  # came first, and may be why the others have gone
            raise
        self.failure.raise_if_any()

    def begin(self, update: Update | None, failure: OwnError, reduces: bool = True) -> None:
        """Begin a new program. reduces: whether gradients are exchanged."""
        self._update, self.failure, self._reduces = update, failure, reduces
        self._gradients, self._flagged, self._gathers = {}, set(), {}
        if self._peers is not None:
            in_phase("weights", self._peers.open)()

    def turn(
        self,
        exchanges: Sequence[BucketExchange],
        t: int,
        gradients_of: Callable[[BucketExchange], Gradients | Abstain],
        lag: int = 1,
        vote: Callable[[BucketExchange], None] | None = None,
    ) -> None:
        """Send bucket t, update bucket t - lag, cast bucket t - 2 lag and transpose bucket t - 3 lag.

        gradients_of: returns this rank's gradients of a bucket. vote: called for each bucket before its
        update; with a lag at the end of the turn in which it is sent, before the device has later gradients
        to make, for which a host that reads the outcome would wait.
        """
        sent, updated, cast, completed = (
            exchanges[t - n * lag] if 0 <= t - n * lag < len(exchanges) else None for n in range(4)
        )
        if sent is not None and self._reduces:
            self._gradients[sent] = own = gradients_of(sent)
            if self._sends:
                in_phase("gradients", sent.send)(own)
        if sent is not None and sent.bring_down is not None and self._updates(sent):
            in_phase("gradients", sent.bring_down)(self._reduces)
        if updated is not None:
            if vote is not None and not lag:
                vote(updated)
            self._update_masters(updated)
        if cast is not None:
            self._cast(cast)
        if completed is not None:
            self._complete(completed)
        if sent is not None and vote is not None and lag:
            vote(sent)

    def _update_masters(self, exchange: BucketExchange) -> None:
        """Update the masters, which leaves their amaxes, and start the all-reduce of amaxes."""
        bucket, plan = exchange.bucket, exchange.bucket.plan
        updates = self._updates(exchange)
        self._gradients.pop(exchange, None)
        if updates:
            with self.failure:
                in_phase("update", self._receive_and_update)(exchange)
        elif self._reduces:
            in_phase("gradients", exchange.finish)()
        if plan is None:
            # A backward pass through the old values must fail. Plans note their own writes.
            increment_versions(bucket.parameters)
            return
        if self.failure:
            in_phase("amaxes", plan.abstain)()
        else:
            with self.failure:  # if start_step() raises, it has joined with a flag
                # It returns an error of an earlier step, which the vote has raised already.
                in_phase("amaxes", plan.start_step)()
        if self.failure:
            self._flagged.add(exchange)

    def _updates(self, exchange: BucketExchange) -> bool:
        return self._update is not None and self._gradients.get(exchange) is not ABSTAIN

    def _receive_and_update(self, exchange: BucketExchange) -> None:
        arrived, is_offloaded = None, exchange.bring_down is not None
        if is_offloaded or (self._reduces and exchange.arrives_as is not None):
            arrived = in_phase("gradients", exchange.receive)()
        elif self._reduces:
            in_phase("gradients", exchange.average)(exchange.bucket.gradients)
        if not self.failure:
            self._update(exchange, arrived)

    def _cast(self, exchange: BucketExchange) -> None:
        """Write scales and this rank's codes, from the reduced amaxes, and start the gather of codes."""
        plan, is_late = exchange.bucket.plan, self.is_late(exchange)
        with self.failure:
            if plan is not None and exchange not in self._flagged:
                in_phase("cast", plan.finish_step)(None if is_late else exchange.halfway)
            elif plan is None and not self.failure:
                in_phase("cast", exchange.bucket.cast)()
        if not is_late:
            self._gathers[exchange] = in_phase("weights", exchange.gather)()

    def _complete(self, exchange: BucketExchange) -> None:
        """Wait for the codes of all ranks, and transpose them, unless the bucket's gather is late."""
        gather, plan = self._gathers.pop(exchange, None), exchange.bucket.plan
        if gather is not None:
            in_phase("weights", gather.wait)()
        if plan is not None and not self.is_late(exchange) and exchange not in self._flagged:
            with self.failure:
                in_phase("transpose", plan.complete)()

    def is_late(self, exchange: BucketExchange) -> bool:
        bucket = exchange.bucket
        return self._late is not None and bucket.plan is not None and bucket.world_size > 1

    def _start_late_gathers(self) -> None:
        """After all other collectives of the step, in the order in which a forward pass reads weights."""
        late = sorted(filter(self.is_late, self.exchanges), key=lambda e: min(e.bucket.indices))
        if late and self._peers is not None:
            # The next backward pass overwrites gradients, so all ranks must have read them. Waiting for a
            # gather would imply that, but late gathers are not waited for.
            in_phase("gradients", self._peers.arrive)()
        for exchange in late:
            gather, plan = in_phase("weights", exchange.gather)(), exchange.bucket.plan
            with self.failure:
                self._late.add(exchange.bucket, gather, plan.derive_columns)
                if not self.failure:
                    plan.note_written()

    def average(self, gradients: Gradients | Abstain, squares: torch.Tensor | None = None) -> OwnError:
        """Average the gradients of all buckets into their `gradients`. Collective.

        gradients: as of run(). squares: as of BucketExchange.average(); copies of a bucket count once.
        Returns the error of this rank, which has joined all exchanges.
        """
        error = OwnError()
        for exchanges in self._groups:
            for before, exchange in itertools.pairwise([None, *exchanges, None]):
                if exchange is not None and self._sends:
                    in_phase("gradients", exchange.send)(_of_bucket(gradients, exchange))
                if before is not None:
                    with error:
                        if gradients is not ABSTAIN:
                            counted = squares if before.bucket.is_counted else None
                            in_phase("gradients", before.average)(before.bucket.gradients, counted)
                        else:
                            in_phase("gradients", before.finish)()
        return error


def _of_bucket(gradients: Gradients | Abstain, exchange: BucketExchange) -> Gradients | Abstain:
    return gradients if gradients is ABSTAIN else [gradients[i] for i in exchange.bucket.indices]
