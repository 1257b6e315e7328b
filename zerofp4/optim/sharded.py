"""Parameters in flat buffers, this rank's pieces of their FP32 masters, and the plans that cast them.

What others do to these parameters between two steps is noticed here, too: whoever exchanges, moves, writes to
or unfreezes one would go on without the masters.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerofp4.cast import CastPlan
from zerofp4.distributed import OwnError
from zerofp4.engine import Bucket, LateGathers, Peers, build_buckets, joined, write_master, zeros_on
from zerofp4.ops import Addresses, versions_of
from zerofp4.optim.build import Checked, kind_of
from zerofp4.optim.initial import initial_values
from zerofp4.optim.moments import Slice
from zerofp4.shard import Shard
from zerofp4.storage import record_of
from zerofp4.tensors import Holder, NVFP4Tensor, had_master, note_master

_TAKEN_OVER = (
    "another ZeroFP4Optimizer was built over these parameters, which follow its masters now: go on with that "
    "one and delete this one. A new optimizer takes over the masters of the one that it gets as masters_from"
)


class ShardedParameters:
    """The trainable parameters of an optimizer. Building it is collective, and moves them into flat buffers;
    the masters have no values until initialize_masters().

    peers: the ranks that share the memory of weights; None where weights travel by collectives.
    late: takes the gathers of NVFP4 weights that go on behind a step.
    """

    def __init__(self, checked: Checked, bucket_mb: float, peers: Peers | None, late: LateGathers | None):
        self._members = [list(group["params"]) for group in checked.param_groups]
        self.trained, self._late = checked.trained, late
        self.parameters = [one.parameter for one in self.trained]
        self.names = [one.name for one in self.trained]
        named = zip(checked.names, checked.parameters, strict=True)
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        self._kinds = [(kind_of(p), p.device) for p in self.parameters]
        options = checked.communication
        self.buckets = build_buckets(self.trained, bucket_mb, options.gradient_wire, options.overlap)
        for bucket in self.buckets:
            bucket.allocate(peers)
            bucket.bind()
        self.masters: list[torch.Tensor | None] = self.by_parameter(lambda b: b.own_views(b.masters))
        """By parameter, 1D, this rank's piece of its bucket's `masters`; None where it owns nothing."""
        self.lows: list[torch.Tensor | None] = self.by_parameter(
            lambda b: [None] * len(b.indices) if b.low is None else b.own_views(b.low)
        )
        """By parameter, the bytes of masters of 24 bits, whose other plane is in `masters`; else None."""
        self.shards: list[Shard] = self.by_parameter(lambda b: b.shards)
        """By parameter, what this rank owns."""
        self.optimized = [self._as_optimized(i, master) for i, master in enumerate(self.masters)]
        """By parameter, what an optimizer updates: nothing, the piece, or the matrices in it."""
        self.slices: dict[torch.Tensor, Slice] = {
            master: Slice(one.parameter.shape, shard, low, i)
            for i, (one, master, low, shard) in enumerate(
                zip(self.trained, self.masters, self.lows, self.shards, strict=True)
            )
            if one.is_compact and master is not None
        }
        """By master, of those in compact state."""
        self.found_inf = torch.zeros(1, dtype=torch.float32, device=self.parameters[0].device)
        """1 where the last step was skipped, or a NaN or Inf in masters kept NVFP4 weights as they were."""
        packed = [bucket for bucket in self.buckets if bucket.is_packed]
        for bucket in packed:
            bucket.plan = self._build_plan(bucket, checked.amax_groups or ())
            zeros = zeros_on(bucket.device) if peers is None else peers.zeros
            bucket.scales = bucket.plan.stage_scales(zeros)
        self.plans = [bucket.plan for bucket in packed]
        """What casts the buckets of NVFP4 weights, one for each of them."""
        self._watch()
        self.holder = Holder(self.parameters)
        self._take_addresses()
        self.accept_values()
        self.weights_follow = True
        """False from load_state_dict() to the cast of the next step: weights written meanwhile yield to the
        masters.
        """

    def by_parameter(self, of_bucket: Callable[[Bucket], list]) -> list:
        """What a function returns for the parameters of each bucket, in the order of all parameters."""
        found: dict[int, Any] = {}
        for bucket in self.buckets:
            found |= zip(bucket.indices, of_bucket(bucket), strict=True)
        return [found[i] for i in range(len(self.parameters))]

    def _as_optimized(self, i: int, piece: torch.Tensor | None) -> list[torch.Tensor]:
        if piece is None:
            return []
        if self.trained[i].work is None:
            if piece.dtype != torch.float32:  # of masters of 24 bits
                piece.grad_dtype = torch.float32
            return [piece]
        rows, columns = self.parameters[i].shape[-2:]
        return [matrix.view(rows, columns) for matrix in piece.split(rows * columns)]

    def saved_planes(self, i: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """A parameter's entries of `masters` and `lows` for a save, an export or an average: those of what
        somebody wrote to the weight, if it is_overwritten().
        """
        return self.written_planes(i) if self.is_overwritten(i) else (self.masters[i], self.lows[i])

    def is_overwritten(self, i: int) -> bool:
        """Whether somebody wrote to a weight since the last step, and its master is not to undo that: after a
        load and under a later optimizer the masters decide.
        """
        return self.weights_follow and not self.holder.is_taken_over and bool(self.written([i]))

    def written_planes(self, i: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The planes that the weight's values make. What the master itself makes of it keeps the master: DDP
        writes to all weights the values that they hold. Not collective: every rank looks at its own copy.
        """
        planes, parameter, shard = (self.masters[i], self.lows[i]), self.parameters[i], self.shards[i]
        if planes[0] is None or had_master(parameter):
            return planes
        values = initial_values(parameter)[shard.start : shard.end].to(planes[0].device)
        if not isinstance(parameter, NVFP4Tensor):
            master = joined(*planes)
            values = torch.where(values == master.to(values.dtype), master, values.float())
        made = torch.empty_like(planes[0]), None if planes[1] is None else torch.empty_like(planes[1])
        write_master(values, *made)
        return made

    def follow_masters(self) -> None:
        """From now on weights are what their masters make, whatever was written to them before."""
        self.weights_follow = True
        for parameter in self.parameters:
            note_master(parameter)

    def updated_by(self, bucket: Bucket) -> int:
        """The number of the optimizer that updates the masters of a bucket."""
        return self.trained[bucket.indices[0]].by

    @functools.cached_property
    def optimized_pairs(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """All of `optimized` and its averaged gradients, the same views in every step. Makes their memory."""
        pieces = self.by_parameter(lambda b: b.gradient_views)
        gradients = [g for i, piece in enumerate(pieces) for g in self._as_optimized(i, piece)]
        return [master for own in self.optimized for master in own], gradients

    @functools.cached_property
    def gradients(self) -> list[torch.Tensor]:
        """By parameter, its averaged gradient, whole, as it is in a world of one."""
        return self.by_parameter(lambda b: b.whole_views(b.gradients))

    def share_gradients(self) -> None:
        """Let all buckets have `gradients` in the same memory, each until its update."""
        most = max(bucket.slice_numel for bucket in self.buckets)
        flat = torch.zeros(most, dtype=torch.float32, device=self.buckets[0].device)
        for bucket in self.buckets:
            bucket.gradients = flat[: bucket.slice_numel]

    def _build_plan(self, bucket: Bucket, amax_groups: Sequence[Sequence[torch.Tensor]]) -> CastPlan:
        """Of a bucket of NVFP4 weights, with the amax groups that lie in it."""
        inside = {id(weight.record) for weight in bucket.parameters}
        return CastPlan(
            bucket.parameters,
            [self.masters[i] for i in bucket.indices],
            [shard.start if shard.numel else None for shard in bucket.shards],
            bucket.group(),
            amax_groups=[members for members in amax_groups if {id(record_of(m)) for m in members} & inside],
            on_nonfinite="skip",
            found_inf=self.found_inf,
        )

    def _watch(self) -> None:
        for bucket in self.buckets if self._late is not None else ():
            if bucket.is_packed:
                self._late.watch(bucket)

    # What others have done to the parameters

    def check_unchanged(self, param_groups: Sequence[dict]) -> None:
        """Raise RuntimeError for parameters that others exchanged, moved, wrote to or unfroze."""
        self.check_groups(param_groups)
        OwnError(self.find_moved()).raise_if_any()
        replaced = self.holder.find_replaced()
        if replaced is not None:
            name = dict(zip(self.parameters, self.names, strict=True))[replaced]
            raise RuntimeError(
                f"{name} was replaced in its module since the optimizer was built (by an assignment, or "
                "load_state_dict(assign=True)), and the new one would not be trained: build a new optimizer"
            )
        self.check_written()
        with torch._C.DisableTorchFunctionSubclass():
            unfrozen = [name for name, p in self._frozen if p.requires_grad]
        if unfrozen:
            raise RuntimeError(
                f"{unfrozen[0]} was frozen when the optimizer was built and has no master: build a new "
                "optimizer, with masters_from=this one, or have it load_state_dict() this one's state_dict()"
            )

    def check_written(self, indices: Sequence[int] | None = None) -> None:
        """Raise RuntimeError where others wrote to one of these parameters since the last step, unless that
        step was before a load: then this one has them follow their masters.
        """
        written = self.written(indices)
        if written and self.weights_follow:
            raise RuntimeError(
                f"{self.names[written[0]]} was written to since the last step, but weights follow masters: "
                "load a model before its optimizer is built, or before the optimizer loads a checkpoint; "
                "wrap it in DistributedDataParallel, which writes rank 0's values, before that or with "
                "init_sync=False"
            )

    def check_groups(self, param_groups: Sequence[dict]) -> None:
        """Raise RuntimeError unless these are the parameters that the optimizer was built with."""
        members = [group["params"] for group in param_groups]
        are_same = list(map(len, members)) == list(map(len, self._members)) and all(
            all(map(operator.is_, *pair)) for pair in zip(members, self._members, strict=True)
        )
        if not are_same:
            raise RuntimeError(
                "param_groups is not the list that the optimizer was built with: masters and weights lie in "
                "flat buffers, so build a new optimizer to change it"
            )

    def accept_values(self, indices: Sequence[int] | None = None) -> None:
        """Take the present values of these weights, or of all, for the optimizer's own."""
        if indices is None:
            self._versions = versions_of(self.parameters)
            return
        versions = versions_of([self.parameters[i] for i in indices])
        for i, version in zip(indices, versions, strict=True):
            self._versions[i] = version

    def written(self, indices: Sequence[int] | None = None) -> list[int]:
        """Which of these parameters, or of all, others than the optimizer wrote to since its last step."""
        parameters, before = self.parameters, self._versions
        if indices is not None:
            parameters, before = [parameters[i] for i in indices], [before[i] for i in indices]
        versions = versions_of(parameters)
        if versions == before:  # as in nearly every step: hundreds are compared in C
            return []
        changed = map(operator.ne, before, versions)
        return list(itertools.compress(indices or range(len(versions)), changed))

    def _take_addresses(self) -> None:
        named = list(zip(self.names, self.parameters, strict=True))
        packed = {name: p for name, p in named if isinstance(p, NVFP4Tensor)}
        dense = {name: p for name, p in named if not isinstance(p, NVFP4Tensor)}
        self._dense_addresses = Addresses({}, dense, owner="optimizer")
        self._packed_addresses = Addresses(packed, {}, owner="optimizer")

    def find_moved(self) -> RuntimeError | None:
        """An error for the first parameter, master or buffer that has moved since its address was taken.
        Looks at every address, since an assignment to .data leaves no mark, and is the only look of a step.
        """
        if self.holder.is_taken_over:
            return RuntimeError(_TAKEN_OVER)
        error = self._dense_addresses.find_moved()
        for plan in self.plans if error is None else ():
            error = plan.find_moved()
            if error is not None:  # the plan knows a weight by its position in the bucket, not by its name
                error = self._packed_addresses.find_moved() or error
                break
        changed = None if error is None else self._find_changed()
        return error if changed is None else RuntimeError(changed)

    def _find_changed(self) -> str | None:
        """What is wrong with the first parameter of another kind or device, whose buffers do not fit it."""
        for name, p, (kind, device) in zip(self.names, self.parameters, self._kinds, strict=True):
            if (kind_of(p), p.device) != (kind, device):
                advice = (
                    "change the model back (model.to()) and call refresh(), or build a new optimizer and "
                    "have it load_state_dict() this one's state_dict()"
                )
                if not kind.endswith(str(tuple(p.shape))):
                    advice = "call resize_token_embeddings before convert_model, and build the optimizer last"
                return f"{name} was {kind} on {device}, now it is {kind_of(p)} on {p.device}: {advice}"
        return None

    def check_not_taken_over(self) -> None:
        if self.holder.is_taken_over:
            raise RuntimeError(_TAKEN_OVER)

    def check_can_refresh(self) -> None:
        """Raise what refresh() raises."""
        self.check_not_taken_over()
        changed = self._find_changed()
        if changed is not None:
            raise ValueError(changed)

    def refresh(self) -> None:
        """As ZeroFP4Optimizer.refresh()."""
        self.check_can_refresh()
        self.settle()
        for bucket in self.buckets:
            bucket.bind()
        for plan in self.plans:
            plan.refresh()
        self._watch()
        self._take_addresses()

    # Gathers that go on behind a step

    def settle(self) -> None:
        """What is queued next on the current stream finds all weights, or may write to them."""
        if self._late is not None:
            self._late.settle()

    def check(self) -> None:
        """Wait for the casts. Raises RuntimeError for what has gone wrong in them, or has moved since."""
        if self._late is not None:
            self._late.synchronize()
        OwnError(self.find_moved()).raise_if_any()
        for plan in self.plans:
            plan.check()
