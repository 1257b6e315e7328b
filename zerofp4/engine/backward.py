"""Overlap with backward passes, which send gradients."""

import collections
import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from zerofp4 import ops
from zerofp4.distributed import OwnError, Pending, error_text, in_phase
from zerofp4.engine.assignment import Trained
from zerofp4.engine.buckets import GradientMemory, Gradients, add_gradient_hooks
from zerofp4.engine.collective import CollectiveTransport
from zerofp4.engine.peer import PeerTransport
from zerofp4.engine.step import Transport
from zerofp4.tensors import Holder

BucketGradients = Mapping[int, torch.Tensor | None]
"""p.grad of the parameters of a bucket, by their position among all trainable parameters."""


class Rounds(NamedTuple):
    """How often a rank has sent all buckets. Sending each of them once is a round."""

    count: int = 0  # how many rounds there were, ever
    again: bool = False  # whether one more is needed


class BackwardSchedule:
    """Notices gradients as backward passes make them, and sends each bucket when it is complete.

    Buckets are sent in one order, each when all of its gradients are there and those before it have been
    sent. There is one round before each agreement of the ranks, whatever passes a rank ran, broke off or ran
    under no_sync(): before the agreement, close() sends what is missing; what was sent and then dropped by
    zero_grad() is sent once more behind the agreement, by all.

    holder: of the trained parameters; nothing is sent any more once another optimizer has taken them over.
    """

    def __init__(
        self,
        trained: Sequence[Trained],
        holder: Holder,
        transport: "PeerTransport | ArrivingMeans",
    ):
        self._parameters, self._names = [one.parameter for one in trained], [one.name for one in trained]
        self._holder, self._transport, self._buckets = holder, transport, transport.buckets
        self._bucket_of = {i: b for b, bucket in enumerate(self._buckets) for i in bucket.indices}
        self.is_reduced = False
        """Whether clip_grad_norm_ has reduced what the next step uses: then nothing is sent."""
        self.has_sent = False
        """Whether backward passes have sent gradients of the next step, for which unscale_() is too late."""
        self._is_syncing = True  # False under no_sync()
        self._rounds = 0  # how many have begun
        self._start_over()
        self._end_hooks = add_gradient_hooks(self, self._parameters, BackwardSchedule._mark, averages=True)

    def _start_over(self) -> None:
        """What is sent next is a new round."""
        self._next = 0  # the bucket that is sent next
        self._is_stale = False  # whether zero_grad() has dropped what this round has sent
        self._missing = [set(bucket.indices) for bucket in self._buckets]
        """By bucket, the parameters whose gradients are not there."""
        self._sent: dict[int, tuple[torch.Tensor | None, int]] = {}
        """By parameter, the gradient that was sent, and its version then."""
        self._samples: list[Samples] = []
        """Of the gradients in each bucket that was sent."""

    # In a backward pass

    def _mark(self, i: int, _: torch.Tensor) -> None:
        """The gradient of parameter i is there."""
        if not self._is_syncing or self._is_stale or self.is_reduced or self._holder.is_taken_over:
            return
        self._missing[self._bucket_of[i]].discard(i)
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._send_next()
        self.has_sent |= self._next > 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    def drop(self) -> None:
        """As zero_grad(): what was sent counts for nothing."""
        self._is_stale = self._next > 0
        self.has_sent = False
        self._sent.clear()
        self._samples.clear()
        if not self._is_stale:
            self._start_over()

    # Before the ranks agree

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
                self._complete(discard=self._is_stale or bool(error))
                if self._transport.error is not None:
                    raise RuntimeError(self._transport.error)
            again = self._is_stale
        return Rounds(self._rounds, again)

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
        """No rank reduces: take part in what other ranks have sent alone. rounds: the most of any rank."""
        self._start_over()
        while self._rounds < rounds.count:
            self._complete(discard=True)
            self._start_over()
        self.end_step()

    def end_step(self) -> None:
        """What was reduced has been used."""
        self.has_sent &= self.is_reduced  # an error behind a clip leaves what it has reduced
        self._transport.drop()

    def stop(self) -> None:
        """Nothing is sent any more. Collective."""
        self._end_hooks()
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
    """

    def __init__(self, transport: CollectiveTransport):
        self._transport = transport
        self.buckets, self.memory = transport.buckets, transport.memory
        self.dtypes, self.sent_bytes = transport.dtypes, transport.sent_bytes
        self.adds_in_update = [False] * len(self.buckets)
        self._device = self.buckets[0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._underway = collections.deque[int]()
        """Buckets that were sent and have not been averaged, all of one round."""
        self.error: str | None = None
        """Why what this rank has sent since drop() must not be used."""
        for bucket in self.buckets:
            _ = bucket.gradients  # made on this stream, not on the one that averages
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
            self._transport.average(self._underway.popleft(), {})

    def drop(self) -> None:
        """What was sent so far counts for nothing."""
        self.error = None

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
        if squares is not None:
            ops.add_squares([self.buckets[b].gradients], squares)

    def gather(self, b: int) -> Pending | None:
        return self._transport.gather(b)
