"""A step of a ZeRO optimizer: what is agreed on before it, and what is done then."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zerofp4.distributed import CollectiveError, OwnError, error_text, in_phase
from zerofp4.engine import GradientReducer, Peers
from zerofp4.optim.bucketed import PreparedStep
from zerofp4.optim.captured import CapturedSteps
from zerofp4.optim.clipping import clip_arguments, global_norm
from zerofp4.optim.inner import give_gradients
from zerofp4.optim.param_groups import check_finite, host_options_hash
from zerofp4.optim.votes import NOTHING, Agreement, Intent, Travelled
from zerofp4.optim.watch import Snapshot


class SteppedOptimizer(CapturedSteps):
    """An optimizer whose masters are sharded: the half of ZeroFP4Optimizer that takes steps.

    A rank that finds something wrong says so in the vote, and no rank takes the step. What goes wrong behind
    the vote, on one rank, is raised there at the end: until then it takes its part in what the ranks do
    together.
    """

    _peers: Peers | None
    _reducer: GradientReducer
    _factor: torch.Tensor | None
    """float32 []: what the reduced gradients are still to be multiplied by, None where nothing was clipped.
    It holds as long as `_reduced`.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients (unless clip_grad_norm_ did), update the masters, publish the weights.

        closure: evaluated once, with gradients enabled; its result is returned. Collective.
        Raises RuntimeError for gradients that changed since clip_grad_norm_, sparse gradients, another list
        of parameters, a parameter that was moved, written to or unfrozen, or where the optimizer is `broken`;
        ValueError for an lr, betas, eps, weight_decay or momentum that is not finite (but for a tensor on a
        GPU, which the host does not read); FloatingPointError, with on_nonfinite="raise", for gradients with
        a NaN or Inf.

        A CUDA graph of several ranks may capture it where masters are updated in buckets (describe()), after
        an eager step with gradients of the same parameters; every rank captures and replays alike, which
        nobody compares. RuntimeError says what cannot be captured. In a replay a NaN or Inf skips the step on
        every rank, whatever on_nonfinite is.
        """
        if self._is_captured():
            self._capture_step(closure)
            return None
        loss, gradients, intent, word, prepared, error = None, [], None, None, None, OwnError()
        held = self._votes.held
        self._follow_masters()
        try:
            self._tell_unheard()
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if self._rounds is not None and self._reduced is None:
                self._rounds.close()
            gradients = self._gradients()
            reduce = self._reduced is None
            word = self._word(gradients) if reduce else None  # a GPU is at work while the rest is prepared
            self._watch.check(self.param_groups)
            check_finite(self.param_groups)
            if not reduce:
                self._reduced.check_unchanged(gradients)
            intent = self._intent(clip=False, reduce=reduce)
            prepared = self._prepare(gradients, reduce)
        except BaseException as failure:  # whatever it is, an interrupt too: the other ranks must hear of it
            told = getattr(failure, "all_ranks_raise", False) and self._votes.held > held
            if told or isinstance(failure, CollectiveError):  # clip_grad_norm_ in the closure has told them
                raise
            error = OwnError(failure)
        agreed = self._vote(gradients, intent, error, word, prepared is None)
        self._agreed_in_sequence = agreed.in_sequence
        if intent.reduce:
            self._hear(agreed, word)
            self._nonfinite.raise_if_asked()
        are_in_slices = not (intent.reduce or self._reducer.gradients_are_means)
        if agreed.in_sequence and agreed.nonfinite is None and not are_in_slices:
            self._reduce(gradients, error)
        try:
            if self._nonfinite.must_leave_out_update():
                self.found_inf.fill_(1)
            elif agreed.in_sequence:
                self._step_in_sequence(agreed.present, error)
            else:
                self._step_in_buckets(prepared, agreed.present)
        except BaseException as failure:
            if getattr(failure, "unheard", False):
                self._unheard = error_text(failure)
            if self._votes.world_size == 1 or not isinstance(failure, Exception):
                self._break("step()", failure)  # else this rank has gone on with its part of the step
            raise
        finally:  # the other ranks, which may have found nothing wrong, count it as well
            self._reduced = None
            if self._rounds is not None:
                self._rounds.end_step()
            self._nonfinite.count()
            self._steps += 1
        return loss

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Reduce the gradients and scale them so that their norm over all parameters is at most max_norm.

        Returns the norm before that, float32 []; the bits of a 2-norm of the same gradients do not depend on
        the number of ranks. step() uses the scaled gradients, or skips them where they hold a NaN or Inf. In
        a world of one they stay in p.grad, and are scaled as step() reads them: nobody may write there before
        it. Collective.
        Raises ValueError unless max_norm is 0 or more and norm_type positive, RuntimeError and
        FloatingPointError as step() does.
        """
        if self._is_captured():
            raise RuntimeError(
                "clip_grad_norm_ of several ranks cannot be captured: the host reads their vote"
            )
        gradients, intent, word, snapshot, error = [], None, None, None, OwnError()
        self._follow_masters()
        try:
            self._tell_unheard()
            numbers = clip_arguments(max_norm, norm_type)
            gradients = self._gradients()
            self._watch.check(self.param_groups)
            if self._reduced is not None:
                self._reduced.check_unwritten()
            reduce = self._reduced is None or self._reduced.changed(gradients)
            if self._rounds is not None and reduce:
                self._rounds.close()
                gradients = self._gradients()
            word = self._word(gradients) if reduce else None
            snapshot = Snapshot(gradients)
            intent = self._intent(True, reduce, *numbers)
            if not self._reducer.gradients_are_means:
                self._shards.make_gradients()
        except CollectiveError:  # of what travels since a backward pass: there is nobody left to hear of it
            raise
        except BaseException as failure:  # whatever it is, the other ranks must hear of it
            error = OwnError(failure)
        agreed, squares = self._vote(gradients, intent, error, word), None
        if intent.reduce:
            self._reduced = self._factor = None
            self._hear(agreed, word)
            if not self._reducer.gradients_are_means:
                squares = self._reduce(gradients, error)
            self._nonfinite.raise_if_asked()
            if self._rounds is not None and self._rounds.adds:  # they are not in p.grad any more
                snapshot = Snapshot(self._gradients())
            self._reduced = None if error else snapshot
        means, device = self._reducer.means(gradients), self._reducer.device
        total = in_phase("norm", global_norm)(means, intent.norm_type, self.process_group(), device, squares)
        try:
            error.raise_if_any()
        except Exception as failure:  # the others have a norm that is of no use, and hear before they use it
            self._unheard = error_text(failure)
            raise
        if self._factor is not None:
            total = total * self._factor
        factor = (intent.max_norm / (total + 1e-6)).clamp(max=1.0)
        factor.masked_fill_(self._nonfinite.found != 0, 1.0)
        self._factor = factor if self._factor is None else self._factor * factor
        return total

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim.Optimizer's; also forgets what clip_grad_norm_ reduced. Ranks that have gradients
        must call it equally often between steps; no rank waits for another.
        """
        self._reduced = None
        self._cleared += 1
        if self._rounds is not None:
            self._rounds.drop()
        super().zero_grad(set_to_none)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As that of DistributedDataParallel: backward passes under it only accumulate, in p.grad, and the
        next one outside of it reduces all. Does nothing where gradients travel in step() anyway.
        """
        with contextlib.nullcontext() if self._rounds is None else self._rounds.no_sync():
            yield

    # Before the vote

    def _tell_unheard(self) -> None:
        if self._peers is not None:
            OwnError(self._peers.take_error()).raise_if_any()
        unheard, self._unheard = self._unheard, None
        if unheard is not None and self._votes.world_size > 1:
            raise RuntimeError(f"this rank could not finish its part of an earlier call: {unheard}")
        self._raise_if_broken()

    def _gradients(self) -> list[torch.Tensor | None]:
        """p.grad of all trainable parameters, which can be read."""
        try:
            gradients = self._watch.gradients()
            self._reducer.check(gradients, self._shards.names)
        except Exception:
            self._watch.check(self.param_groups)  # whose error comes first, for it may be the reason
            raise
        gradients = self._reducer.keep_apart(self._shards.parameters, gradients)
        return gradients if self._rounds is None else self._rounds.merged(gradients)

    def _word(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        word = in_phase("scan", self._nonfinite.word)(gradients)
        return word if self._rounds is None else self._rounds.word(word)

    def _intent(self, clip: bool, reduce: bool, *numbers: float) -> Intent:
        options = 0 if self._votes.world_size == 1 else host_options_hash(self.param_groups)
        return Intent(clip, reduce, self._steps, options, self._cleared, *numbers)

    def _can_update_in_buckets(self) -> bool:
        return self._bucketed.find_obstacle() is None

    def _prepare(self, gradients: Sequence[torch.Tensor | None], reduce: bool) -> PreparedStep | None:
        """Have what the step needs; None for one that does one thing after the other."""
        self._push_options()
        if not self._can_update_in_buckets():
            self._shards.make_gradients()
            return None
        present = self._votes.expected(gradients)
        factor = None if reduce else self._factor
        begun_with = gradients if reduce or self._reducer.gradients_are_means else None
        return self._bucketed.prepare(begun_with, present, factor, self._nonfinite.for_update())

    def _vote(self, gradients, intent, error, word, in_sequence=True) -> Agreement:
        self._cleared = 0  # on every rank, whatever comes of the vote
        rounds, travelled = self._rounds, NOTHING
        if rounds is not None:
            reduce = self._reduced is None if intent is None else intent.reduce
            again = reduce and rounds.close(discard=True)  # where an error came before it
            travelled = Travelled(rounds.total, again, self._reducer.error is not None)
        arguments = gradients, intent, error, word, self.param_groups, in_sequence, travelled
        try:
            agreed = in_phase("vote", self._votes.agree)(*arguments)
        except Exception:
            error.take()  # of a vote that failed
            if rounds is not None:
                told = self._votes.travelled
                rounds.abandon(told.rounds, keep=not told.broken)
            raise
        if rounds is not None:
            rounds.settle(agreed.again)
        return agreed

    # Behind it

    def _hear(self, agreed: Agreement, word: torch.Tensor | None) -> None:
        """Of gradients with a NaN or Inf, in a world of one by what this rank alone voted."""
        if self._votes.world_size == 1:
            self._nonfinite.hear_on_device(word)
        else:
            self._nonfinite.hear(agreed.nonfinite)

    def _reduce(self, gradients: Sequence[torch.Tensor | None], error: OwnError) -> torch.Tensor | None:
        squares = None
        with error:
            squares = self._reduce_gradients(gradients)
        if self._votes.world_size == 1:
            error.raise_if_any()
        return squares

    def _reduce_gradients(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Returns the sums of the squares of this rank's means, where they are known by then."""
        return in_phase("gradients", self._reducer.reduce)(gradients)

    def _step_in_buckets(self, prepared: PreparedStep, present: Sequence[bool]) -> None:
        """Reduce gradients, unless that is done, update and publish, in a pipeline."""
        self._bucketed.run(prepared, present, lambda update: self._publish(prepared.found, update=update))
        self._pull_options()

    def _step_in_sequence(self, present: Sequence[bool], error: OwnError) -> None:
        """Update and publish, of which nothing has an effect on a rank that could not reduce."""
        if not error:
            with error:
                in_phase("update", self._update_masters)(present)
        if self._votes.world_size == 1:
            error.raise_if_any()
        self._publish(self._nonfinite.for_update(), error=error.take())

    def _update_masters(self, present: Sequence[bool]) -> None:
        """Step the inner optimizers, with gradients of the parameters that have one on any rank."""
        factor = None if self._reduced is None else self._factor
        if factor is not None and not self.inners.read_clip_factor():
            torch._foreach_mul_([buffer.gradients for buffer in self._shards.buffers], factor)
            factor = None
        give_gradients(self._reduced_gradients(present))
        self.inners.step(found_inf=self._found_for_update(), clip_factor=factor)
        self._pull_options()

    def _found_for_update(self) -> torch.Tensor | None:
        """What the optimizers are to read on the device, where they can be told there. Of ranks that share
        memory whether one did not come, whose gradients are then not what they should be.
        """
        if self._peers is None:
            return self._nonfinite.for_update()
        return self._peers.failed if self.inners.heed_found_inf() else None

    def _reduced_gradients(
        self, present: Sequence[bool]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """By what is optimized, those of parameters that have one on any rank."""
        rows = zip(self._shards.optimized, self._shards.optimized_gradients, present, strict=True)
        for masters, gradients, somewhere in rows:
            yield from zip(masters, gradients if somewhere else [None] * len(masters), strict=True)
