"""overlap="update": backward passes take each bucket through a whole step, and step() takes the rest."""

import contextlib
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from zerofp4 import ops
from zerofp4.distributed import OwnError, in_phase
from zerofp4.engine import (
    ABSTAIN,
    Abstain,
    BucketExchange,
    BucketGradients,
    LocalExchange,
    Peers,
    Sent,
    Step,
    add_gradient_hooks,
    check_gradients,
)
from zerofp4.optim.adamw import BucketUpdate
from zerofp4.optim.agreement import Agreement, Call
from zerofp4.optim.inner import InnerOptimizers
from zerofp4.optim.sharded import ShardedParameters
from zerofp4.optim.soundness import Soundness
from zerofp4.optim.state_dict import SavedState


class EarlyUpdates:
    """Updates inside backward passes: counts gradients as they are made, and takes the buckets that are
    complete.

    One rank alone takes a bucket as soon as it is complete, and step() takes the rest. Several ranks take
    buckets in one order, each one when those before it are complete, too. They take the rest at the end of a
    backward pass, since other ranks may have had all gradients, and wait. Each bucket has an agreement of its
    own before its update.

    [Note: when a weight may be written] autograd accumulates the gradient of a parameter once in a pass,
    behind every node that computes a part of it, and such a node has read the weight by then. So nothing of
    this pass reads the weight any more, with three exceptions. A node that saved the weight for another
    gradient alone (of `weight.detach()`) fails, since the update counts as a write in place. Reentrant
    checkpoints accumulate once for each segment: a weight that two segments use gets a second gradient, which
    is refused. A segment that is recomputed later and reads the weight without a gradient finds new values;
    nothing can tell. Other ranks write into a weight behind the agreement on its bucket, which this rank
    joins when its own gradients are complete, or its pass has ended.

    The arguments are what the optimizer takes a plain step with. peers: None where ranks share no memory.
    """

    def __init__(
        self,
        shards: ShardedParameters,
        inners: InnerOptimizers,
        agreement: Agreement,
        step: Step,
        update: BucketUpdate,
        peers: Peers | None,
        saved: SavedState,
        sound: Soundness,
    ):
        self._shards, self._inners, self._agreement = shards, inners, agreement
        self._step, self._update, self._peers = step, update, peers
        self._saved, self._sound = saved, sound
        self._exchanges, self._buckets = step.exchanges, shards.buckets
        self._device = shards.found_inf.device
        self._bucket_of = {i: b for b, bucket in enumerate(self._buckets) for i in bucket.indices}
        self._in_order = agreement.world_size > 1
        self._lag = int(self._in_order)
        """How many buckets behind the one that is sent the next stage works: what is sent needs time."""
        self._stream: torch.cuda.Stream | None = None
        """The stream on which something was queued last."""
        self._start_over()
        add_gradient_hooks(self, shards.parameters, EarlyUpdates._note_gradient, averages=True)

    def _start_over(self) -> None:
        """A step has ended."""
        self._has_begun = False
        """Whether a bucket has begun to go through the step."""
        self._is_refused = False
        """Whether no bucket does, since every rank raises an error of the last step in this one."""
        self._error = OwnError()
        """The error of this rank, which step() raises. Until then every agreement on a bucket carries it: no
        rank updates the bucket, and all cast it from its masters as they are.
        """
        self._waiting: dict[BucketExchange, tuple[dict[int, bool], torch.Tensor | None]] = {}
        """Of buckets between send and update: which parameters have a gradient, the word of a NaN."""
        self._pass: int | None = None
        """The last backward pass that has made a gradient."""
        self._is_over = False
        """Whether the rest was taken."""
        self._missing = [set(bucket.indices) for bucket in self._buckets]
        """By bucket, the parameters that have had none."""
        self._taken: set[int] = set()
        """Buckets that have gone, or are about to go, through a step."""

    # In a backward pass

    def _note_gradient(self, i: int, _: torch.Tensor) -> None:
        """The gradient of parameter i is in p.grad."""
        if self._shards.holder.is_taken_over:
            return
        with self._breaking("backward()"):
            self._follow_stream()
            for b in self._complete_with(i):
                self._take_turn(b)
            self._watch_end_of_pass()

    def _complete_with(self, i: int) -> list[int]:
        """The buckets to be taken now that the gradient of parameter i is there.

        Raises RuntimeError for a second gradient since the last step, or one of a second backward pass whose
        bucket went with the first.
        """
        b = self._bucket_of[i]
        is_second = i not in self._missing[b]
        if is_second or b in self._taken:
            which = "a second gradient" if is_second else "a gradient in a second backward pass"
            raise RuntimeError(
                f"{self._shards.names[i]} got {which} before step(), and overlap='update' uses each "
                "gradient as soon as it is there: call step() after every backward pass, also one that "
                "raised, and give checkpoint() use_reentrant=False where several segments use one weight"
            )
        self._missing[b].discard(i)
        if self._in_order:
            first = end = len(self._taken)
            while end < len(self._buckets) and not self._missing[end]:
                end += 1
            complete = list(range(first, end))
        else:
            complete = [] if self._missing[b] else [b]
        self._taken.update(complete)
        return complete

    def _watch_end_of_pass(self) -> None:
        """Have a pass of several ranks take the rest at its end: other ranks may have gradients that this one
        lacks, and wait. A pass that broke off calls nothing; nor does one inside of another (of a segment
        that a reentrant checkpoint recomputes), behind which there may be more gradients.
        """
        running = torch._C._current_graph_task_id()
        if self._in_order and self._pass != running:
            self._pass = running
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    @torch.no_grad()
    def _end_pass(self) -> None:
        if torch._C._current_autograd_node() is None:
            with self._breaking("backward()"):
                self._take_rest()

    def _take_rest(self) -> None:
        """Take the buckets that have not been taken, and the stages behind the last one."""
        self._follow_stream()
        if self._is_over:
            return
        self._is_over, count = True, len(self._buckets)
        rest = [b for b in range(count) if b not in self._taken]
        self._taken.update(rest)
        for turn in [*rest, *range(count, count + 3 * self._lag)]:
            self._take_turn(turn)

    def _follow_stream(self) -> None:
        """The current stream waits for what was queued here on another one. autograd runs each hook on the
        stream of its gradient, and lets the caller of backward() wait for these streams at the end.
        """
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    # One turn, as in Step.run()

    def _take_turn(self, turn: int) -> None:
        """A turn of the step, with a vote on each bucket; one rank alone does all of it to one bucket. The
        host looks at these buckets alone, so that its work in a pass does not grow with the square of their
        number.
        """
        if not self._has_begun:
            self._begin()
        if self._is_refused:
            return
        stages = {turn - stage * self._lag for stage in range(4)} & set(range(len(self._buckets)))
        mine = [i for b in stages for i in self._buckets[b].indices]
        with self._error:
            self._shards.check_written(mine)
        self._step.turn(self._exchanges, turn, self._take_gradients, self._lag, self._vote_on)
        self._shards.accept_values(mine)

    def _begin(self) -> None:
        """Do what a step does before its first bucket."""
        self._has_begun = True
        with self._error:
            self._read_agreements(self._inners.param_groups)
        if self._error:
            self._is_refused = True
            return
        if not self._shards.weights_follow:
            self._shards.accept_values()  # the weights follow the masters in this step, bucket by bucket
            self._shards.follow_masters()
        param_groups = self._saved.param_groups()
        with self._error:
            if self._peers is not None:
                self._peers.check()
            self._sound.raise_if_broken()
            if ops.is_capturing(self._device):
                raise RuntimeError("overlap='update': a CUDA graph cannot capture a backward pass or step()")
            if self._inners.found_inf() is not None:
                raise RuntimeError("overlap='update' heeds no found_inf of yours: it would come too late")
            self._inners.sync_options(param_groups)
            self._update.begin(self._agreement.skip_in_kernels)
            self._shards.check_unchanged(param_groups)
        self._shards.found_inf.zero_()
        self._agreement.begin_buckets()
        self._step.begin(self._update, OwnError())

    def _take_gradients(self, exchange: BucketExchange) -> BucketGradients | Abstain:
        """Take the gradients of a bucket out of p.grad. After an error of this rank they stay there."""
        indices, gradients = exchange.bucket.indices, ABSTAIN
        present, word = dict.fromkeys(indices, False), None
        if not (self._error or self._step.failure):
            with self._error:
                parameters = [self._shards.parameters[i] for i in indices]
                own = ops.gradients_of(parameters)
                check_gradients(exchange, own, [self._shards.names[i] for i in indices])
                word = in_phase("scan", self._agreement.find_word)(own, indices)
                gradients = exchange.in_place(own) if isinstance(exchange, LocalExchange) else own
                present = {i: g is not None for i, g in zip(indices, own, strict=True)}
                with torch._C.DisableTorchFunctionSubclass():
                    for parameter in parameters:
                        parameter.grad = None
                for gradient in own:
                    if gradient is not None and gradient.is_cuda:  # it may come from another stream
                        gradient.record_stream(torch.cuda.current_stream(gradient.device))
        self._waiting[exchange] = present, word
        return gradients

    def _vote_on(self, exchange: BucketExchange) -> None:
        """The vote of all ranks on the update of a bucket, which the update reads on the device."""
        agreement, found_inf = self._agreement, self._shards.found_inf
        error = self._error or exchange.error or self._step.failure
        present, word = self._waiting.pop(exchange)
        if agreement.world_size == 1:
            self._update.present = present
        else:
            call = Call(is_clip=False, reduces=True, step=self._saved.steps)
            groups = self._inners.param_groups  # as of the first bucket, whatever a scheduler has done since
            in_phase("vote", agreement.begin)(list(present.values()), call, error, word, groups, Sent())
        agreement.accept_nonfinite(word)
        agreement.write_skip()
        torch.maximum(found_inf, agreement.skip, out=found_inf)
        if not error:
            self._sound.is_between = True

    # Calls of the optimizer

    @property
    def is_open(self) -> bool:
        """Whether a backward pass of this rank has made gradients since the last step(), or begun with a
        bucket. Another rank may have, and wait for this one.
        """
        counts = zip(self._missing, self._buckets, strict=True)
        return self._has_begun or any(len(missing) < len(bucket.indices) for missing, bucket in counts)

    def step(self, closure: Callable[[], Any] | None, is_scaled: bool) -> Any:
        """Take the buckets that no backward pass has completed, and end the step.

        is_scaled: whether a GradScaler has scaled the loss.
        """
        self._shards.check_not_taken_over()
        loss, error = None, OwnError()
        try:
            with self._breaking("step()"):
                with error:
                    if closure is not None:
                        with torch.enable_grad():
                            loss = closure()
                    self._check_can_end(is_scaled)
                self._follow_stream()
                if not self._has_begun:
                    self._begin()
                with self._error:
                    error.raise_if_any()
                self._take_rest()
                error = self._step.failure or self._error
                if not self._agreement.defers:
                    self._read_agreements(self._inners.param_groups, error)
                error.raise_if_any()
        finally:
            if self._sound.is_between or (self._agreement.defers and not self._is_refused):
                self._agreement.count_step()
                self._saved.steps += 1
            self._sound.is_between = False
            self._start_over()
        return loss

    def _check_can_end(self, is_scaled: bool) -> None:
        self._sound.raise_if_broken()
        if is_scaled:
            raise RuntimeError(
                "a GradScaler has scaled the loss, and overlap='update' has used gradients as they were"
            )
        if self._has_begun:
            self._shards.check_unchanged(self._saved.param_groups())
        for i, gradient in enumerate(ops.gradients_of(self._shards.parameters)):
            if gradient is not None and self._bucket_of[i] in self._taken:
                raise RuntimeError(
                    f"{self._shards.names[i]} has a gradient that was assigned after its update in the "
                    "backward pass"
                )

    def zero_grad(self) -> None:
        """Forget the gradients of buckets that were not complete, unless a bucket was."""
        if not self._has_begun:
            self._start_over()

    def give_up(self) -> None:
        """Before a load: take this rank's part in what is left of a step, and change nothing more: weights
        neither, whose values the load may look at.
        """
        if self._agreement.world_size == 1 and not self.is_open:  # of several, another may have an open pass
            return
        if not self._has_begun:
            self._begin()
        with contextlib.suppress(RuntimeError):
            with self._step.failure:
                raise RuntimeError("load_state_dict() came before step()")
            self.step(None, is_scaled=False)
        self._agreement.drop_unread()

    def find_if_sound(self) -> None:
        """Find out if ranks took some buckets of the last step and not all. Waits for the device."""
        if not self._has_begun:
            with contextlib.suppress(RuntimeError):  # the next step raises it
                self._read_agreements()

    # Behind an error

    def _read_agreements(self, *how: Any) -> None:
        """Agreement.read() of buckets. Breaks the optimizer where ranks took some of them and not all."""
        try:
            self._agreement.read(*how)
        except Exception as error:
            self._sound.is_between = False
            if self._agreement.taken:
                self._sound.mark_broken("step()", error)
            raise

    @contextlib.contextmanager
    def _breaking(self, call: str) -> Iterator[None]:
        """As Soundness.breaking(), but an error before the first update changes nothing."""
        try:
            yield
        except BaseException as error:
            if self._sound.is_between and self._sound.broken is None:
                self._sound.mark_broken(call, error)
            raise


def check_trainer(frame: FrameType | None) -> None:
    """Raise ValueError if the Trainer of transformers that has called this frame is to clip gradients.

    torch.nn.utils.clip_grad_norm_ would find none: its norm is 0.0. Trainer tells the optimizer nothing about
    it, so its frame is the only place to look.
    """
    while frame is not None and frame.f_globals.get("__name__") != "transformers.trainer":
        frame = frame.f_back
    arguments = None if frame is None else getattr(frame.f_locals.get("self"), "args", None)
    max_norm = getattr(arguments, "max_grad_norm", None)
    if max_norm:
        raise ValueError(
            f"max_grad_norm={max_norm} of TrainingArguments: overlap='update' has used all gradients before "
            "Trainer clips them: pass max_grad_norm=0, or build the optimizer without it"
        )
