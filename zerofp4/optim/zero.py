"""ZeRO-1 over NVFP4 weights: masters and optimizer state are sharded, the weights are whole on every rank."""

import contextlib
import math
import secrets
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerofp4 import ops
from zerofp4.distributed import GroupReference, OwnError, exchange, in_phase, rank_and_size, resolve_group
from zerofp4.engine import (
    ABSTAIN,
    Abstain,
    BackwardSchedule,
    Gradients,
    LateGathers,
    Step,
    SumSchedule,
    Update,
    UpdateSchedule,
    find_hosts,
    find_peers,
    find_threads,
    write_master,
)
from zerofp4.nn import free_frozen
from zerofp4.ops import is_capturing
from zerofp4.optim.adamw import FusedAdamW
from zerofp4.optim.agreement import Agreement, Call, Clipped, OwnGradients, global_norm
from zerofp4.optim.build import Checked, Communication, check_announcements, choose_way
from zerofp4.optim.description import describe, show
from zerofp4.optim.inner import InnerOptimizers
from zerofp4.optim.sharded import ShardedParameters
from zerofp4.optim.state_dict import SavedState, with_entries_of_all_ranks


class ZeroFP4Optimizer(torch.optim.Optimizer):
    """A ZeRO optimizer: FP32 master weights sharded over ranks, 4-bit all-gathers of NVFP4 weights.

    It runs any elementwise optimizer of torch, or Muon, on the masters of NVFP4, bf16, fp16 and fp32
    parameters.

    params: parameters or groups of them, as for any torch optimizer, the same on every rank that they are
        sharded over; named_parameters() for checkpoints by name. A group may carry `optimizer_class`,
        `process_group` and `replicated_over` (page on groups).
    optimizer_class, defaults: the class that updates the masters, and its options. It sees 1D pieces of
        parameters, so it must be elementwise, which is tried with a few elements; FusedAdamW is the fastest.
    process_group: all ranks that step together; None is the default group, or a world of one.
    amax_groups: lists of NVFP4 weights that share one amax.
    state: "compact" has FusedAdamW keep masters in 24 bits and moments in 8; a group may choose.
    communication: how gradients and weights travel (Communication).
    offload: the share of masters and state, from 0 to 1 and in whole buckets, that is in host memory. The CPU
        updates it to the same bytes; FusedAdamW only.
    offload_gradients: whether backward passes add up their gradients in host memory, in FP32, instead of in
        p.grad on the GPU.
    offload_threads: how many threads of the CPU update and cast. None: as many as OMP_NUM_THREADS says, or if
        it is not set, or 1 among several ranks of a host, this rank's share of the cores.
    whole_matrices: whether optimizer_class gets whole matrices; None decides by the class (page on Muon).
    masters_from: an earlier optimizer whose masters this one takes over; or where all parameters get their
        values: a folder of safetensors, or a function that is given a name and the parameter. Rank 0 reads
        them, one after the other.
    on_nonfinite: "skip" or "raise", for a step with a NaN or Inf in any rank's gradients.

    Examples:
        >>> zerofp4.convert_model(model)
        >>> adamw = zerofp4.optim.FusedAdamW
        >>> optimizer = zerofp4.ZeroFP4Optimizer(model.named_parameters(), adamw, lr=1e-3)
        >>> model(x).square().mean().backward()
        >>> norm = optimizer.clip_grad_norm_(1.0)
        >>> optimizer.step()
        >>> optimizer.zero_grad()

    step() averages the gradients of all ranks, updates the masters that this rank owns, casts them, and
    gathers the weights in place: 4-bit codes for NVFP4 weights. Masters begin as rank 0's values, and from
    then on the weights follow them, so load a model first.

    Building, step() and clip_grad_norm_() are collective. An error that a rank finds before an update changes
    nothing, and raises on every rank: with NCCL and FusedAdamW on the others in their next step.

    The page on the optimizer describes each option, the page on failures which error is raised where.
    """

    _step_supports_amp_scaling = True
    """So torch's GradScaler calls step() on every rank, also where it has found an Inf, and sets `found_inf`
    and, unless its unscale_() was called, `grad_scale` meanwhile.
    """

    _described: dict[str, Any] | None = None
    """The entries of describe() that never change; None while the optimizer is being built."""

    @torch.no_grad()
    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        process_group: dist.ProcessGroup | None = None,
        amax_groups: Sequence[Sequence[torch.Tensor]] | None = None,
        state: str = "full",
        communication: Communication = Communication(),  # noqa: B008
        offload: float = 0.0,
        offload_gradients: bool = False,
        offload_threads: int | None = None,
        whole_matrices: bool | None = None,
        masters_from: "ZeroFP4Optimizer | str | Path | Callable[..., torch.Tensor] | None" = None,
        on_nonfinite: str = "skip",
        **defaults: Any,
    ):
        group = resolve_group(process_group)
        self.process_group = GroupReference(group)
        rank, self.world_size = rank_and_size(group)
        announcement, error = None, OwnError()
        with error:  # checks that need no other rank and change no parameter
            if not isinstance(params, Iterable):
                raise TypeError(
                    "params must be model.named_parameters(), parameters or parameter groups, got "
                    f"{type(params).__name__}; the next argument is the class of an optimizer"
                )
            super().__init__(params, {})
            checked = Checked(
                self.param_groups,
                group,
                optimizer_class=optimizer_class,
                defaults=defaults,
                amax_groups=amax_groups,
                state=state,
                communication=communication,
                whole_matrices=whole_matrices,
                masters_from=masters_from,
                on_nonfinite=on_nonfinite,
                offload=offload,
                offload_gradients=offload_gradients,
                offload_threads=offload_threads,
            )
            self.param_groups, announcement = checked.param_groups, checked.announcement
        pairs = exchange((announcement, secrets.token_hex(8)), error, group, "building ZeroFP4Optimizer")
        announced, (token, *_) = zip(*pairs, strict=True)
        check_announcements(announced)  # from here on the same on every rank
        transport, reduction, why_collective = choose_way(checked, announced)
        if isinstance(masters_from, ZeroFP4Optimizer) and masters_from._schedule is not None:
            masters_from._schedule.stop()
        # Memory: weights, masters, state
        self.communication = communication
        device = checked.parameters[0].device
        peers, why_no_peers = find_peers(transport, group, device)
        bucket_mb = max(other.bucket_mb for other in announced)
        late = LateGathers(device) if communication.overlap in ("forward", "both") else None
        places = [one.host for one in announced], [one.cores for one in announced]
        threads = checked.offload_threads or find_threads(rank, *places)
        shards = self._shards = ShardedParameters(checked, group, bucket_mb, peers, late, threads)
        free_frozen(checked.parameters)
        sends_early = communication.overlap in ("backward", "both") and self.world_size > 1
        why_at_once = checked.why_at_once
        self._schedule: BackwardSchedule | None = None  # sends gradients in backward passes
        self._early: UpdateSchedule | None = None
        self._sums: SumSchedule | None = None  # adds up gradients in host memory
        with error:  # all of it allocates, and other ranks wait for this one afterwards
            hosts = find_hosts(places[0])
            exchanges = shards.make_exchanges(
                is_ordered=reduction == "ordered",
                sends_early=sends_early,
                hosts=hosts and hosts[0],
                count_steps=lambda: self._agreement.steps,
            )
            masters = dict(zip(map(id, shards.parameters), shards.optimized, strict=True))
            # The optimizers of the masters, in the order in which their classes come first in the groups:
            self.inners = InnerOptimizers(checked.classes, self.param_groups, masters)
            of_class = (one.defaults for one in self.inners.all if type(one) is optimizer_class)
            self.defaults = next(of_class, self.inners.all[0].defaults)
            agreement = self._agreement = Agreement(announced, shards, self.inners, group, on_nonfinite)
            shards.offload.follow(agreement.skip_in_kernels, agreement.decision.present)
            saved = SavedState(shards, self.inners, announced, rank, token, agreement.look)
            self.state = self._saved = saved
            # The parts of a step
            self._offer_parts()
            self._step = Step(exchanges, peers, sends=not sends_early, late=late)
            own = self._gradients = OwnGradients(shards, exchanges, agreement, self.inners)
            # Updates the masters bucket by bucket; None if all are updated at once:
            self._fused: FusedAdamW | None = self.inners.all[0] if why_at_once is None else None
            why_host_waits = agreement.find_why_host_waits(sends_early) or why_at_once
            agreement.defers = why_host_waits is None
            if sends_early:
                self._schedule = BackwardSchedule(shards, exchanges, own)
            if communication.overlap == "update":
                self._early = UpdateSchedule(self._step, shards, agreement, own, self.inners)
            if offload_gradients:
                self._sums = SumSchedule(shards, exchanges, own)
        exchange(None, error, group, "building the optimizers of masters")
        if sends_early and peers is None:
            # NCCL connects on the first message, and the host waits until the peer connects, too. In a
            # backward pass the peer may never come.
            exchanges[0].send(ABSTAIN)
            exchanges[0].finish()
        self._run_program()
        shards.settle()
        if self.world_size > 1:
            shards.holder.watch_clipping(checked.parameters)
        for doubt in checked.doubts(rank, shards.coarse):
            warnings.warn(doubt, stacklevel=3)
        shared_by = "collective" if peers is None else "peer"
        self._described = {
            "transport": "none" if self.world_size == 1 else shared_by,
            "why_collective": why_collective or why_no_peers,
            "hosts": hosts,
            "reduction": reduction,
            "in_buckets": why_at_once is None,
            "obstacle": why_at_once,
            "overlap": communication.overlap,
            "host_waits": why_host_waits,
            "world_size": self.world_size,
            "bucket_mb": bucket_mb,
        }

    def _offer_parts(self) -> None:
        """Let FusedAdamW update its masters bucket by bucket, and leave the amaxes that casts need."""
        optimized, by_bucket = self._shards.optimized, self.communication.overlap == "update"
        present = self._agreement.presence(by_bucket) if self.world_size > 1 else {}
        for number, inner in enumerate(self.inners.all):
            if isinstance(inner, FusedAdamW):
                mine = [b for b in self._shards.buckets if b.by == number]
                parts = [([m for i in b.indices for m in optimized[i]], b.plan) for b in mine]
                inner.offer_parts(parts, present)

    # A step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average gradients, update the masters this rank owns, cast them, gather the weights. Collective.

        closure: evaluated once, with gradients enabled; its result is returned.

        Raises RuntimeError for gradients that changed since clip_grad_norm_, sparse gradients, another list
        of parameters, a parameter that was moved, written to or unfrozen, or if the optimizer is `broken`;
        TypeError for a gradient that would lose precision on its way (gradient_wire); ValueError for an lr,
        betas, eps, weight_decay or momentum that is not finite (of tensors only new ones on a CPU are read);
        FloatingPointError, with on_nonfinite="raise", for gradients with a NaN or Inf.

        A CUDA graph may capture it in a world of one, after an eager step with gradients of the same
        parameters. In a replay a NaN or Inf skips the step, whatever on_nonfinite is.
        """
        scale = self._take_scale()  # before any error
        self._saved.consolidated = None
        if self._shards.holder.watched:
            self._shards.holder.end_watch()
        if self._early is not None:
            obstacle = self._find_other_groups()
            if scale is not None or self._gradients.scaler_found_inf is not None:
                used = "overlap='update' has used gradients as they were"
                obstacle = f"a GradScaler has scaled the loss, and {used}"
            return self._early.end_step(closure, obstacle)
        self._begin_call("step()")
        gradients, sent, loss, error = (), None, None, OwnError()
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._agreement.raise_own()
            own, clipped = self._gradients, self._gradients.clipped
            gradients, reduces = self._collect(), clipped is None
            if self._agreement.steps == 0 and all(gradient is None for gradient in gradients):
                warnings.warn(
                    "this rank has no gradient in the first step(): backward() must be of the model that the "
                    "optimizer was built for, not of a copy, and zero_grad() comes after step()",
                    stacklevel=4,
                )
            if clipped is not None and clipped.gradients.changed(gradients):
                raise RuntimeError(
                    "gradients changed after clip_grad_norm_, which had reduced and clipped them for this "
                    "step: call it after the last backward pass, or zero_grad() before the next one"
                )
            if self._fused is None:
                _ = self._shards.optimized_pairs  # makes the memory of gradients
            else:
                in_slices = self._sums is not None or not (reduces or own.are_means)
                skip = self._agreement.skip_in_kernels
                factor = clipped and clipped.factor
                on_host = self._shards.offload.begin(factor)
                self._fused.begin_buckets(self._step.exchanges, skip, factor, in_slices, on_host)
            self._unscale(gradients, scale)
            sent = None if self._sums is not None else own.to_average(gradients, reduces)
        except BaseException as failure:
            error = self._to_vote(failure)
        reduces = self._gradients.clipped is None
        word, present = self._vote(Call(reduces=reduces), gradients, error)
        try:
            self._agreement.decide(word, found_inf=self.found_inf, looks=reduces)
            if error:  # the other ranks' kernels change nothing, by the vote
                with error:
                    self._run_program(None, ABSTAIN if reduces and self._sums is None else None)
                error.raise_if_any()
            with self._shards.breaking("step()"):
                if self._fused is None:
                    self._update_at_once(sent, present)
                else:
                    self._run_program(self._fused.update_bucket, sent)
            self._agreement.count_step()
            if self._sums is not None:
                self._sums.drop()
        finally:
            self._gradients.clipped = self._gradients.unscaled = None
            if self._schedule is not None:
                self._schedule.end_step()
        return loss

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Average the gradients, and scale them so that their norm over all parameters is at most max_norm.
        Collective.

        Returns the norm before that, float32 []; a 2-norm of the same gradients has the same bits in a world
        of any size. step() uses the scaled gradients, or skips them if they hold a NaN or Inf. In a world of
        one they stay in p.grad until step() scales them as it reads them, so do not write there in between.

        Raises TypeError unless max_norm is a number, ValueError unless it is 0 or more and norm_type is
        positive, RuntimeError with overlap="update", else as step().
        """
        if self._early is not None:
            raise RuntimeError(
                "clip_grad_norm_ needs all gradients, and overlap='update' has used them by now: leave out "
                "either"
            )
        self._begin_call("clip_grad_norm_()")
        gradients, sent, kind, error = (), ABSTAIN, 2.0, OwnError()
        own, before, reduces = self._gradients, self._gradients.clipped, self._gradients.clipped is None
        try:
            if isinstance(max_norm, Iterable) and not isinstance(max_norm, (torch.Tensor, str)):
                raise TypeError(
                    f"max_norm must be a number, got {type(max_norm).__name__}: call "
                    "clip_grad_norm_(max_norm) without parameters, since it clips those of this optimizer"
                )
            max_norm, norm_type = float(max_norm), float(norm_type)
            if not max_norm >= 0:
                raise ValueError(f"max_norm must be 0 or more, got {max_norm}")
            if not norm_type > 0:
                raise ValueError(f"norm_type must be positive, got {norm_type}")
            kind = norm_type
            gradients = self._collect()
            if before is not None and before.gradients.written():
                raise RuntimeError(
                    "gradients were added to clipped ones: clip_grad_norm_ scales what step() uses, not "
                    "p.grad, so call zero_grad() before the next backward pass"
                )
            reduces = before is None or before.gradients.changed(gradients)
            for bucket in () if own.are_means else self._shards.buckets:
                _ = bucket.gradients  # makes their memory
            sent = own.to_average(gradients, reduces)
        except BaseException as failure:
            error = self._to_vote(failure)
        self._vote(Call(True, reduces, max_norm, norm_type), gradients, error)
        means, word, failure = [] if sent is ABSTAIN else own.means(sent), None, OwnError()
        if sent is not None:
            own.squares.zero_()
        if own.are_means:
            own.add_squares(means)
        if reduces:
            own.clipped = None
            if self._sums is not None:
                self._sums.add_squares(own.squares)
            elif not own.are_means:
                failure = self._step.average(sent, own.squares)  # into `means`
                with failure:
                    self._shards.offload.settle()
            if sent is not ABSTAIN and not failure:
                with failure:
                    word = in_phase("scan", own.find_word)(gradients, in_means=True)
        total, word = in_phase("norm", global_norm)(means, kind, self.process_group(), own.squares, word)
        self._agreement.decide(word, is_shared=True, looks=reduces)
        if not reduces:
            total = total * before.factor
        total.masked_fill_(self._agreement.decision.refused != 0, math.nan)
        factor = ((0.0 if error else max_norm) / (total + 1e-6)).clamp(max=1.0)
        factor.masked_fill_(self._agreement.decision.nonfinite != 0, 1.0)
        if reduces:
            own.clipped = Clipped(ops.Versions(gradients), factor)
        else:
            own.clipped = before._replace(factor=before.factor * factor)
        with self._shards.breaking("clip_grad_norm_()"):  # the others have a norm that is of no use
            failure.raise_if_any()
        return total

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim.Optimizer's; also forgets the averages of clip_grad_norm_. Not collective."""
        self._gradients.clipped = self._gradients.unscaled = None
        self._gradients.scaler_found_inf = None  # GradScaler leaves it after an error
        for schedule in (self._sums, self._schedule, self._early):
            if schedule is not None:
                schedule.drop()
        super().zero_grad(set_to_none)

    def train(self) -> None:
        """Does nothing. transformers' Trainer calls it before each batch: with overlap="update" it raises
        ValueError if Trainer is to clip gradients afterwards.
        """
        frame = None if self._early is None else sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") != "transformers.trainer":
            frame = frame.f_back
        # Trainer tells the optimizer nothing about it, and torch's clip_grad_norm_ would find no gradients.
        arguments = None if frame is None else getattr(frame.f_locals.get("self"), "args", None)
        max_norm = getattr(arguments, "max_grad_norm", None)
        if max_norm:
            raise ValueError(
                f"max_grad_norm={max_norm} of TrainingArguments: overlap='update' has used all gradients "
                "before Trainer clips them: pass max_grad_norm=0, or build the optimizer without it"
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As no_sync() of DistributedDataParallel: backward passes under it only accumulate in p.grad, and
        the next one outside of it sends everything. Changes nothing with offload_gradients. Raises
        RuntimeError with overlap="update".
        """
        if self._early is not None:
            raise RuntimeError("no_sync() accumulates gradients, and overlap='update' uses each at once")
        with contextlib.nullcontext() if self._schedule is None else self._schedule.no_sync():
            yield

    # Before the vote

    def _begin_call(self, call: str) -> None:
        """Raise the ranks' errors of the step before. [Note: who reads a vote]"""
        why = "with offload the host updates masters" if self._shards.offload.is_used else None
        if self.world_size > 1:
            call, why = f"{call} of {self.world_size} ranks", "each step waits for a vote of the ranks"
        if why is not None and is_capturing(self.found_inf.device):
            raise RuntimeError(f"{call} cannot be captured in a CUDA graph: {why}")
        if self._gradients.clipped is None:  # else the vote of this step's clip_grad_norm_ is not due
            self._agreement.read()

    def _to_vote(self, failure: BaseException) -> OwnError:
        """An error of this rank, for the vote. Raises one that all ranks raise, or a CollectiveError."""
        if getattr(failure, "all_ranks_raise", False):
            raise failure
        return OwnError(failure)

    def _find_other_groups(self) -> str | None:
        if self.param_groups is self._shards.param_groups:
            return None
        return "param_groups is not the list that the optimizer was built with: change its groups in place"

    def _collect(self) -> Gradients:
        """p.grad of all trainable parameters. Raises if this rank cannot step."""
        obstacle = self._find_other_groups()
        if obstacle is not None:
            raise RuntimeError(obstacle)
        self._shards.check_unchanged()
        self.inners.check_options()
        return self._gradients.collect() if self._sums is None else self._sums.collect()

    def _unscale(self, gradients: Gradients, scale: torch.Tensor | None) -> None:
        """Divide the gradients by the scale of a GradScaler; None if its unscale_() has."""
        schedule, obstacle = self._schedule, None
        was_sent = self._sums is not None or (schedule is not None and schedule.has_sent)  # before unscale_()
        if scale is None and not (was_sent and self._gradients.scaler_found_inf is not None):
            return
        present = [gradient for gradient in gradients if gradient is not None]
        if schedule is not None:
            self._gradients.scaler_found_inf = None  # GradScaler leaves it after an error
            obstacle = "overlap='backward' sends them while they are scaled, and unscale_() comes too late"
        elif self._sums is not None:
            obstacle = "offload_gradients adds them up while they are scaled, and unscale_() comes too late"
        elif self._gradients.clipped is not None:
            obstacle = "clip_grad_norm_ has clipped scaled ones: call scaler.unscale_(optimizer) before it"
        elif any(gradient.dtype == torch.float16 for gradient in present):
            obstacle = "float16 ones would underflow: build the optimizer with gradient_dtype=torch.float32"
        if obstacle is not None:
            raise RuntimeError(f"step() cannot divide gradients by the scale of GradScaler: {obstacle}")
        own = self._gradients
        if own.unscaled is None or own.unscaled.changed(gradients):  # else another rank refused this step
            torch._foreach_mul_(present, scale.double().reciprocal().float())
            own.unscaled = ops.Versions(gradients)

    def _take_scale(self) -> torch.Tensor | None:
        """The scale that a GradScaler has set for this step."""
        scale = vars(self).get("grad_scale")
        if "grad_scale" in vars(self):
            self.grad_scale = 1  # GradScaler leaves it after an error, and multiplies its next scale by it
        return scale if isinstance(scale, torch.Tensor) else None

    def _vote(
        self, call: Call, gradients: Gradients, error: OwnError
    ) -> tuple[torch.Tensor | None, list[bool] | None]:
        """Returns the word of a NaN or Inf in gradients that a step is to average; and by trainable parameter
        whether any rank has a gradient, or None if the host leaves the vote to the device. Else it raises why
        no rank takes the step.
        """
        agreement, schedule, word = self._agreement, self._schedule, None
        # A schedule may wait for the device, so it comes before the scan, which keeps the device busy.
        again = schedule is not None and call.reduces and schedule.close(error)
        known = None
        if self._sums is not None:
            self._sums.close(error)
            call, known = call._replace(passes=self._sums.passes), self._sums.word
        if call.reduces and not call.is_clip and not error:
            with error:
                word = in_phase("scan", self._gradients.find_word)(gradients, known=known)
        if self.world_size == 1:
            error.raise_if_any()
            return word, [gradient is not None for gradient in gradients]
        flags = [False] * len(agreement.labels)
        for slot, gradient in zip(agreement.slots, gradients, strict=False):  # an error may leave none
            flags[slot] = gradient is not None
        try:
            in_phase("vote", agreement.begin)(flags, error, word, call, again)
            if agreement.defers:
                return word, None
            agreement.read(at_once=True)
        except Exception:
            error.take()  # it was raised, and would be in a reference cycle
            if schedule is not None:
                schedule.abandon(agreement.last.any_reduces)
            raise
        if schedule is not None:
            schedule.accept(agreement.last.again)
        found = agreement.last.present.tolist()
        return word, [bool(found[slot]) for slot in agreement.slots]

    # After it

    def _update_at_once(self, gradients: Gradients | None, present: Sequence[bool]) -> None:
        """Average all gradients that are not averaged yet, update all masters, cast and gather."""
        error, own = OwnError(), self._gradients
        reads = self.inners.heed_found_inf() or is_capturing(self.found_inf.device)
        if not reads and self._agreement.decision.nonfinite.item():
            return  # the update cannot read on the device that it is to be skipped
        if own.are_means and own.launches is not None:
            in_phase("gradients", own.launches.widen)(self._shards.gradients)
        elif gradients is not None:
            error = self._step.average(gradients)
        if not error:
            with error:
                in_phase("update", self._step_inners)(present)
        self._run_program(error=error)

    def _step_inners(self, present: Sequence[bool]) -> None:
        clipped = self._gradients.clipped
        if clipped is not None:
            torch._foreach_mul_([b.gradients for b in self._shards.buckets], clipped.factor)
        masters, gradients = self._shards.optimized_pairs
        if not all(present):
            pairs = zip(self._shards.optimized, present, strict=True)
            there = [is_there for own, is_there in pairs for _ in own]
            gradients = [g if is_there else None for g, is_there in zip(gradients, there, strict=True)]
        self._agreement.decide(None, looks=False)  # a barrier may have failed since
        skip = self._agreement.decision.skip if self.inners.heed_found_inf() else None
        self.inners.step(masters, gradients, skip)

    def _run_program(
        self,
        update: Update | None = None,
        gradients: Gradients | Abstain | None = None,
        error: OwnError | None = None,
    ) -> None:
        """Run the program of a step, or without `update` only cast the masters and gather the weights."""
        try:
            self._shards.check_not_taken_over()
            self._shards.settle()
            fused = [inner for inner in self.inners.all if isinstance(inner, FusedAdamW)]
            if update is None and any(inner.amaxes_outdated() for inner in fused):
                for plan in self._shards.plans:
                    plan.begin_update()  # the masters have changed since their amaxes were computed
            with self._shards.offload.computing():
                self._step.run(update, gradients, error)
            self._shards.follow_masters()
        finally:
            self._shards.versions.take()

    # State

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """In the form of torch.optim: `state` by number and `param_groups`. Not collective. Makes no copies,
        except for weights that were written to since the last step, whose values are their masters.

        Every rank has the same keys. A tensor has the parameter's shape and knows which of its elements are
        on this rank: torch.distributed.checkpoint saves and loads it in a world of any size, full_tensor()
        gathers it (collective), torch.save writes this rank's part.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._agreement.look()
        self.inners.sync_options()
        state_dict = self._saved.state_dict()
        for hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        return state_dict

    def _check_sound(self) -> None:
        """Raise RuntimeError if masters may be of two steps. Waits for the device."""
        self._agreement.look()
        self._shards.check_sound()

    @torch.no_grad()
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state on one rank, for frameworks that save the optimizer there alone: Trainer,
        accelerate, Lightning. Collective, as ZeroRedundancyOptimizer's.

        The next state_dict() on that rank has whole tensors on the CPU, unless a step or a load comes before;
        a rank of any world loads them.

        to: the rank in process_group. Raises ValueError for a rank that is not there, and if ranks train
        different parameters; RuntimeError if the optimizer is `broken` on a rank.
        """
        rank, error, state = rank_and_size(self.process_group())[0], OwnError(), {}
        with error:
            self._check_sound()
            if not (isinstance(to, int) and 0 <= to < self.world_size):
                raise ValueError(f"to must be a rank from 0 to {self.world_size - 1}, got {to!r}")
            self._agreement.check_one_rank_has_all("consolidate_state_dict()")
            state = self._saved.own_state()
        state = with_entries_of_all_ranks(state, error, self.process_group())
        if self.world_size > 1:
            self._saved.consolidate(state, keeps=rank == to)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state dict. The weights follow its masters, also weights that a model has loaded
        before or loads until the next step. Collective.

        state_dict: of this class, as torch.distributed.checkpoint read it, in a world of any size; as
            torch.load read it, on every rank if it was whole (consolidate_state_dict(), a world of one), else
            on the rank that saved its part; or as state_dict() of another optimizer of the same ranks. Or of
            torch.optim, with whole tensors and no masters, which stay except those of weights that were
            written to. Parameters are matched by name if both sides have names. In a state_dict() of this
            optimizer that was not saved, masters have their present values.

        Parameters that have moved get the memory of the optimizer again, as by refresh().

        Raises ValueError (TypeError unless it is a dict), on every rank and before anything has changed, for
        a state dict that does not fit, mixes steps or saves, or lacks a master although a parameter has moved
        or the optimizer is `broken`.
        """
        written = self._shards.versions.written()  # a pass that ends accepts the values of weights
        if self._early is not None:
            self._early.give_up()
        error = OwnError()
        with error:
            self._shards.check_moved()
        moved = str(error.take()) if error else None  # an error would keep frames
        obstacle = self._shards.obstacle or moved
        with self.inners.restored_by_errors():
            with error:
                self._shards.check_groups()
                self._shards.check_can_refresh()
                self.inners.sync_options()
                for hook in self._optimizer_load_state_dict_pre_hooks.values():
                    state_dict = hook(self, state_dict) or state_dict
            masters, steps = self._saved.load(state_dict, error, written, obstacle, self.process_group())
        with self._shards.breaking("load_state_dict()"):
            if moved is not None:
                self.refresh()
            self.inners.sync_options()
            for values, planes in zip(masters, self._shards.planes, strict=True):
                if values is not None and planes[0] is not None:
                    write_master(values, *planes)
            self._agreement.forget(steps)
            self._gradients.clipped = None
            self.found_inf.zero_()
            self._run_program()
            self._shards.settle()
        self._shards.weights_follow, self._shards.broken = False, None
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    @torch.no_grad()
    def gathered_masters(self) -> list[torch.Tensor | None]:
        """The whole FP32 masters in the order and shape of the parameters; None for frozen ones. Collective.
        For checks: it takes the memory that sharding saves.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        masters = map(self._saved.master, parameters)
        return [None if master is None else master.full_tensor() for master in masters]

    def gathered_bytes_per_step(self) -> dict[str, int]:
        """Bytes of the buffers that the ranks gather in each step; 0 in a world of one. nvfp4: codes, and
        scales that travel; high_precision: other weights; bf16_equivalent: all, if they were bfloat16.
        """
        sharded = [bucket for bucket in self._shards.buckets if bucket.world_size > 1]
        return {
            "nvfp4": sum(flat.nbytes for b in sharded if b.is_packed for flat in b.gathered),
            "high_precision": sum(bucket.weights.nbytes for bucket in sharded if not bucket.is_packed),
            "bf16_equivalent": 2 * sum(p.numel() for bucket in sharded for p in bucket.parameters),
        }

    # For users

    @property
    def broken(self) -> RuntimeError | None:
        """Why the masters of this rank may be of two steps: an error or an interrupt came after the vote on a
        step or clip, or in a load. Steps, clips and saves raise until load_state_dict() has brought all
        masters.
        """
        return self._shards.broken

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer of the masters. Raises AttributeError if groups have several classes, which each have
        an optimizer in `inners.all`.
        """
        if len(self.inners.all) > 1:
            names = " and ".join(type(optimizer).__name__ for optimizer in self.inners.all)
            raise AttributeError(f"the masters have {names}: take them from inners.all")
        return self.inners.all[0]

    def __repr__(self) -> str:
        """Its contents, and its parameter groups as torch shows them, without the names of parameters."""
        return show(self)

    def describe(self) -> dict[str, Any]:
        """How steps are taken, and the memory that this rank has for them. Not collective.

        Returns a dict of plain values, which prints as a table of the memory.

        memory: bytes by use, on "device" and "host". Memory that serves several uses counts for the first.
        transport: "peer", "collective", or "none" in a world of one. why_collective: the reason.
        hosts: the number of hosts and of ranks on each; None if these differ.
        reduction, overlap, bucket_mb: of Communication, as chosen. world_size.
        in_buckets: whether each bucket is updated when its gradients are here. obstacle: why not.
        host_waits: why the host waits for the vote of each step, or None.
        buckets: of each its contents, and the bytes of gradients, amaxes and weights that this rank sends for
            it in a step. between_hosts: how many bytes of the gradients leave the host. means_travel_as: in
            which format. exactly: the parameters whose means travel in FP32.
        bytes_sent: bytes by phase, of all buckets.
        shared_bytes: memory that other ranks can access. waiting_bytes: for their gradients.
        host_bytes: offloaded masters with their present state, and gradients that wait there.
        pinned_bytes: slots between host and device, before torch rounds each up to a power of two.
        offload_threads: that update; None if nothing is offloaded.
        """
        return describe(self)

    @torch.no_grad()
    def check(self) -> None:
        """Raise RuntimeError if no rank took the last step(), a rank kept the others from writing or did not
        come to a barrier of the GPUs, a parameter, master or buffer has moved, or the optimizer is `broken`.
        Waits for the device. Not collective.

        With overlap="forward", call it before a CUDA graph that reads weights is captured, and after a step
        before it is replayed.
        """
        self._shards.raise_if_broken()
        self._agreement.read(counts=False)
        self._shards.check()

    @torch.no_grad()
    def refresh(self) -> None:
        """Go on after parameters, masters or found_inf have moved (share_memory_(), .data assigned): the
        parameters get the memory of the optimizer's buffers again, with its values. Not collective.

        Raises, before anything has changed, ValueError for a parameter that has another shape, dtype, device
        or kind by now, and RuntimeError if a later ZeroFP4Optimizer was built over these parameters.
        """
        self._shards.refresh()
        self._offer_parts()

    @property
    def found_inf(self) -> torch.Tensor:
        """float32 [1]: 1 if the last step was skipped, or a NaN or Inf in masters kept NVFP4 weights as they
        were.
        """
        return self._shards.found_inf

    @found_inf.setter
    def found_inf(self, flag: torch.Tensor) -> None:
        self._gradients.scaler_found_inf = flag

    @found_inf.deleter
    def found_inf(self) -> None:
        self._gradients.scaler_found_inf = None

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped because of gradients with a NaN or Inf. Waits for the device."""
        return int(self._agreement.decision.skipped.item())

    def first_nonfinite(self) -> str | None:
        """The name, in messages, of the first parameter whose gradient held a NaN or Inf on any rank when
        step() or clip_grad_norm_ last looked; None if there was none. Waits for the device.
        """
        return self._agreement.first_nonfinite()

    def add_param_group(self, param_group: dict) -> None:
        """Only while the optimizer is being built; later the layout is fixed and this raises RuntimeError."""
        if self._described is not None:
            raise RuntimeError(
                "add_param_group: masters and weights lie in flat buffers that were laid out when the "
                "optimizer was built; build a new optimizer for other parameters, with masters_from=this "
                "one, or have it load_state_dict() this one's state_dict(), moments and all"
            )
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For copy.copy, copy.deepcopy and pickle: raises TypeError."""
        raise TypeError(
            "a ZeroFP4Optimizer can be neither copied nor pickled, since its masters belong to these "
            "parameters and ranks: save its state_dict(); or copy the model, build a new optimizer and have "
            "it load_state_dict() this one's state_dict()"
        )
