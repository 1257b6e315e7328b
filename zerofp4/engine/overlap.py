"""Buckets that backward passes send, update or bring to the host as soon as their gradients are complete."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from zerofp4 import ops
from zerofp4.distributed import OwnError, in_phase
from zerofp4.engine.buckets import Gradients, add_gradient_hooks
from zerofp4.engine.exchange import ABSTAIN, Abstain, BucketExchange, check_gradients, in_place
from zerofp4.engine.step import Step
from zerofp4.tensors import check_not_averaged


class Schedule:
    """Counts gradients in backward passes, and takes each bucket when its gradients are complete: _accept(i)
    of a schedule is called when the gradient of parameter i is in p.grad.

    weights, gradients: the optimizer's ShardedParameters and OwnGradients.
    """

    _in_order = True  # a bucket also waits for earlier buckets: ranks must exchange buckets in one order

    def __init__(self, weights: Any, exchanges: Sequence[BucketExchange], gradients: Any):
        self._weights, self._exchanges, self._own = weights, exchanges, gradients
        self._parameters, self._names = weights.parameters, weights.names
        self._position = {i: n for n, e in enumerate(exchanges) for i in e.bucket.indices}  # of its bucket
        self.start_over()
        self._is_checked = False  # whether a DistributedDataParallel, which averages too, was looked for
        add_gradient_hooks(self, self._parameters, Schedule._count)

    def start_over(self) -> None:
        """No gradient has been counted."""
        # By bucket, the parameters without a gradient so far.
        self._missing = [set(exchange.bucket.indices) for exchange in self._exchanges]
        self._taken: set[int] = set()  # positions of buckets, also of one that is being taken
        self._error = OwnError()  # of this rank, for the next vote

    def _count(self, i: int, _: torch.Tensor) -> None:
        if self._weights.holder.is_taken_over:
            return
        if not self._is_checked:
            check_not_averaged(set(map(id, self._parameters)))
            self._is_checked = True
        # no_grad() costs as much as all else here, and only passes with create_graph need it.
        with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
            self._accept(i)

    def _complete_with(self, i: int) -> Iterator[int]:
        """Count the gradient of parameter i, and yield the buckets to take now."""
        own = self._position[i]
        self._missing[own].discard(i)
        for n in range(len(self._taken), len(self._exchanges)) if self._in_order else [own]:
            if self._missing[n]:
                return
            self._taken.add(n)
            yield n

    def _rest(self, after: int = 0) -> list[int]:
        """Mark all other buckets as taken, and return them, with `after` more turns."""
        rest = [n for n in range(len(self._exchanges) + after) if n not in self._taken]
        self._taken.update(rest)
        return rest


class BackwardSchedule(Schedule):
    """overlap="backward": sends each bucket.

    Before each vote on gradients close() sends the missing buckets, so that all ranks have sent each bucket
    once, whatever passes they ran, broke off or ran under no_sync(). If zero_grad() has dropped sent buckets,
    all ranks send all buckets again after the vote.
    """

    has_sent = False  # whether passes have sent gradients of the next step: then unscale_() is too late
    _is_syncing = True  # False under no_sync()

    def start_over(self) -> None:
        super().start_over()
        self._is_stale = False  # whether zero_grad() has dropped sent buckets
        self._sent: dict[int, ops.Versions] = {}  # by parameter, its sent gradient
        # By sent bucket, the gradients by parameter, and their _samples_of() when they were sent.
        self._samples: list[tuple[dict[int, torch.Tensor], torch.Tensor]] = []

    def _accept(self, i: int) -> None:
        if self._is_syncing and not self._is_stale and self._own.clipped is None:
            self._send(self._complete_with(i))
            self.has_sent |= bool(self._taken)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    def drop(self) -> None:
        """zero_grad() was called: sent gradients are not used."""
        self.has_sent = False
        if self._taken:
            self._is_stale, self._sent, self._samples = True, {}, []
        else:
            self.start_over()

    def close(self, error: OwnError) -> bool:
        """Before a vote on gradients: send the missing buckets, or with an error abstain; add an error found
        here. Returns whether all ranks must send again what zero_grad() has dropped.
        """
        with error:
            self._check_unchanged()
        with error:
            self._send(self._rest(), abstain=self._is_stale or bool(error))
            self._error.raise_if_any()
            for exchange in self._exchanges:
                exchange.error.raise_if_any()
        return self._is_stale

    def _check_unchanged(self) -> None:
        """Raise RuntimeError if a gradient changed since it was sent. Waits for the device."""
        present = ops.gradients_of([self._parameters[i] for i in self._sent])
        pairs = zip(self._sent.items(), present, strict=True)
        changed = [i for (i, sent), gradient in pairs if sent.changed([gradient])]
        if not changed and self._samples:  # a write without a version, such as unscale_()
            now = [_samples_of(gradients.values()).ne(then).any(1) for gradients, then in self._samples]
            indices = itertools.chain.from_iterable(gradients for gradients, _ in self._samples)
            changed = list(itertools.compress(indices, torch.cat(now).tolist()))
        if changed:
            raise RuntimeError(
                f"the gradient of {self._names[changed[0]]} changed after it had begun to travel, as "
                "overlap='backward' has it: run all backward passes before a step but the last in no_sync(), "
                "change gradients by clip_grad_norm_ or not at all (unscale_() of a GradScaler does), drop "
                "them by zero_grad() of the optimizer, and give checkpoint() use_reentrant=False where "
                "several segments use one weight"
            )

    def accept(self, again: bool) -> None:
        """After a vote: all ranks take the step. again: whether one of them must send its buckets again."""
        self.start_over()
        if again:
            self._send(self._rest())
            self.start_over()

    def abandon(self, any_reduces: bool) -> None:
        """After a vote: no rank takes the step. any_reduces: whether a rank has sent all buckets for it."""
        if any_reduces:
            self._send(self._rest(), abstain=True)
        self.start_over()
        self.end_step()

    def end_step(self) -> None:
        """The averaged gradients have been used."""
        self.has_sent &= self._own.clipped is not None  # an error after a clip leaves its averaged gradients

    def stop(self) -> None:
        """Finish all exchanges, before another optimizer takes over the parameters. Collective."""
        self._send(self._rest(), abstain=True)
        for exchange in self._exchanges:
            exchange.finish()

    def _send(self, positions: Iterable[int], abstain: bool = False) -> None:
        for exchange in map(self._exchanges.__getitem__, positions):
            gradients, indices = ABSTAIN, exchange.bucket.indices
            if not abstain:
                gradients = ops.gradients_of([self._parameters[i] for i in indices])
                own = dict(zip(indices, gradients, strict=True))
                self._sent |= {i: ops.Versions([gradient]) for i, gradient in own.items()}
                present = {i: g for i, g in own.items() if g is not None and g.numel()}
                with self._error:
                    self._samples += [(present, _samples_of(present.values()))] if present else []
            in_phase("gradients", exchange.send)(gradients)


def _samples_of(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """uint8 [gradients, bytes]: the first element of each gradient, and one in its middle."""
    pairs = [(g, zip(g.shape, g.stride(), strict=True)) for g in gradients]
    # No view is kept: Module.to() cannot swap a gradient that has one.
    two = [g.as_strided((2,), (sum((n - 1) // 2 * step for n, step in steps),)) for g, steps in pairs]
    return torch.stack(two).view(torch.uint8)


class TakingSchedule(Schedule):
    """Takes the gradients of each bucket out of p.grad, in a backward pass or when it ends.

    Several ranks take incomplete buckets when a pass ends, since other ranks may have all gradients, and
    wait. autograd tells of no end if the pass raised. The end of a nested pass (reentrant checkpoints) is
    ignored: the outer pass may still make gradients.
    """

    _rule: str  # the end of the message if a parameter has had a gradient
    _takes_rest = True  # whether incomplete buckets are taken when a pass ends
    _stream: torch.cuda.Stream | None = None  # of the last hook

    def start_over(self) -> None:
        super().start_over()
        self._pass: int | None = None  # autograd's number of the last backward pass with a gradient

    def _accept(self, i: int) -> None:
        self._follow_stream()
        n = self._position[i]
        is_second = i not in self._missing[n]
        if is_second or n in self._taken:
            which = "a second gradient" if is_second else "a gradient in a second backward pass"
            raise RuntimeError(f"{self._names[i]} got {which} {self._rule}")
        self._take(self._complete_with(i))
        running = torch._C._current_graph_task_id()
        if self._takes_rest and self._pass != running:
            self._pass = running
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    @torch.no_grad()
    def _end_pass(self) -> None:
        if torch._C._current_autograd_node() is None:
            self._take_rest()

    def _follow_stream(self) -> None:
        """Make the current stream wait for the last hook's: each hook runs on its gradient's stream."""
        device = self._exchanges[0].bucket.device
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            if self._stream not in (None, stream):
                stream.wait_stream(self._stream)
            self._stream = stream

    def _take_gradients(
        self, exchange: BucketExchange, failure: OwnError
    ) -> tuple[Gradients | Abstain, list[bool], torch.Tensor | None]:
        """Take the gradients of a bucket out of p.grad. Returns them, which are present, and the word of a
        NaN or Inf. After an error of this rank, or its failure, they stay there.
        """
        indices = exchange.bucket.indices
        if not (self._error or failure):
            with self._error:
                parameters = [self._parameters[i] for i in indices]
                own = ops.gradients_of(parameters)
                check_gradients(exchange, own)
                sent = in_place(exchange, own)
                word = in_phase("scan", self._own.scan)(indices, sent)
                with torch._C.DisableTorchFunctionSubclass():
                    for parameter in parameters:
                        parameter.grad = None
                for gradient in own:
                    if gradient is not None and gradient.is_cuda:  # it may come from another stream
                        gradient.record_stream(torch.cuda.current_stream(gradient.device))
                return sent, [gradient is not None for gradient in own], word
        return ABSTAIN, [False] * len(indices), None


class SumSchedule(TakingSchedule):
    """offload_gradients=True: averages each bucket in every backward pass, and has the host add up the means.

    Several ranks average a bucket when the next one has been sent. They exchange all buckets in every pass,
    so all run equally many.
    """

    _rule = (
        "before the first pass ended, and offload_gradients takes each gradient as soon as it is there: give "
        "checkpoint() use_reentrant=False, and after a pass that raised call step() on every rank"
    )

    def __init__(self, weights: Any, exchanges: Sequence[BucketExchange], gradients: Any):
        # Of a NaN or Inf in any gradient that was added up.
        self.word = torch.zeros((), dtype=torch.int32, device=exchanges[0].bucket.device)
        self._in_order = exchanges[0].bucket.world_size > 1
        self._sent: BucketExchange | None = None
        super().__init__(weights, exchanges, gradients)
        self.drop()

    @property
    def _is_open(self) -> bool:
        """Whether a backward pass has made gradients, and has not ended."""
        return sum(map(len, self._missing)) < len(self._parameters)

    def drop(self) -> None:
        """The sums are used, or zero_grad() was called."""
        self.passes = 0  # how many backward passes are added up
        self._present = [False] * len(self._parameters)
        self._mark = torch.zeros((), dtype=torch.float32, device="cpu")  # written to in each pass
        self.word.zero_()
        if not (self._in_order and self._is_open):  # else other ranks wait for the rest of the pass
            self.start_over()

    def collect(self) -> list[torch.Tensor | None]:
        """By parameter, a tensor that passes write to; None if none has made a gradient. Raises RuntimeError
        for a gradient that was assigned.
        """
        for name, gradient in zip(self._names, ops.gradients_of(self._parameters), strict=True):
            if gradient is not None and not self._error:
                raise RuntimeError(
                    f"{name} has a gradient that was assigned after its backward pass, and offload_gradients "
                    "adds up those that backward passes make"
                )
        return [self._mark if is_present else None for is_present in self._present]

    def add_squares(self, squares: torch.Tensor) -> None:
        """Add the squares of the sums, on the device."""
        own = torch.zeros_like(squares, device="cpu")
        means = [e.bucket.gradients for e in self._exchanges]
        with self._weights.offload.computing():
            ops.add_squares(means, own)
        squares.add_(own.to(squares.device))

    def close(self, error: OwnError) -> None:
        """Before a vote: end a pass that raised. Adds an error of this rank in backward passes, which loses
        the sums. Without a pass the sums are zeros.
        """
        if self._is_open:
            left = len(self._taken)
            self._take_rest()
            with self._error:
                raise RuntimeError(
                    f"a backward pass ended after {left} of {len(self._exchanges)} buckets, since it raised "
                    "or all its gradients came from checkpoint() with use_reentrant=True"
                )
        if self._error:
            with error:
                self._error.raise_if_any()
            self.drop()
        for exchange in self._exchanges:
            if not self.passes:
                exchange.bucket.gradients.zero_()
            if not self._in_order:
                exchange.present = [self._present[i] for i in exchange.bucket.indices]

    def _take_rest(self) -> None:
        if not self._is_open:
            return  # a pass around nested ones has several ends
        self._take(self._rest())
        with self._weights.offload.computing(), self._error:
            self._average(self._sent)
            self._weights.offload.settle()
        error = self._error
        self.start_over()
        self._error, self._sent, self.passes = error, None, self.passes + 1

    def _take(self, positions: Iterable[int]) -> None:
        for exchange in map(self._exchanges.__getitem__, positions):
            gradients, present, word = self._take_gradients(exchange, self._error)
            for i, is_present in zip(exchange.bucket.indices, present, strict=True):
                self._present[i] |= is_present
            if word is not None:
                torch.maximum(self.word, word, out=self.word)
            in_phase("gradients", exchange.send)(gradients)
            del gradients  # to be freed when it is copied
            self._mark.zero_()
            before, self._sent = (self._sent, exchange) if self._in_order else (exchange, None)
            with self._weights.offload.computing(), self._error:
                self._average(before)

    def _average(self, exchange: BucketExchange | None) -> None:
        if exchange is not None:
            in_phase("gradients", exchange.average)(exchange.bucket.gradients, adds=self.passes > 0)


class UpdateSchedule(TakingSchedule):
    """overlap="update": takes each bucket through a whole turn of the step.

    One rank alone takes a bucket as soon as it is complete, and step() takes the rest. With offload it takes
    buckets in order, as several ranks do, since the host updates one bucket while the device makes the
    gradients of the next.

    [Note: when a weight may be written] autograd accumulates a gradient once per pass, after every node that
    computes a part of it has read the weight. So no later node reads the weight; the page on the optimizer
    lists the exceptions. Other ranks write into a weight after the vote on its bucket, which this rank joins
    when its own gradients are complete, or its pass has ended.

    agreement: the ranks, which vote on each bucket. inners: of the masters: one FusedAdamW.
    """

    _rule = (
        "before step(), and overlap='update' uses each gradient as soon as it is there: call step() after "
        "every backward pass, also one that raised, and give checkpoint() use_reentrant=False where several "
        "segments use one weight"
    )

    def __init__(self, step: Step, weights: Any, agreement: Any, gradients: Any, inners: Any):
        self._step, self._agreement, self._inners = step, agreement, inners
        self._votes = step.exchanges[0].bucket.world_size > 1
        self._in_order = self._takes_rest = self._votes or weights.offload.is_used
        self._lag = int(self._in_order)  # in buckets, between two stages: transfers need time
        super().__init__(weights, step.exchanges, gradients)

    def start_over(self) -> None:
        super().start_over()
        self.has_begun = False  # whether a bucket has begun to go through the step
        self._is_refused = False  # whether all ranks have refused the last step: this step only raises
        self._waiting: dict[BucketExchange, tuple[list[bool], torch.Tensor | None]] = {}  # for the vote

    def _accept(self, i: int) -> None:
        with self._weights.breaking("backward()", in_buckets=True):
            super()._accept(i)

    def _take_rest(self) -> None:
        with self._weights.breaking("backward()", in_buckets=True):
            self._take(self._rest(3 * self._lag))

    def _take(self, turns: Iterable[int]) -> None:
        for t in turns:
            self._begin()
            if self._is_refused:
                return
            # Not all parameters in each turn: the work would grow with the square of the number of buckets.
            positions = {t - stage * self._lag for stage in range(4)} & set(range(len(self._exchanges)))
            indices = [i for n in positions for i in self._exchanges[n].bucket.indices]
            with self._error:
                self._weights.check_written(indices)
            with self._weights.offload.computing():
                self._step.turn(self._exchanges, t, self._take_for_vote, self._lag, self._vote_on)
            self._weights.versions.take(indices)

    def _begin(self) -> None:
        """Begin a step, unless one has begun."""
        self._follow_stream()
        if self.has_begun:
            return
        self.has_begun, weights, (fused, *_) = True, self._weights, self._inners.all
        with self._error:
            self._agreement.read()
        self._is_refused = bool(self._error)
        if self._is_refused:
            return
        weights.follow_masters()  # in this step, bucket by bucket
        with self._error:
            weights.check_unchanged()
            if ops.is_capturing(weights.found_inf.device):
                raise RuntimeError("overlap='update': a CUDA graph cannot capture a backward pass or step()")
            if self._inners.found_inf() is not None:
                raise RuntimeError("found_inf on optimizer.inner is not supported with overlap='update'")
            self._inners.check_options()
            on_host = weights.offload.begin(None)
            fused.begin_buckets(self._step.exchanges, self._agreement.skip_in_kernels, on_host=on_host)
        weights.found_inf.zero_()
        self._agreement.decision.first.zero_()  # it grows from bucket to bucket
        self._step.begin(fused.update_bucket, OwnError())

    def _take_for_vote(self, exchange: BucketExchange) -> Gradients | Abstain:
        gradients, *self._waiting[exchange] = self._take_gradients(exchange, self._step.failure)
        return gradients

    def _vote_on(self, exchange: BucketExchange) -> None:
        """Vote on a bucket; the update reads the outcome on the device. After an error of this rank every
        vote carries it, and no rank updates the bucket.
        """
        agreement, error = self._agreement, self._error or exchange.error or self._step.failure
        present, word = self._waiting.pop(exchange)
        if self._votes:
            in_phase("vote", agreement.begin)(present, error, word)
        agreement.decide(word, found_inf=self._weights.found_inf, bucket=len(present))
        if exchange.bucket.is_offloaded:
            self._weights.offload.bring_down_decision()  # for which the update waits
        self._weights.is_between |= not error

    def end_step(self, closure: Callable[[], Any] | None = None, obstacle: str | None = None) -> Any:
        """step(): take the buckets that no backward pass has completed. Returns the result of the closure.

        obstacle: why this rank cannot step, for a RuntimeError; None if the optimizer knows no reason.
        """
        weights, loss, error = self._weights, None, OwnError()
        weights.check_not_taken_over()
        try:
            with weights.breaking("step()", in_buckets=True):
                with error:
                    if closure is not None:
                        with torch.enable_grad():
                            loss = closure()
                    if self.has_begun:  # else _begin() checks
                        weights.check_unchanged()
                    if obstacle is not None:
                        raise RuntimeError(obstacle)
                    for i, gradient in enumerate(ops.gradients_of(self._parameters)):
                        if gradient is not None and self._position[i] in self._taken:
                            found = f"{self._names[i]} has a gradient that was assigned after its update"
                            raise RuntimeError(f"{found} in the backward pass")
                self._begin()
                with self._error:
                    error.raise_if_any()
                self._take(self._rest(3 * self._lag))
                error = self._step.failure or self._error
                if not self._agreement.defers:
                    with error:  # its own comes first
                        self._agreement.read(at_once=True)
                error.raise_if_any()
        finally:
            if weights.is_between:
                self._agreement.count_step()
            weights.is_between = False
            self.start_over()
        return loss

    def give_up(self) -> None:
        """Before a load: join the other ranks in the rest of a step, and change nothing."""
        if self._votes or self.has_begun:  # of several ranks, another may have begun
            self._begin()
            self._step.failure = OwnError(RuntimeError("load_state_dict() came before step()"))
            with OwnError():  # but a CollectiveError is raised
                self.end_step()
            self._agreement.forget(self._agreement.steps)
        self.drop()

    def drop(self) -> None:
        """zero_grad() was called: forget counted gradients, unless a bucket has begun."""
        if not self.has_begun:
            self.start_over()
