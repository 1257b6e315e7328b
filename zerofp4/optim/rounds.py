"""When gradients begin to travel: in backward passes, in rounds that all ranks count alike."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from zerofp4.distributed import error_text, in_phase
from zerofp4.engine import EarlyPeerReducer, EarlyReducer
from zerofp4.optim.watch import Snapshot, gradients_of


class Rounds:
    """Marks gradients as backward passes make them, and has buckets begin to travel.

    Buckets begin in the order of the reducer, each when all of its gradients are there and those before it
    have begun; what is missing at the end of a round is sent as it is, None as zeros. Without `adds` the
    gradients stay in p.grad, and each vote about a reduction has one round before it, which it ends. So
    ranks agree on the number of rounds, whatever passes they ran, broke off or ran under no_sync(). What was
    sent and then dropped by zero_grad() is sent once more, behind the vote, by all.

    With `adds` each backward pass outside of no_sync() is a round, which its end ends; its gradients are
    added to the FP32 slices, and p.grad is None afterwards. `early` says whether buckets begin before that.

    word_of: what a rank votes of a NaN or Inf in gradients. is_reduced: whether clip_grad_norm_ has reduced
    what the next step uses; then nothing is sent.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        reducer: EarlyReducer | EarlyPeerReducer,
        *,
        early: bool,
        adds: bool,
        word_of: Callable[[Sequence[torch.Tensor | None]], torch.Tensor | None],
        is_reduced: Callable[[], bool],
    ):
        self._parameters, self._names, self._reducer = list(parameters), list(names), reducer
        self._early, self.adds = early, adds
        self._word_of, self._is_reduced = word_of, is_reduced
        self._members = [[parameters[i] for i in buffer.indices] for buffer in reducer.buffers]
        self._bucket_of = {i: b for b, buffer in enumerate(reducer.buffers) for i in buffer.indices}
        self.total = 0
        """How many rounds there were."""
        self.is_syncing = True
        self._closed = False
        self._stand_in = torch.zeros((), device=reducer.device)
        self._clear_marks()
        self._forget()
        me = weakref.ref(self)
        with torch._C.DisableTorchFunctionSubclass():
            handles = [
                p.register_post_accumulate_grad_hook(functools.partial(_mark, me, i))
                for i, p in enumerate(self._parameters)
            ]
        self._handles = weakref.finalize(self, _remove, handles)
        self._handles.atexit = False

    def _clear_marks(self) -> None:
        self._task: int | None = None
        """With `adds`, the backward pass whose end is to end the round."""
        self._next = 0
        self._stale = self._again = False
        self._missing = [set(buffer.indices) for buffer in self._reducer.buffers]
        self._snapshots: list[Snapshot] = []

    def _forget(self) -> None:
        """What was added up, with `adds`."""
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
            self._start()

    def end_backward(self) -> None:
        self._complete()
        self._clear_marks()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.is_syncing = self.is_syncing, False
        try:
            yield
        finally:
            self.is_syncing = before

    # Before a vote

    @property
    def _broke_off(self) -> bool:
        """With `adds`, between two backward passes: whether the last one did not end its round."""
        return self._task is not None

    @property
    def is_holding(self) -> bool:
        """Whether the FP32 slices have, or will have, what a step is to use."""
        return self._next > 0 or any(self._present)

    def merged(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """With a stand-in for each gradient that is only in the FP32 slices."""
        if not self.adds:
            return list(gradients)
        pairs = zip(gradients, self._present, strict=True)
        return [self._stand_in if g is None and there else g for g, there in pairs]

    def word(self, own: torch.Tensor | None) -> torch.Tensor | None:
        """What this rank votes: word_of() its own, with those that were added up."""
        if own is None or self._word is None:
            return self._word if own is None else own
        return torch.maximum(own, self._word)

    def close(self, discard: bool = False) -> bool:
        """Before a vote about a reduction, once: have this rank's round begun with altogether. Returns
        whether there is to be another one behind the vote: what was sent are not the gradients, or not all.

        discard: what is sent is of no use, only the others wait for it.
        Raises RuntimeError where gradients changed after they were sent, and what went wrong as they were.
        """
        if self._closed:
            return self._again
        changed = None if self.adds or self._stale else self._find_changed()
        if not self.adds or self._broke_off:
            self._complete(discard or self._stale or changed is not None)
        self._closed, self._again = True, self._stale
        if self._reducer.error is not None:
            raise RuntimeError(self._reducer.error)
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
        """What messages call a parameter whose gradient is not the one that was sent."""
        present = gradients_of(self._parameters)
        for snapshot, buffer in zip(self._snapshots, self._reducer.buffers, strict=False):
            position = snapshot.first_changed([present[i] for i in buffer.indices])
            if position is not None:
                return self._names[buffer.indices[position]]
        return None

    # Behind it

    def settle(self, again: bool) -> None:
        """All ranks have agreed to reduce; again: that one more round is needed."""
        if self._closed and again:
            if not self.adds:
                self._reducer.drop()
            self._clear_marks()
            self._complete()
        elif self._closed and self.adds:
            self._reducer.clear()
        self._closed = False
        self._clear_marks()

    def abandon(self, rounds: int, keep: bool) -> None:
        """No rank reduces. rounds: how many of them the rank that took part in most has seen. keep: with
        `adds`, whether what was added up is right.
        """
        self._clear_marks()
        while self.total < rounds:
            self._complete(discard=True)
            self._clear_marks()
        self._closed = False
        if not (self.adds and keep):
            self._reducer.drop()
            self._forget()

    def end_step(self) -> None:
        """What was reduced has been used."""
        self._reducer.drop()
        self._forget()

    def drop(self) -> None:
        """As zero_grad(): what was sent counts for nothing."""
        if not self.adds:
            self._stale = self._stale or self._next > 0
            if not self._stale:
                self._clear_marks()
            return
        if self._broke_off:
            self._complete(discard=True)
        self._clear_marks()
        self._reducer.drop()
        self._forget()

    def stop(self) -> None:
        """Collective: nothing begins to travel any more."""
        self._handles()
        if not self.adds or self._broke_off:
            self._complete(discard=True)
        self._reducer.drop()
        self._reducer.drain()
        self._clear_marks()
        self._forget()

    # Buckets

    def _complete(self, discard: bool = False) -> None:
        """Begin with all buckets of this round that have not begun."""
        while self._next < len(self._members):
            self._start(discard)
        self.total += 1

    def _start(self, discard: bool = False) -> None:
        b = self._next
        if discard:
            in_phase("gradients", self._reducer.start)(b, None)
        else:
            self._keep_apart()
            gradients = gradients_of(self._members[b])
            indices = self._reducer.buffers[b].indices
            if self.adds:
                self._note(indices, gradients)
            in_phase("gradients", self._reducer.start)(b, dict(zip(indices, gradients, strict=True)))
            if not self.adds:
                self._snapshots.append(Snapshot(gradients))
        self._next += 1

    def _keep_apart(self) -> None:
        """What lies in the place of another that is to be sent."""
        try:
            self._reducer.keep_apart(self._parameters, gradients_of(self._parameters))
        except Exception as error:  # no memory for a clone: told in the vote
            self._reducer.error = self._reducer.error or error_text(error)

    def _note(self, indices: Sequence[int], gradients: Sequence[torch.Tensor | None]) -> None:
        """What a vote is to know of gradients that are gone by then; p.grad is None from now on."""
        every: list[torch.Tensor | None] = [None] * len(self._parameters)
        for i, gradient in zip(indices, gradients, strict=True):
            every[i] = gradient
        try:
            self._reducer.check(every, self._names)
            self._word = self.word(in_phase("scan", self._word_of)(every))
        except Exception as error:  # told in the vote
            self._reducer.error = self._reducer.error or error_text(error)
        with torch._C.DisableTorchFunctionSubclass():
            for i in indices:
                self._present[i] = self._present[i] or every[i] is not None
                self._parameters[i].grad = None


def _mark(owner: "weakref.ref[Rounds]", i: int, _: torch.Tensor) -> None:
    rounds = owner()
    if rounds is not None:
        with torch.no_grad():
            rounds.mark(i)


def _end(owner: "weakref.ref[Rounds]") -> None:
    rounds = owner()
    if rounds is not None:
        with torch.no_grad():
            rounds.end_backward()


def _remove(handles: Sequence[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
