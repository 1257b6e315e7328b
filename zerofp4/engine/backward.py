"""Overlap with backward passes: gradients are sent while others are made, and micro-batches are added up in
slices.
"""

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from zerofp4 import ops
from zerofp4.distributed import error_text, in_phase
from zerofp4.engine.collective import CollectiveTransport
from zerofp4.engine.gradient_memory import (
    GradientMemory,
    Gradients,
    GradientSnapshot,
    add_gradient_hooks,
    gradients_of,
)
from zerofp4.engine.peer import PeerTransport
from zerofp4.engine.transport import check_gradients

BucketGradients = Mapping[int, torch.Tensor | None]
"""p.grad of the parameters of a bucket, by their position among all trainable parameters."""


class BackwardSchedule:
    """Notices gradients as backward passes make them, and sends each bucket when it is complete.

    Buckets are sent in one order, each when all of its gradients are there and those before it have been
    sent. One turn through all buckets is a round. Every rank takes part in the same number of rounds,
    whatever passes it ran, broke off or ran under no_sync(): before each agreement of the ranks, close()
    sends what is missing; what was sent and then dropped by zero_grad() is sent once more behind the
    agreement, by all.

    With `adds` each backward pass outside of no_sync() is a round; its gradients are added to the FP32
    slices, and p.grad is None afterwards. Without it gradients stay in p.grad, and there is one round before
    each agreement.

    parameters, names: all trainable ones, and what messages call them.
    exchange: sends gradients.
    early: whether buckets are sent before the end of a pass.
    word_of: the word of a NaN or Inf in a bucket's gradients, for the agreement; only with `adds`.
    is_reduced: whether clip_grad_norm_ has reduced what the next step uses; then nothing is sent.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        exchange: "PeerTransport | ArrivingMeans",
        *,
        early: bool,
        adds: bool,
        word_of: Callable[[BucketGradients], torch.Tensor | None],
        is_reduced: Callable[[], bool],
    ):
        self._parameters, self._names = list(parameters), list(names)
        self._exchange, self._early, self._adds = exchange, early, adds
        self._word_of, self._is_reduced = word_of, is_reduced
        self._buckets = exchange.buckets
        self._bucket_of = {i: b for b, bucket in enumerate(self._buckets) for i in bucket.indices}
        self._is_syncing = True
        """False under no_sync()."""
        self.rounds = 0
        """How many have begun."""
        self._stand_in = torch.zeros((), device=self._buckets[0].device)
        """For a gradient that is only in the slices."""
        self._start_over()
        self._forget_sums()
        self._end_hooks = add_gradient_hooks(self, self._parameters, BackwardSchedule._mark)

    def _start_over(self) -> None:
        """What is sent next is a new round."""
        self._next = 0
        """The bucket that is sent next."""
        self._is_stale = False
        """Whether zero_grad() has dropped what this round has sent."""
        self._missing = [set(bucket.indices) for bucket in self._buckets]
        """By bucket, the parameters whose gradients are not there."""
        self._snapshots: list[GradientSnapshot] = []
        """By bucket, what was sent. Without `adds`."""
        self._pass: int | None = None
        """With `adds`, the backward pass whose end ends the round."""

    def _forget_sums(self) -> None:
        """What the agreement must know of gradients that are only in the slices. With `adds`."""
        self._present = [False] * len(self._parameters)
        self._word: torch.Tensor | None = None

    # In a backward pass

    def _mark(self, i: int, _: torch.Tensor) -> None:
        """The gradient of parameter i is there."""
        if not self._is_syncing or self._is_stale or self._is_reduced():
            return
        self._missing[self._bucket_of[i]].discard(i)
        if self._adds and self._pass != torch._C._current_graph_task_id():
            self._pass = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        while self._early and self._next < len(self._buckets) and not self._missing[self._next]:
            self._send_next()

    @torch.no_grad()
    def _end_backward(self) -> None:
        self._complete()
        self._start_over()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    def drop(self) -> None:
        """As zero_grad(): what was sent counts for nothing."""
        if self._pass is not None:  # it broke off
            self._complete(discard=True)
        if self._adds:
            self.end_step()
        self._is_stale = not self._adds and self._next > 0
        if not self._is_stale:
            self._start_over()

    # Before the ranks agree

    @property
    def is_holding(self) -> bool:
        """Whether the FP32 slices have, or will have, what a step is to use."""
        return self._next > 0 or any(self._present)

    def merged(self, gradients: Gradients) -> Gradients:
        """The gradients, with a stand-in for each that is only in the slices."""
        pairs = zip(gradients, self._present, strict=True)
        return [self._stand_in if g is None and there else g for g, there in pairs]

    def merged_word(self, own: torch.Tensor | None) -> torch.Tensor | None:
        """The word of this rank, with those of gradients that are only in the slices."""
        if own is None or self._word is None:
            return self._word if own is None else own
        return torch.maximum(own, self._word)

    def close(self, discard: bool = False) -> bool:
        """Send every bucket of this round that has not been sent.

        discard: what is sent must not be used; the others wait for it.

        Returns whether a round is needed behind the agreement, because what was sent are not the gradients,
        or not all of them. Raises RuntimeError where gradients changed after they were sent, and for an error
        in sending.
        """
        changed = None if self._adds or self._is_stale else self._find_changed()
        if not self._adds or self._pass is not None:  # with `adds`, only a pass that broke off is incomplete
            self._complete(discard or self._is_stale or changed is not None)
        if self._exchange.error is not None:
            raise RuntimeError(self._exchange.error)
        if changed is not None:
            raise RuntimeError(
                f"the gradient of {changed} changed after it had begun to travel, as overlap='backward' has "
                "it: run all backward passes before a step but the last in no_sync(), change gradients by "
                "clip_grad_norm_ or not at all, and drop them by zero_grad() of the optimizer"
            )
        if self._adds:
            return any(gradient is not None for gradient in gradients_of(self._parameters))
        return self._is_stale

    def _find_changed(self) -> str | None:
        """The name of a parameter whose gradient is not the one that was sent."""
        present = gradients_of(self._parameters)
        for snapshot, bucket in zip(self._snapshots, self._buckets, strict=False):
            position = snapshot.first_changed([present[i] for i in bucket.indices])
            if position is not None:
                return self._names[bucket.indices[position]]
        return None

    # Behind the agreement

    def settle(self, again: bool) -> None:
        """All ranks have agreed. again: to one more round."""
        self._start_over()
        if again:
            self._complete()
            self._start_over()
        elif self._adds:
            self._exchange.clear()

    def abandon(self, rounds: int, keep: bool) -> None:
        """No rank reduces.

        rounds: of the rank that took part in most.
        keep: with `adds`, whether the sums are right.
        """
        self._start_over()
        while self.rounds < rounds:
            self._complete(discard=True)
            self._start_over()
        if not (self._adds and keep):
            self.end_step()

    def end_step(self) -> None:
        """What was reduced has been used."""
        self._exchange.drop()
        self._forget_sums()

    def stop(self) -> None:
        """Nothing is sent any more. Collective."""
        self._end_hooks()
        if not self._adds or self._pass is not None:
            self._complete(discard=True)
        self.end_step()
        self._exchange.drain()

    # Buckets

    def _complete(self, discard: bool = False) -> None:
        """Send all buckets of this round that have not been sent."""
        while self._next < len(self._buckets):
            self._send_next(discard)

    def _send_next(self, discard: bool = False) -> None:
        b, indices = self._next, self._buckets[self._next].indices
        self._next += 1
        if b == 0:
            self.rounds += 1
        gradients = None
        if not discard:
            found = gradients_of([self._parameters[i] for i in indices])
            gradients = dict(zip(indices, found, strict=True))
            if self._adds:
                self._note(b, gradients)
            else:
                self._snapshots.append(GradientSnapshot(found))
        in_phase("gradients", self._exchange.send_gradients)(b, gradients)

    def _note(self, b: int, gradients: BucketGradients) -> None:
        """Keep what the agreement must know of gradients that are gone by then, and set p.grad to None."""
        try:
            check_gradients(self._exchange.transport, b, gradients, self._names)
            self._word = self.merged_word(in_phase("scan", self._word_of)(gradients))
        except Exception as error:  # the agreement tells the others
            self._exchange.error = self._exchange.error or error_text(error)
        with torch._C.DisableTorchFunctionSubclass():
            for i, gradient in gradients.items():
                self._present[i] = self._present[i] or gradient is not None
                self._parameters[i].grad = None


class ArrivingMeans:
    """Averages gradients into the FP32 slices as they arrive, where a BackwardSchedule sends them by
    collectives. A step waits for them here. Building it is collective.

    On a GPU a stream of its own waits for what is received and averages it, so that neither the host nor the
    backward pass waits. On the CPU only the host could wait, so that the transport has memory for all
    buckets.

    transport: sends the gradients.
    adds: rounds add to the slices until drop().
    """

    def __init__(self, transport: CollectiveTransport, adds: bool):
        self.transport, self._adds = transport, adds
        self.buckets, self.dtypes, self._device = transport.buckets, transport.dtypes, transport.device
        self.adds_in_update = [False] * len(self.buckets)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._underway = collections.deque[int]()
        """Buckets that were sent and have not been averaged, all of one round."""
        self._has_sums = False
        """Whether a round has begun since drop()."""
        self._is_first = True
        """Whether the sums begin with the present round."""
        self.error: str | None = None
        """Why what this rank has sent since drop() must not be used."""
        for bucket in self.buckets:
            bucket.gradients.zero_()
        most = max(bucket.slice_numel for bucket in self.buckets) if adds else 0
        self._means = torch.empty(most, dtype=torch.float32, device=self._device)
        """Those of a bucket, before they are added to the sums."""
        # NCCL connects ranks in their first messages, for which the host of each waits: in a backward pass
        # that would be forever, were it for a rank whose own pass broke off.
        transport.send_gradients(0, None)
        transport.discard(0)

    # In backward passes

    def send_gradients(self, b: int, gradients: BucketGradients | None) -> None:
        """Send bucket b, the next one in order. None: the round is only to end, whatever is sent."""
        memory = self.transport.memory[b]
        if memory.aliased and gradients is not None:
            # The next backward pass may write here before the other stream would read: copy on this stream.
            self._take(memory, gradients)
        with self._aside():
            if b == 0:
                self._average_until(0)  # what is left of the last round, whose memory is used again
                self._is_first = not (self._adds and self._has_sums)
                self._has_sums = True
            self._average_until(self.transport.places - 1)
            if not memory.aliased and gradients is not None:
                self._take(memory, gradients)
                for gradient in gradients.values():
                    if gradient is not None and self._stream is not None:  # its owner may free it before then
                        gradient.record_stream(self._stream)
            self.transport.send_gradients(b, None)
            self._underway.append(b)

    def _take(self, memory: GradientMemory, gradients: BucketGradients) -> None:
        try:
            memory.take(gradients)
        except Exception as error:  # the others wait for this rank's part, whatever it holds
            self.error = self.error or error_text(error)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """On the stream that waits for what is received, behind the current one."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def _average_until(self, count: int) -> None:
        """Wait for the buckets that were sent first, and average them, until `count` are on their way."""
        while len(self._underway) > count:
            b = self._underway.popleft()
            sums = self.buckets[b].gradients
            if self._is_first:
                self.transport.average(b, {})
            else:
                means = self._means[: sums.numel()]
                self.transport.average(b, {}, out=means)
                sums.add_(means)

    def drop(self) -> None:
        """What was sent so far counts for nothing."""
        self._has_sums, self.error = False, None

    def clear(self) -> None:
        """Make the sums zeros if there was no round since drop()."""
        if not self._has_sums:
            self.drain()
            for bucket in self.buckets:
                bucket.gradients.zero_()

    def drain(self, count: int = 0) -> None:
        """What is queued next on the current stream finds all but the last `count` buckets averaged."""
        with self._aside():
            self._average_until(count)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    # In a step

    def begin(self) -> None:
        """Nothing: backward passes have begun."""

    def average(self, b: int, gradients: Gradients, squares: torch.Tensor | None = None) -> None:
        """As Transport.average(): waits for the means of bucket b."""
        self.drain(sum(sent > b for sent in self._underway))
        if self.error is not None:
            raise RuntimeError(self.error)
        bucket = self.buckets[b]
        if squares is not None and bucket.is_counted:
            ops.add_squares([bucket.gradients[bucket.part]], squares)

    def end(self) -> None:
        """Nothing: the slices are this rank's own."""
