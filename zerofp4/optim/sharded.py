"""Parameters in buckets, this rank's shards of their FP32 masters, and the plans that cast them.

Notices parameters that were exchanged, moved, written to or unfrozen between two steps: they would no longer
follow their masters.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofp4.cast import CastPlan
from zerofp4.distributed import OwnError, exchange
from zerofp4.engine import Bucket, LateGathers, Peers, build_buckets, joined, write_master, zeros_on
from zerofp4.ops import Addresses, Versions
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

    group: all ranks that step together.
    peers: the ranks that share the memory of weights; None if weights travel by collectives.
    late: takes the gathers of NVFP4 weights that go on after a step.

    An error of one rank, such as a failed allocation, is raised on every rank.
    """

    def __init__(
        self,
        checked: Checked,
        group: dist.ProcessGroup | None,
        bucket_mb: float,
        peers: Peers | None,
        late: LateGathers | None,
    ):
        self._members = [list(group["params"]) for group in checked.param_groups]
        self.trained, self._late = checked.trained, late
        self.parameters = [one.parameter for one in self.trained]
        self.names = [one.name for one in self.trained]
        named = zip(checked.names, checked.parameters, strict=True)
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        self._kinds = [(kind_of(p), p.device) for p in self.parameters]
        options = checked.communication
        self.buckets = build_buckets(self.trained, bucket_mb, options.gradient_wire, options.overlap)
        error = OwnError()
        for bucket in self.buckets:
            with error:  # the other ranks may share the memory of the next bucket
                bucket.allocate(peers)
                bucket.bind()  # at once, which frees the parameters' own memory
        exchange(None, error, group, "allocating weights and masters")
        # By parameter: this rank's shard, its master, 1D, and the low bytes of a master of 24 bits; None if
        # this rank owns nothing, or there are no low bytes.
        self.shards: list[Shard] = self.by_parameter(lambda b: b.shards)
        self.masters: list[torch.Tensor | None] = self.by_parameter(lambda b: b.own_views(b.masters))
        self.lows: list[torch.Tensor | None] = self.by_parameter(lambda b: b.own_views(b.low))
        self.optimized = [self._as_optimized(i, master) for i, master in enumerate(self.masters)]
        """By parameter, the tensors that an optimizer updates: none, the master, or the matrices in it."""
        for i, (one, master, low) in enumerate(zip(self.trained, self.masters, self.lows, strict=True)):
            if one.is_compact and master is not None:
                master.zerofp4_slice = Slice(one.parameter.shape, self.shards[i], low, i)
        self.found_inf = torch.zeros(1, dtype=torch.float32, device=self.parameters[0].device)
        """1 if the last step was skipped, or left NVFP4 weights alone because of a NaN or Inf in masters."""
        packed = [bucket for bucket in self.buckets if bucket.is_packed]
        for bucket in packed:
            with error:  # the other ranks build the next plan
                bucket.plan = self._build_plan(bucket, checked.amax_groups or ())
        exchange(None, error, group, "building casts")
        for bucket in packed:
            zeros = zeros_on(bucket.device) if peers is None else peers.zeros
            bucket.scales = bucket.plan.stage_scales(zeros)
        self.plans = [bucket.plan for bucket in packed]
        self.holder = Holder(self.parameters)
        self._watch()
        self._versions = Versions(self.parameters)
        """Of the weights as the optimizer left them."""
        self.weights_follow = True
        """False from load_state_dict() to the cast of the next step, which overwrites later writes."""

    def by_parameter(self, of_bucket: Callable[[Bucket], list]) -> list:
        """Join a function's values for the parameters of each bucket, in the order of all parameters."""
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
        """A parameter's entries of `masters` and `lows` for a save, an export or an average. If the weight
        is_overwritten(), they are made from its new values.
        """
        return self.written_planes(i) if self.is_overwritten(i) else (self.masters[i], self.lows[i])

    def is_overwritten(self, i: int) -> bool:
        """Whether somebody wrote to a weight since the last step, and its master is to follow. After a load,
        and once another optimizer has taken the weights over, the masters decide.
        """
        return self.weights_follow and not self.holder.is_taken_over and bool(self.written([i]))

    def written_planes(self, i: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Entries of `masters` and `lows` from the weight's values. A value that the master rounds to keeps
        the master: DDP writes all weights with the values that they hold. Not collective.
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
        """Ignore writes to weights: they are cast from their masters."""
        self.weights_follow = True
        for parameter in self.parameters:
            note_master(parameter)

    def updated_by(self, bucket: Bucket) -> int:
        """Return the number of the optimizer that updates a bucket's masters."""
        return self.trained[bucket.indices[0]].by

    @functools.cached_property
    def optimized_pairs(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """All of `optimized`, and views of their averaged gradients, whose memory this allocates."""
        pieces = self.by_parameter(lambda b: b.gradient_views)
        gradients = [g for i, piece in enumerate(pieces) for g in self._as_optimized(i, piece)]
        return [master for own in self.optimized for master in own], gradients

    @functools.cached_property
    def gradients(self) -> list[torch.Tensor]:
        """By parameter, its whole averaged gradient, in a world of one."""
        return self.by_parameter(lambda b: b.whole_views(b.gradients))

    def share_gradients(self) -> None:
        """Let all buckets have `gradients` in one slot, each until its update."""
        most = max(bucket.slice_numel for bucket in self.buckets)
        flat = torch.zeros(most, dtype=torch.float32, device=self.buckets[0].device)
        for bucket in self.buckets:
            bucket.gradients = flat[: bucket.slice_numel]

    def _build_plan(self, bucket: Bucket, amax_groups: Sequence[Sequence[torch.Tensor]]) -> CastPlan:
        """The plan of a bucket of NVFP4 weights, with the amax groups in it."""
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
        """Note where parameters and masters are now."""
        named = list(zip(self.names, self.parameters, self.masters, strict=True))
        packed = {name: p for name, p, _ in named if isinstance(p, NVFP4Tensor)}
        others = {name: p for name, p, _ in named if name not in packed} | {"found_inf": self.found_inf}
        others |= {f"the master of {name}": master for name, _, master in named if master is not None}
        self._addresses = Addresses(packed, others, owner="optimizer")
        if self._late is not None:
            for bucket in filter(operator.attrgetter("is_packed"), self.buckets):
                self._late.watch(bucket)

    # Changes to the parameters from outside

    def check_unchanged(self, param_groups: Sequence[dict]) -> None:
        """Raise RuntimeError for parameters that were exchanged, moved, written to or unfrozen."""
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
        """Raise RuntimeError if one of these parameters was written to since the last step. After a load,
        they follow their masters instead.
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
        """Take the present values of these weights, or of all, as the optimizer's own."""
        self._versions.take(indices)

    def written(self, indices: Sequence[int] | None = None) -> list[int]:
        """Which of these weights, or of all, were written to since the optimizer last did."""
        return self._versions.written(indices)

    def find_moved(self) -> RuntimeError | None:
        """Return an error for the first parameter, master or buffer that has moved. Compares every address,
        since an assignment to .data leaves no mark.
        """
        if self.holder.is_taken_over:
            return RuntimeError(_TAKEN_OVER)
        error = self._addresses.find_moved()
        changed = None if error is None else self._find_changed()
        return error if changed is None else RuntimeError(changed)

    def _find_changed(self) -> str | None:
        """Describe the first parameter whose kind or device has changed."""
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
        """Raise the errors of refresh()."""
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

    # Late gathers

    def settle(self) -> None:
        """Make the current stream wait for late gathers."""
        if self._late is not None:
            self._late.settle()

    def check(self) -> None:
        """Wait for the casts. Raises RuntimeError for an error in them, and for moved storage."""
        if self._late is not None:
            self._late.synchronize()
        OwnError(self.find_moved()).raise_if_any()
        for plan in self.plans:
            plan.check()
