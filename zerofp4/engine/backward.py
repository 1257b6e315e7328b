"""Gradients that are sent while backward passes still make others, and micro-batches that are added up in
slices.
"""

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from zerofp4 import ops
from zerofp4.distributed import error_text, in_phase, start_exchange
from zerofp4.engine.collective import CollectiveTransport
from zerofp4.engine.gradient_memory import GradientMemory, GradientSnapshot, gradients_of
from zerofp4.engine.transport import Arrived, Exchange, Gradients, Transport

BucketGradients = Mapping[int, torch.Tensor | None]
"""p.grad of the parameters of a bucket, by their position among all trainable parameters."""


class EarlyExchange(Exchange, Protocol):
    """An exchange that is begun bucket by bucket before a step. A round is one turn through all buckets."""

    error: str | None
    """Why what this rank has sent since drop() must not be used."""

    def start(self, b: int, gradients: BucketGradients | None) -> None:
        """Send bucket b, the next one in order. None: the round is only to end, whatever is sent."""

    def drop(self) -> None:
        """What was sent so far will arrive, and counts for nothing."""

    def clear(self) -> None:
        """If there was no round since drop(), the sums are zeros."""

    def drain(self) -> None:
        """Have nothing on its way any more."""


class _Underway(NamedTuple):
    """A bucket that was sent and has not been averaged. age: of the sums that it is for. is_first: whether
    they begin with it.
    """

    b: int
    gradients: BucketGradients | None
    age: int
    is_first: bool


class EarlyCollective:
    """EarlyExchange by collectives: buckets are averaged into the FP32 slices as they arrive. Building it is
    collective.

    On a GPU a stream of its own waits for what is received and averages it, so that neither the host nor the
    backward pass waits. On the CPU only the host could wait, so that what is received has memory for all
    buckets.

    transport: of the same number of `places`: 2 on a GPU, None on the CPU.
    adds: rounds add to the slices until drop().
    """

    def __init__(self, transport: CollectiveTransport, places: int | None, adds: bool):
        self._transport, self._adds = transport, adds
        self.buckets, self.dtypes = transport.buckets, transport.dtypes
        self._places = len(self.buckets) if places is None else places
        self._device = transport.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._underway: collections.deque[_Underway] = collections.deque()
        self._age = self._rounds = 0
        self.error: str | None = None
        for bucket in self.buckets:
            bucket.gradients.zero_()
        most = max(bucket.slice_numel for bucket in self.buckets) if adds else 0
        self._means = torch.empty(most, dtype=torch.float32, device=self._device)
        self._squares = torch.zeros(ops.SQUARES, dtype=torch.int64, device=self._device)
        self._connect()

    def _connect(self) -> None:
        """Have all ranks send each other one element. NCCL connects two ranks in their first messages, for
        which the
        host of each waits: in a backward pass that would be forever, were it for a rank whose own pass broke
        off.
        """
        bucket = self.buckets[0]
        if bucket.world_size > 1:
            sent, received = (
                [[row] for row in torch.zeros(bucket.world_size, 1, device=self._device)] for _ in range(2)
            )
            for work in start_exchange(received, sent, bucket.group(), "averaging gradients"):
                work.wait()

    # In backward passes

    def start(self, b: int, gradients: BucketGradients | None) -> None:
        memory = self._transport.memory[b]
        copies = gradients is not None and memory is not None
        if copies and memory.aliased:
            # The next backward pass may write here before the other stream would read: copy on this stream.
            self._take(memory, gradients)
        with self._aside():
            if b == 0:
                self._begin_round()
            while len(self._underway) >= self._places:
                self._land()
            if copies and not memory.aliased:
                self._take(memory, gradients)
            self._transport.send_gradients(b, None)
            local = gradients if memory is None else None
            self._underway.append(_Underway(b, local, self._age, self._rounds == 0))
        if self._stream is not None and gradients is not None and not (copies and memory.aliased):
            for gradient in gradients.values():
                if gradient is not None:  # its owner may free it before it is copied
                    gradient.record_stream(self._stream)
        if b + 1 == len(self.buckets):
            self._rounds += 1

    def _take(self, memory: GradientMemory, gradients: BucketGradients) -> None:
        try:
            memory.take(gradients)
        except Exception as error:  # the others wait for this rank's part, whatever it holds
            self.error = self.error or error_text(error)

    def _begin_round(self) -> None:
        while self._underway:  # their memory is used again
            self._land()
        if not self._adds:  # an earlier round that no step has used
            self._age += 1
        self._squares.zero_()

    def drop(self) -> None:
        self._age += 1
        self._rounds, self.error = 0, None

    def clear(self) -> None:
        if self._rounds == 0:
            with self._aside():  # behind averages of rounds before drop()
                for bucket in self.buckets:
                    bucket.gradients.zero_()

    def drain(self) -> None:
        with self._aside():
            while self._underway:
                self._land()

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """On the stream that waits for what is received, behind the current one."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def _land(self) -> None:
        """Wait for the oldest bucket that is on its way, and average it."""
        b, gradients, age, is_first = self._underway.popleft()
        bucket = self.buckets[b]
        adds = self._adds and not is_first
        out = self._means[: bucket.slice_numel] if adds else bucket.gradients
        if age != self._age or self.error is not None:
            self._transport.discard(b)
            return
        self._transport.average(b, gradients, None if self._adds else self._squares, out)
        if adds:
            bucket.gradients.add_(out)

    # In a step

    def begin(self) -> None:
        """Nothing: the exchange was begun in backward passes."""

    def send_gradients(self, b: int, gradients: Gradients | None) -> None:
        """Nothing: start() has sent them."""

    def can_add_in_update(self, b: int) -> bool:
        return False

    def arrived(self, b: int, gradients: Gradients) -> Arrived:
        raise NotImplementedError("buckets are averaged as they arrive")

    def average(
        self,
        b: int,
        gradients: Gradients,
        squares: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> None:
        with self._aside():
            while any(underway.b <= b for underway in self._underway):
                self._land()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        if self.error is not None:
            raise RuntimeError(self.error)
        if squares is None:
            return
        bucket = self.buckets[b]
        if self._adds:  # those of the means are not those of their sums
            if bucket.is_counted:
                ops.add_squares([bucket.gradients[bucket.part]], squares)
        elif b + 1 == len(self.buckets):
            squares.add_(self._squares)

    def end(self) -> None:
        """Nothing: the slices are this rank's own."""


def early_places(device: torch.device) -> int | None:
    """How many buckets EarlyCollective has memory for: two on a GPU; None, for all, on the CPU."""
    return 2 if device.type == "cuda" else None


class BackwardSchedule:
    """Notices gradients as backward passes make them, and starts the exchange of each bucket when it is
    complete.

    Buckets start in one order, each when all of its gradients are there and those before it have started.
    Every rank takes part in the same number of rounds, whatever passes it ran, broke off or ran under
    no_sync(): before each agreement of the ranks, close() starts what is missing; what was sent and then
    dropped by zero_grad() is sent once more behind the agreement, by all.

    With `adds` each backward pass outside of no_sync() is a round; its gradients are added to the FP32
    slices, and p.grad is None afterwards. Without it gradients stay in p.grad, and there is one round before
    each agreement.

    parameters, names: all trainable ones, and what messages call them.
    transport: checks gradients.
    exchange: sends them.
    early: whether buckets start before the end of a pass.
    word_of: the word of a NaN or Inf in a bucket's gradients, for the agreement; only with `adds`.
    is_reduced: whether clip_grad_norm_ has reduced what the next step uses; then nothing is sent.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        transport: Transport,
        exchange: EarlyExchange,
        *,
        early: bool,
        adds: bool,
        word_of: Callable[[BucketGradients], torch.Tensor | None],
        is_reduced: Callable[[], bool],
    ):
        self._parameters, self._names = list(parameters), list(names)
        self._transport, self._exchange = transport, exchange
        self._early, self.adds = early, adds
        self._word_of, self._is_reduced = word_of, is_reduced
        self._buckets = transport.buckets
        self._bucket_of = {i: b for b, bucket in enumerate(self._buckets) for i in bucket.indices}
        self.rounds = 0
        """How many there were."""
        self.is_syncing = True
        self._closed = False
        self._stand_in = torch.zeros((), device=self._buckets[0].device)
        """For a gradient that is only in the slices."""
        self._start_over()
        self._forget_sums()
        me = weakref.ref(self)
        with torch._C.DisableTorchFunctionSubclass():
            handles = [
                p.register_post_accumulate_grad_hook(functools.partial(_mark, me, i))
                for i, p in enumerate(self._parameters)
            ]
        self._handles = weakref.finalize(self, _remove, handles)
        self._handles.atexit = False

    def _start_over(self) -> None:
        """Of the present round."""
        self._task: int | None = None
        """With `adds`, the backward pass whose end ends the round."""
        self._next = 0
        """The bucket that starts next."""
        self._stale = self._again = False
        """Whether what was sent was dropped; whether another round is needed."""
        self._missing = [set(bucket.indices) for bucket in self._buckets]
        self._snapshots: list[GradientSnapshot] = []

    def _forget_sums(self) -> None:
        """Of all rounds since the last step, with `adds`."""
        self._present = [False] * len(self._parameters)
        self._word: torch.Tensor | None = None

    # In a backward pass

    def mark(self, i: int) -> None:
        """The gradient of parameter i is there."""
        if not self.is_syncing or self._stale or self._is_reduced():
            return
        self._missing[self._bucket_of[i]].discard(i)
        if self.adds:
            task = torch._C._current_graph_task_id()
            if task != self._task:  # else its end has been asked for
                self._task = task
                callback = functools.partial(_end, weakref.ref(self))
                torch.autograd.Variable._execution_engine.queue_callback(callback)
        while self._early and self._next < len(self._missing) and not self._missing[self._next]:
            self._start_bucket()

    def end_backward(self) -> None:
        self._complete()
        self._start_over()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.is_syncing = self.is_syncing, False
        try:
            yield
        finally:
            self.is_syncing = before

    # Before the ranks agree

    @property
    def _broke_off(self) -> bool:
        """With `adds`, between two backward passes: whether the last one did not end its round."""
        return self._task is not None

    @property
    def is_holding(self) -> bool:
        """Whether the FP32 slices have, or will have, what a step is to use."""
        return self._next > 0 or any(self._present)

    def merged(self, gradients: Gradients) -> Gradients:
        """The gradients, with a stand-in for each that is only in the slices."""
        if not self.adds:
            return gradients
        pairs = zip(gradients, self._present, strict=True)
        return [self._stand_in if g is None and there else g for g, there in pairs]

    def merged_word(self, own: torch.Tensor | None) -> torch.Tensor | None:
        """The word of this rank, with those of gradients that are only in the slices."""
        if own is None or self._word is None:
            return self._word if own is None else own
        return torch.maximum(own, self._word)

    def close(self, discard: bool = False) -> bool:
        """Start every bucket of this rank's round that has not started. Once before an agreement.

        discard: what is sent must not be used; the others wait for it. Returns whether a round is needed
        behind the agreement, because what was sent are not the gradients, or not all of them. Raises
        RuntimeError where gradients changed after they were sent, and for an earlier error.
        """
        if self._closed:
            return self._again
        changed = None if self.adds or self._stale else self._find_changed()
        if not self.adds or self._broke_off:
            self._complete(discard or self._stale or changed is not None)
        self._closed, self._again = True, self._stale
        if self._exchange.error is not None:
            raise RuntimeError(self._exchange.error)
        if changed:
            raise RuntimeError(
                f"the gradient of {changed} changed after it had begun to travel, as overlap='backward' has "
                "it: run all backward passes before a step but the last in no_sync(), change gradients by "
                "clip_grad_norm_ or not at all, and drop them by zero_grad() of the optimizer"
            )
        if self.adds:
            self._again = any(g is not None for g in gradients_of(self._parameters))
        return self._again

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
        """All ranks have agreed to reduce. again: one more round is needed."""
        if self._closed and again:
            if not self.adds:
                self._exchange.drop()
            self._start_over()
            self._complete()
        elif self._closed and self.adds:
            self._exchange.clear()
        self._closed = False
        self._start_over()

    def abandon(self, rounds: int, keep: bool) -> None:
        """No rank reduces.

        rounds: of the rank that took part in most.
        keep: with `adds`, whether the sums are right.
        """
        self._start_over()
        while self.rounds < rounds:
            self._complete(discard=True)
            self._start_over()
        self._closed = False
        if not (self.adds and keep):
            self.end_step()

    def end_step(self) -> None:
        """What was reduced has been used."""
        self._exchange.drop()
        self._forget_sums()

    def drop(self) -> None:
        """As zero_grad(): what was sent counts for nothing."""
        if not self.adds:
            self._stale = self._stale or self._next > 0
            if not self._stale:
                self._start_over()
            return
        if self._broke_off:
            self._complete(discard=True)
        self._start_over()
        self.end_step()

    def stop(self) -> None:
        """Nothing is sent any more. Collective."""
        self._handles()
        if not self.adds or self._broke_off:
            self._complete(discard=True)
        self._start_over()
        self.end_step()
        self._exchange.drain()

    # Buckets

    def _complete(self, discard: bool = False) -> None:
        """Start all buckets of this round that have not started."""
        while self._next < len(self._buckets):
            self._start_bucket(discard)
        self.rounds += 1

    def _start_bucket(self, discard: bool = False) -> None:
        b, indices = self._next, self._buckets[self._next].indices
        if discard:
            in_phase("gradients", self._exchange.start)(b, None)
        else:
            found = gradients_of([self._parameters[i] for i in indices])
            gradients = dict(zip(indices, found, strict=True))
            if self.adds:
                self._note(b, gradients)
            in_phase("gradients", self._exchange.start)(b, gradients)
            if not self.adds:
                self._snapshots.append(GradientSnapshot(found))
        self._next += 1

    def _note(self, b: int, gradients: BucketGradients) -> None:
        """Keep what the agreement must know of gradients that are gone by then, and set p.grad to None."""
        try:
            self._transport.check(b, gradients, self._names)
            self._word = self.merged_word(in_phase("scan", self._word_of)(gradients))
        except Exception as error:  # the agreement tells the others
            self._exchange.error = self._exchange.error or error_text(error)
        with torch._C.DisableTorchFunctionSubclass():
            for i, gradient in gradients.items():
                self._present[i] = self._present[i] or gradient is not None
                self._parameters[i].grad = None


def _mark(owner: "weakref.ref[BackwardSchedule]", i: int, _: torch.Tensor) -> None:
    schedule = owner()
    if schedule is not None:
        with torch.no_grad():
            schedule.mark(i)


def _end(owner: "weakref.ref[BackwardSchedule]") -> None:
    schedule = owner()
    if schedule is not None:
        with torch.no_grad():
            schedule.end_backward()


def _remove(handles: Sequence[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
