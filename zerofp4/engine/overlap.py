"""Overlap with backward passes, which send gradients."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from zerofp4 import ops
from zerofp4.distributed import OwnError, in_phase
from zerofp4.engine.assignment import Trained
from zerofp4.engine.buckets import add_gradient_hooks
from zerofp4.engine.exchange import ABSTAIN, BucketExchange
from zerofp4.tensors import Holder


class Sent(NamedTuple):
    """Of a rank before a vote, or of any rank after it.

    all: whether it has sent all buckets for this vote. again: whether they must be sent once more, because
    zero_grad() has dropped some of them.
    """

    all: bool = False
    again: bool = False


class BackwardSchedule:
    """Counts gradients in backward passes, and sends each bucket when it is complete.

    Buckets are sent in one order, each when it and all before it are complete. Before each vote on gradients
    close() sends the missing buckets, so that all ranks have sent each bucket once, whatever passes they ran,
    broke off or ran under no_sync(). If zero_grad() has dropped sent buckets, all ranks send all of them once
    more after the vote.

    holder: of the trained parameters; nothing is sent any more once another optimizer has taken them over.
    """

    def __init__(self, trained: Sequence[Trained], holder: Holder, exchanges: Sequence[BucketExchange]):
        self._parameters, self._names = [one.parameter for one in trained], [one.name for one in trained]
        self._holder, self._exchanges = holder, exchanges
        self._position = {i: n for n, e in enumerate(exchanges) for i in e.bucket.indices}
        """By parameter, that of its bucket."""
        self.is_reduced = False
        """Whether clip_grad_norm_ has averaged the gradients of the next step: then nothing is sent."""
        self.has_sent = False
        """Whether backward passes have sent gradients of the next step, for which unscale_() is too late."""
        self._is_syncing = True  # False under no_sync()
        self._start_over()
        self._end_hooks = add_gradient_hooks(self, self._parameters, BackwardSchedule._mark, averages=True)

    def _start_over(self) -> None:
        self._next = 0  # the position of the bucket that is sent next
        self._is_stale = False  # whether zero_grad() has dropped sent buckets
        self._missing = [set(exchange.bucket.indices) for exchange in self._exchanges]
        """By bucket, the parameters whose gradients are not there."""
        self._sent: dict[int, tuple[torch.Tensor | None, int]] = {}
        """By parameter, the gradient that was sent, and its version then."""
        self._samples: list[Samples] = []
        self._error = OwnError()

    # In a backward pass

    def _mark(self, i: int, _: torch.Tensor) -> None:
        """The gradient of parameter i is there."""
        if not self._is_syncing or self._is_stale or self.is_reduced or self._holder.is_taken_over:
            return
        self._missing[self._position[i]].discard(i)
        while self._next < len(self._exchanges) and not self._missing[self._next]:
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
        """As zero_grad(): sent gradients are not used."""
        is_stale = self._next > 0
        self.has_sent = False
        if is_stale:
            self._is_stale = True
            self._sent.clear()
            self._samples.clear()
        else:
            self._start_over()

    # Before a vote

    def close(self, error: OwnError, reduces: bool) -> Sent:
        """Send the missing buckets, if ranks are to average gradients now.

        error: of this rank; it takes up an error found here. With an error this rank abstains.
        """
        if not reduces:
            return Sent()
        with error:
            self._check_unchanged()
        with error:
            self._complete(abstain=self._is_stale or bool(error))
            self._error.raise_if_any()
            for exchange in self._exchanges:
                exchange.error.raise_if_any()
        return Sent(all=True, again=self._is_stale)

    def _check_unchanged(self) -> None:
        """Raise RuntimeError if a gradient is not the one that was sent. Waits for the device, as the vote
        after it does.
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

    # After it

    def accept(self, again: bool) -> None:
        """All ranks take the step, and have sent all buckets. again: all must do it once more."""
        self._start_over()
        if again:
            self._complete()
            self._start_over()

    def abandon(self, any_sent: bool) -> None:
        """No rank takes the step. any_sent: whether a rank has sent all buckets for it."""
        if any_sent:
            self._complete(abstain=True)
        self._start_over()
        self.end_step()

    def end_step(self) -> None:
        """The averaged gradients have been used."""
        self.has_sent &= self.is_reduced  # an error behind a clip leaves its averaged gradients

    def stop(self) -> None:
        """Nothing is sent any more. Collective."""
        self._end_hooks()
        self._complete(abstain=True)
        for exchange in self._exchanges:
            exchange.finish()

    # Buckets

    def _complete(self, abstain: bool = False) -> None:
        """Send all buckets that have not been sent."""
        while self._next < len(self._exchanges):
            self._send_next(abstain)

    def _send_next(self, abstain: bool = False) -> None:
        exchange = self._exchanges[self._next]
        self._next += 1
        gradients = ABSTAIN
        if not abstain:
            indices = exchange.bucket.indices
            gradients = ops.gradients_of([self._parameters[i] for i in indices])
            own = dict(zip(indices, gradients, strict=True))
            self._sent |= {i: (g, 0 if g is None else g._version) for i, g in own.items()}
            present = {i: g for i, g in own.items() if g is not None and g.numel()}
            with self._error:  # the vote tells the others
                self._samples += [Samples(present)] if present else []
        in_phase("gradients", exchange.send)(gradients)


class Samples:
    """Two elements of each of some gradients as they were sent: the first one, and one in the middle."""

    def __init__(self, gradients: dict[int, torch.Tensor]):
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
