"""Overlap with backward passes, which send gradients, or add micro-batches up in FP32 slices."""

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from zerofp4 import ops
from zerofp4.distributed import OwnError, Pending, error_text, in_phase
from zerofp4.engine.assignment import Trained
from zerofp4.engine.buckets import GradientMemory, Gradients, add_gradient_hooks
from zerofp4.engine.collective import CollectiveTransport
from zerofp4.engine.peer import PeerTransport
from zerofp4.engine.step import Transport, check_gradients
from zerofp4.tensors import Holder

BucketGradients = Mapping[int, torch.Tensor | None]
"""p.grad of the parameters of a bucket, by their position among all trainable parameters."""

_REENTRANT = (
    "accumulate='sharded' takes gradients at the end of each backward pass, and every segment of a reentrant "
    "checkpoint is a pass of its own: give checkpoint() use_reentrant=False, or use accumulate='local'"
)


class Rounds(NamedTuple):
    """What a rank has sent in backward passes. One turn through all buckets is a round."""

    count: int = 0  # how many rounds there were, ever
    again: bool = False  # whether one more is needed
    broken: bool = False  # whether what was sent must not be used


class BackwardSchedule:
    """Notices gradients as backward passes make them, and sends each bucket when it is complete.

    Buckets are sent in one order, each when all of its gradients are there and those before it have been
    sent. Every rank takes part in the same number of rounds, whatever passes it ran, broke off or ran under
    no_sync(): before each agreement of the ranks, close() sends what is missing; what was sent and then
    dropped by zero_grad() is sent once more behind the agreement, by all.

    With `adds` each backward pass outside of no_sync() is a round; its gradients are added to the FP32
    slices, and p.grad is None afterwards. Without it gradients stay in p.grad, and there is one round before
    each agreement.

    holder: of the trained parameters; nothing is sent any more once another optimizer has taken them over.
    early: whether buckets are sent before the end of a pass.
    find_word: Agreement.find_word(); only with `adds`.
    """

    def __init__(
        self,
        trained: Sequence[Trained],
        holder: Holder,
        transport: "PeerTransport | ArrivingMeans",
        *,
        early: bool,
        adds: bool,
        find_word: Callable[[Sequence[torch.Tensor | None], Sequence[int]], torch.Tensor | None],
    ):
        self._parameters, self._names = [one.parameter for one in trained], [one.name for one in trained]
        self._holder = holder
        self._transport, self._early, self._adds, self._find_word = transport, early, adds, find_word
        self._buckets = transport.buckets
        self._bucket_of = {i: b for b, bucket in enumerate(self._buckets) for i in bucket.indices}
        self.is_reduced = False
        """Whether clip_grad_norm_ has reduced what the next step uses: then nothing is sent."""
        self.has_sent = False
        """Whether backward passes have sent gradients of the next step, for which unscale_() is too late."""
        self._is_syncing = True  # False under no_sync()
        self._rounds = 0  # how many have begun
        self._stand_in = torch.zeros((), dtype=torch.float32, device=self._buckets[0].device)
        """For a gradient that is only in the slices."""
        self._start_over()
        self._forget_sums()
        self._end_hooks = add_gradient_hooks(self, self._parameters, BackwardSchedule._mark, averages=True)

    def _start_over(self) -> None:
        """What is sent next is a new round."""
        self._next = 0  # the bucket that is sent next
        self._is_stale = False  # whether zero_grad() has dropped what this round has sent
        self._missing = [set(bucket.indices) for bucket in self._buckets]
        """By bucket, the parameters whose gradients are not there."""
        self._sent: dict[int, tuple[torch.Tensor | None, int]] = {}
        """Without `adds`, by parameter, the gradient that was sent, and its version then."""
        self._samples: list[Samples] = []
        """Without `adds`, of the gradients in each bucket that was sent."""
        self._pass: int | None = None
        """With `adds`, the backward pass whose end ends the round."""

    def _forget_sums(self) -> None:
        """What the agreement must know of gradients that are only in the slices. With `adds`."""
        self._present = [False] * len(self._parameters)
        self._word: torch.Tensor | None = None

    # In a backward pass

    def _mark(self, i: int, _: torch.Tensor) -> None:
        """The gradient of parameter i is there."""
        if not self._is_syncing or self._is_stale or self.is_reduced or self._holder.is_taken_over:
            return
        self._missing[self._bucket_of[i]].discard(i)
        if self._adds and self._pass != torch._C._current_graph_task_id():
            self._pass = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        while self._early and self._next < len(self._buckets) and not self._missing[self._next]:
            self._send_next()
        self.has_sent |= self._adds or self._next > 0

    @torch.no_grad()
    def _end_backward(self) -> None:
        if torch._C._current_autograd_node() is not None:
            # A pass inside another one. Ranks may have different numbers of them, and hang as each ends a
            # round: it ends none, and every rank raises in the agreement.
            self._transport.error = self._transport.error or _REENTRANT
        elif self._pass is not None:  # a pass with others inside queues this once behind each of them
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
        self.has_sent = False
        self._sent.clear()
        self._samples.clear()
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

    def close(self, error: OwnError, reduces: bool) -> Rounds:
        """Send every bucket of this round that has not been sent, if ranks are to reduce gradients now.

        error: of this rank; it takes up what goes wrong here. What is sent with an error is used by nobody,
            but the others wait for it.
        """
        again = False
        if reduces:
            with error:
                self._check_unchanged()
            with error:
                if not self._adds or self._pass is not None:  # with `adds`, else no pass broke off
                    self._complete(discard=self._is_stale or bool(error))
                if self._transport.error is not None:
                    raise RuntimeError(self._transport.error)
            # What was sent are not the gradients, or not all of them.
            left = self._adds and any(gradient is not None for gradient in ops.gradients_of(self._parameters))
            again = self._is_stale or left
        return Rounds(self._rounds, again, self._transport.error is not None)

    def _check_unchanged(self) -> None:
        """Raise RuntimeError where the gradient of a parameter is not the one that was sent. Waits for the
        device, as the agreement behind it does.
        """
        present = ops.gradients_of([self._parameters[i] for i in self._sent])
        changed = [
            i
            for now, (i, (gradient, version)) in zip(present, self._sent.items(), strict=True)
            if now is not gradient or (gradient is not None and gradient._version != version)
        ]
        if not changed and self._samples:  # writes that no version counts, as those of unscale_()
            indices = itertools.chain.from_iterable(sample.indices for sample in self._samples)
            flags = torch.cat([sample.changed() for sample in self._samples]).tolist()
            changed = list(itertools.compress(indices, flags))
        if changed:
            raise RuntimeError(
                f"the gradient of {self._names[changed[0]]} changed after it had begun to travel, as "
                "overlap='backward' has it: run all backward passes before a step but the last in no_sync(), "
                "change gradients by clip_grad_norm_ or not at all (unscale_() of a GradScaler does), drop "
                "them by zero_grad() of the optimizer, and give checkpoint() use_reentrant=False where "
                "several segments use one weight"
            )

    # Behind the agreement

    def resend(self, again: bool) -> None:
        """All ranks have agreed. again: to one more round."""
        self._start_over()
        if again:
            self._complete()
            self._start_over()

    def abandon(self, rounds: Rounds) -> None:
        """No rank reduces: take part in what other ranks have sent alone. rounds: the largest of all ranks.
        With `adds` the sums stay unless they are broken.
        """
        self._start_over()
        while self._rounds < rounds.count:
            self._complete(discard=True)
            self._start_over()
        if not self._adds or rounds.broken:
            self.end_step()

    def end_step(self) -> None:
        """What was reduced has been used."""
        self.has_sent &= self.is_reduced  # an error behind a clip leaves what it has reduced
        self._transport.drop()
        self._forget_sums()

    def stop(self) -> None:
        """Nothing is sent any more. Collective."""
        self._end_hooks()
        if not self._adds or self._pass is not None:
            self._complete(discard=True)
        self.end_step()
        self._transport.drain()

    # Buckets

    def _complete(self, discard: bool = False) -> None:
        """Send all buckets of this round that have not been sent."""
        while self._next < len(self._buckets):
            self._send_next(discard)

    def _send_next(self, discard: bool = False) -> None:
        b, indices = self._next, self._buckets[self._next].indices
        self._next += 1
        self._rounds += b == 0
        gradients = None
        if not discard:
            found = ops.gradients_of([self._parameters[i] for i in indices])
            gradients = dict(zip(indices, found, strict=True))
            if self._adds:
                self._note(b, gradients)
            else:
                self._remember(gradients)
        in_phase("gradients", self._transport.send_gradients)(b, gradients)

    def _remember(self, gradients: BucketGradients) -> None:
        """Keep what _check_unchanged() compares."""
        self._sent |= {i: (g, 0 if g is None else g._version) for i, g in gradients.items()}
        try:
            present = {i: g for i, g in gradients.items() if g is not None and g.numel()}
            self._samples += [Samples(present)] if present else []
        except Exception as error:  # the agreement tells the others
            self._transport.error = self._transport.error or error_text(error)

    def _note(self, b: int, gradients: BucketGradients) -> None:
        """Keep what the agreement must know of gradients that are gone by then, and set p.grad to None."""
        try:
            check_gradients(self._transport, b, gradients, self._names)
            word = in_phase("scan", self._find_word)(list(gradients.values()), list(gradients))
            self._word = self.merged_word(word)
        except Exception as error:  # the agreement tells the others
            self._transport.error = self._transport.error or error_text(error)
        with torch._C.DisableTorchFunctionSubclass():
            for i, gradient in gradients.items():
                self._present[i] = self._present[i] or gradient is not None
                self._parameters[i].grad = None


class Samples:
    """Two elements of each of some gradients as they were sent: the first one, and one in the middle."""

    def __init__(self, gradients: Mapping[int, torch.Tensor]):
        self.indices, self._gradients = list(gradients), list(gradients.values())
        self._values = self._read()

    def changed(self) -> torch.Tensor:
        """bool, by index, on the device: whether they have other bytes now."""
        return self._read().ne(self._values).any(1)

    def _read(self) -> torch.Tensor:
        # The views are not kept: Module.to() swaps no gradient that has one.
        return torch.stack(list(map(_two_elements, self._gradients))).view(torch.uint8)


def _two_elements(tensor: torch.Tensor) -> torch.Tensor:
    middle = sum((n - 1) // 2 * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((2,), (middle,))


class ArrivingMeans(Transport):
    """Averages gradients into the FP32 slices as they arrive, where a BackwardSchedule sends them by
    collectives. A step waits for them in average(). Building it is collective.

    On a GPU a stream of its own waits for what is received and averages it, so that neither the host nor the
    backward pass waits. On the CPU only the host could wait, so that the transport has memory for all
    buckets.

    adds: rounds add to the slices until drop().
    """

    def __init__(self, transport: CollectiveTransport, adds: bool):
        self._transport, self._adds = transport, adds
        self.buckets, self.memory = transport.buckets, transport.memory
        self.dtypes, self.sent_bytes = transport.dtypes, transport.sent_bytes
        self.adds_in_update = [False] * len(self.buckets)
        self._device = self.buckets[0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._underway = collections.deque[int]()
        """Buckets that were sent and have not been averaged, all of one round."""
        self._has_sums = False  # whether a round has begun since drop()
        self._is_first = True  # whether the sums begin with the present round
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
        memory = self.memory[b]
        if memory.aliased and gradients is not None:
            # The next backward pass may write here before the other stream would read: copy on this stream.
            self._take(memory, gradients)
        with self._aside():
            if b == 0:
                self._average_until(0)  # what is left of the last round, whose memory is used again
                self._is_first = not (self._adds and self._has_sums)
                self._has_sums = True
            self._average_until(self._transport.in_flight - 1)
            if not memory.aliased and gradients is not None:
                self._take(memory, gradients)
                for gradient in gradients.values():
                    if gradient is not None and self._stream is not None:  # its owner may free it before then
                        gradient.record_stream(self._stream)
            self._transport.send_gradients(b, None)
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
                self._transport.average(b, {})
            else:
                means = self._means[: sums.numel()]
                self._transport.average(b, {}, out=means)
                sums.add_(means)

    def drop(self) -> None:
        """What was sent so far counts for nothing."""
        self._has_sums, self.error = False, None

    def drain(self, count: int = 0) -> None:
        """What is queued next on the current stream finds all but the last `count` buckets averaged."""
        with self._aside():
            self._average_until(count)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    # In a step

    def average(self, b: int, gradients: Gradients, squares: torch.Tensor | None = None) -> None:
        """As Transport.average(): waits for the means of bucket b."""
        self.drain(sum(sent > b for sent in self._underway))
        if self.error is not None:
            raise RuntimeError(self.error)
        means = self.buckets[b].gradients
        if not self._has_sums:
            means.zero_()
        if squares is not None:
            ops.add_squares([means], squares)

    def gather(self, b: int) -> Pending | None:
        return self._transport.gather(b)
