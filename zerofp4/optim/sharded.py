"""Parameters in buckets, this rank's shards of their FP32 masters, and the plans that cast them.

Notices parameters that were exchanged, moved, written to or unfrozen between two steps: they would no longer
follow their masters.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofp4.cast import CastPlan
from zerofp4.distributed import OwnError, Stage, error_text, exchange, rank_and_size
from zerofp4.engine import (
    CHUNK,
    Bucket,
    BucketExchange,
    LateGathers,
    Offload,
    OffloadedExchange,
    OffloadedPlan,
    Peers,
    Sharding,
    build_buckets,
    collective_exchanges,
    gradient_dtype,
    hosts_exchanges,
    joined,
    peer_exchanges,
    write_master,
    zeros_on,
)
from zerofp4.ops import Addresses, Versions
from zerofp4.optim.build import Checked, kind_of
from zerofp4.optim.moments import Slice
from zerofp4.shard import Shard, intersect
from zerofp4.storage import record_of
from zerofp4.tensors import (
    BEGINS_WITH_CODES,
    INIT_VAL,
    Holder,
    NVFP4Tensor,
    QuantizedTensor,
    had_master,
    note_master,
)

Planes = tuple[torch.Tensor | None, torch.Tensor | None]


class ShardedParameters:
    """The trainable parameters of an optimizer, and whether their masters are of one step. Building it is
    collective, and moves the parameters into flat buffers. An error of one rank is raised on every rank.

    peers: the ranks that share the memory of weights; None if weights travel by collectives.
    late: takes the gathers of NVFP4 weights that go on after a step.
    """

    def __init__(
        self,
        checked: Checked,
        group: dist.ProcessGroup | None,
        bucket_mb: float,
        peers: Peers | None,
        late: LateGathers | None,
        threads: int,
    ):
        self.param_groups = checked.param_groups
        self._members = [list(map(id, group["params"])) for group in checked.param_groups]
        # No process group is kept alive, so that its threads end when it is destroyed: one of gloo that
        # outlives the interpreter may end the process with an error.
        self.trained = [one._replace(sharding=Sharding()) for one in checked.trained]
        self.peers, self._late = peers, late
        self.parameters = [one.parameter for one in self.trained]
        self.names = [one.name for one in self.trained]
        named = zip(checked.names, checked.parameters, strict=True)
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        self._kinds = [(kind_of(p), p.device) for p in self.parameters]
        options = self._options = checked.communication
        for parameter in self.parameters:
            if options.gradient_dtype not in (None, gradient_dtype(parameter)):
                with torch._C.DisableTorchFunctionSubclass():
                    parameter.grad_dtype = options.gradient_dtype  # in which autograd adds up, too
        overlap = "update" if checked.offload_gradients else options.overlap  # as passes make gradients, too
        ways = options.gradient_wire, overlap, checked.offload > 0
        self.buckets = build_buckets(checked.trained, bucket_mb, *ways)
        error, device = OwnError(), self.parameters[0].device
        zeros = zeros_on(device) if peers is None else peers.zeros
        with error:
            self.offload = Offload(self.buckets, checked.offload, threads, checked.offload_gradients)
            # The parameters whose masters, with their state, are on the host:
            self.offloaded = {i for b in self.buckets if b.is_offloaded for i in b.indices}
        for bucket in self.buckets:
            with error:  # the other ranks may share the memory of the next bucket
                bucket.allocate(zeros)
                bucket.bind()  # at once, which frees the parameters' own memory
        chunk = None
        with error:
            chunk = torch.empty(CHUNK, dtype=torch.float32, device=device)
        exchange(None, error, group, "allocating weights")
        self.holder = Holder(self.parameters)
        with self.offload.computing():
            self.coarse = self._make_masters(checked, group, chunk)
        """On rank 0, the positions of parameters whose masters begin with 4-bit values."""
        # By parameter: this rank's shard; its master, 1D, None if this rank owns nothing; and the planes of
        # the master, which are itself and its low bytes, None unless it has 24 bits.
        self.shards: list[Shard] = self.by_parameter(lambda b: b.shards)
        self.masters: list[torch.Tensor | None] = self.by_parameter(lambda b: b.own_views(b.masters))
        lows = self.by_parameter(lambda b: b.own_views(b.low))
        self.planes: list[Planes] = list(zip(self.masters, lows, strict=True))
        self.optimized = [self._as_optimized(i, master) for i, master in enumerate(self.masters)]
        """By parameter, the tensors that an optimizer updates: none, the master, or the matrices in it."""
        for i, (one, (master, low)) in enumerate(zip(self.trained, self.planes, strict=True)):
            if one.state != "full" and master is not None:
                master.zerofp4_slice = Slice(one.parameter.shape, self.shards[i], low, i)
            if i in self.offloaded and master is not None:
                master.zerofp4_offloaded = True  # which FusedAdamW takes beside those on a GPU
        self.found_inf = torch.zeros(1, dtype=torch.float32, device=device)
        """1 if the last step was skipped, or left NVFP4 weights alone because of a NaN or Inf in masters."""
        packed = [bucket for bucket in self.buckets if bucket.is_packed]
        for bucket in packed:
            with error:  # the other ranks build the next plan
                bucket.plan = self._build_plan(bucket, checked.amax_groups or ())
        exchange(None, error, group, "building casts")
        for bucket in packed:
            bucket.scales = bucket.plan.stage_scales(zeros)
        self.plans = [bucket.plan for bucket in packed]
        for param_group, place in zip(checked.param_groups, checked.places, strict=True):
            for parameter in param_group["params"]:
                if not parameter.requires_grad:
                    _broadcast_frozen(parameter, place.sharding)
        self._watch()
        self.versions = Versions(self.parameters)  # of the weights as the optimizer left them
        self.weights_follow = True  # False from a load to the next cast, which overwrites later writes
        self.broken: RuntimeError | None = None  # without a traceback, which holds frames
        self.is_between = False  # whether a backward pass has updated masters since the last step()

    def _make_masters(
        self, checked: Checked, group: dist.ProcessGroup | None, chunk: torch.Tensor
    ) -> list[int]:
        """Make the masters, and fill them, chunk by chunk, with an earlier optimizer's or rank 0's values.
        Each frees its initial value, so that there is never a second copy of all. Returns `coarse`.
        """
        coarse, error, held, values_of = [], OwnError(), checked.held, checked.values_of
        for _, parameter in self._frozen if values_of is not None else ():
            with error:
                parameter.detach().copy_(values_of(parameter))
        for bucket in self.buckets:
            planes: list[Planes] = []
            with error:
                bucket.allocate_masters()
                planes += zip(bucket.own_views(bucket.masters), bucket.own_views(bucket.low), strict=True)
            members = zip(bucket.indices, bucket.parameters, bucket.shards, strict=True)
            for k, (i, parameter, shard) in enumerate(members):
                earlier = held.master(parameter) if parameter in held else None
                source = None
                if earlier is None and bucket.rank == bucket.replica == 0:
                    with error:  # the other ranks wait for values
                        read = initial_values if values_of is None else values_of
                        source = read(parameter).reshape(-1)
                    if isinstance(parameter, QuantizedTensor) and values_of is None:
                        known = {INIT_VAL, BEGINS_WITH_CODES}
                        coarse += [i] * known.isdisjoint(parameter.record.attachments)
                for first in range(0, parameter.numel(), CHUNK):
                    values = chunk[: parameter.numel() - first]
                    if source is not None and not error:
                        part = source[first : first + values.numel()]
                        values.copy_(part.to(values.device))  # in its dtype, which has fewer bytes than FP32
                    if earlier is not None:
                        values = earlier.gather(first, values.numel())
                    else:
                        for ranks in (bucket.replicas() if bucket.rank == 0 else None, bucket.group()):
                            _broadcast(values, ranks, "sending rank 0's initial values")
                    part = intersect(first, values.numel(), shard.start, shard.end)
                    if part.numel and not error:
                        start = first + part.start - shard.start
                        here = [p[start : start + part.numel] for p in planes[k] if p is not None]
                        with error:
                            write_master(values[part.start : part.end], *here)
                source = None
                if hasattr(parameter, "clear_high_precision_init_val") and not error:
                    parameter.clear_high_precision_init_val()
        exchange(None, error, group, "making masters")
        for parameter in self.parameters:
            note_master(parameter)
        return sorted(coarse)

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

    def saved_planes(self, i: int) -> Planes:
        """The planes of a master for a save, an export or an average: made from the weight's new values if it
        was written to since the last step, but not after a load, or once another optimizer has the weight.
        """
        follows = self.weights_follow and not self.holder.is_taken_over
        return self.written_planes(i) if follows and self.versions.written([i]) else self.planes[i]

    def written_planes(self, i: int) -> Planes:
        """The planes of a master from the weight's values. A value that the master rounds to keeps the
        master: DDP writes all weights with the values that they hold. Not collective.
        """
        planes, parameter, shard = self.planes[i], self.parameters[i], self.shards[i]
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
        """After a load, ignore writes to weights: they are cast from their masters."""
        if not self.weights_follow:
            self.weights_follow = True
            self.versions.take()
            for parameter in self.parameters:
                note_master(parameter)

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

    def make_exchanges(
        self, *, is_ordered: bool, sends_early: bool, hosts: int | None, count_steps: Callable[[], int]
    ) -> list[BucketExchange]:
        """The exchange of each bucket, and the memory of offloaded ones.

        is_ordered, sends_early: `ordered` and `early` of collective_exchanges(). hosts, count_steps: as of
            hosts_exchanges().
        """
        buckets, in_turns = self.buckets, self._options.overlap == "update"
        ways = {"early": sends_early, "aliased": not (in_turns or self.offload.sums)}
        if self.peers is not None:
            exchanges = peer_exchanges(buckets, self.peers, early=sends_early, in_turns=in_turns)
        elif self._options.between_hosts is not None:
            exchanges = hosts_exchanges(buckets, hosts, count_steps, **ways)
        else:
            exchanges = collective_exchanges(buckets, ordered=is_ordered, **ways)
        if in_turns and any(exchange.arrives_as is None for exchange in exchanges):
            # All buckets have `gradients` in one slot, each until its update.
            most = max(bucket.slice_numel for bucket in buckets)
            flat = torch.zeros(most, dtype=torch.float32, device=buckets[0].device)
            for bucket in buckets:
                bucket.gradients = flat[: bucket.slice_numel]
        exchanges = [OffloadedExchange(e, self.offload) if e.bucket.is_offloaded else e for e in exchanges]
        self.offload.allocate(exchanges)
        return exchanges

    def _build_plan(
        self, bucket: Bucket, amax_groups: Sequence[Sequence[torch.Tensor]]
    ) -> CastPlan | OffloadedPlan:
        """The plan of a bucket of NVFP4 weights, with the amax groups in it."""
        inside = {id(weight.record) for weight in bucket.parameters}
        groups = [members for members in amax_groups if {id(record_of(m)) for m in members} & inside]
        masters = [self.masters[i] for i in bucket.indices]
        if bucket.is_offloaded:
            return OffloadedPlan(bucket, masters, groups, self.found_inf)
        return CastPlan(
            bucket.parameters,
            masters,
            [shard.start if shard.numel else None for shard in bucket.shards],
            bucket.group(),
            amax_groups=groups,
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

    def check_unchanged(self) -> None:
        """Raise RuntimeError for changed parameters, a broken optimizer, and a rank that failed others."""
        if self.peers is not None:
            self.peers.check()
        self.raise_if_broken()
        self.check_groups()
        self.check_moved()
        replaced = self.holder.find_replaced() if self.holder.replaced else None
        if replaced is not None:
            name = dict(zip(self.parameters, self.names, strict=True))[replaced]
            raise RuntimeError(
                f"{name} was replaced in its module since the optimizer was built (by convert_model, "
                "an assignment or load_state_dict(assign=True)), and the new one would not be trained: build "
                "a new optimizer"
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
        """Raise RuntimeError if one of these was written to since the last step, but not after a load."""
        written = self.versions.written(indices)
        if written and self.weights_follow:
            raise RuntimeError(
                f"{self.names[written[0]]} was written to since the last step, but weights follow masters: "
                "load a model before its optimizer is built, or before the optimizer loads a checkpoint; "
                "wrap it in DistributedDataParallel, which writes rank 0's values, before that or with "
                "init_sync=False"
            )

    def check_groups(self) -> None:
        """Raise RuntimeError unless these are the parameters that the optimizer was built with."""
        if [list(map(id, group["params"])) for group in self.param_groups] != self._members:
            raise RuntimeError(
                "param_groups is not the list that the optimizer was built with: masters and weights lie in "
                "flat buffers, so build a new optimizer to change it"
            )

    def check_moved(self) -> None:
        """Raise RuntimeError for the first parameter, master or buffer that has moved, also by its .data."""
        self.check_not_taken_over()
        error = self._addresses.find_moved()
        if error is not None:
            raise RuntimeError(self._find_changed() or error)

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
            raise RuntimeError(
                "another ZeroFP4Optimizer was built over these parameters, which follow its masters now: go "
                "on with that one and delete this one. A new optimizer takes over the masters of masters_from"
            )

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

    # Whether the masters are of one step

    @property
    def obstacle(self) -> str | None:
        """Why a save of the masters must not be loaded."""
        if self.broken is not None:
            return f"{self.broken}: it must not be saved"
        between = "a backward pass has updated masters: call step() before they are saved"
        return between if self.is_between else None

    @contextlib.contextmanager
    def breaking(self, call: str, in_buckets: bool = False) -> Iterator[None]:
        """An error inside leaves the optimizer broken; in_buckets: only after a bucket's update."""
        try:
            yield
        except BaseException as error:
            if not in_buckets or (self.is_between and self.broken is None):
                self.mark_broken(call, error)
            raise

    def mark_broken(self, call: str, error: BaseException) -> None:
        self.broken = RuntimeError(
            f"{call} was left in the middle ({error_text(error)}), and masters may be of two steps"
        )

    def raise_if_broken(self) -> None:
        if self.broken is not None:
            raise RuntimeError(
                f"the optimizer is of no more use: {self.broken}. Load a checkpoint (load_state_dict()), or "
                "build a new optimizer"
            ) from self.broken

    def check_sound(self) -> None:
        """Raise RuntimeError if masters may be of two steps."""
        self.raise_if_broken()
        if self.obstacle is not None:
            raise RuntimeError(self.obstacle)

    # Late gathers

    def settle(self) -> None:
        """Make the current stream wait for late gathers."""
        if self._late is not None:
            self._late.settle()

    def check(self) -> None:
        """Wait for the casts. Raises RuntimeError for an error in them, and for moved storage."""
        if self._late is not None:
            self._late.synchronize()
        self.check_moved()
        for plan in self.plans:
            plan.check()
        if self.peers is not None:
            self.peers.check()


# Initial values


def initial_values(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's values, 1D, on any device: from before it was quantized, if convert_model kept them."""
    getter = getattr(parameter, "get_high_precision_init_val", None)
    value = None if getter is None else getter()
    if value is None:
        value = parameter.dequantize(torch.float32) if isinstance(parameter, QuantizedTensor) else parameter
    return value.detach().reshape(-1)


def _broadcast(values: torch.Tensor, group: dist.ProcessGroup | None, stage: str) -> None:
    if rank_and_size(group)[1] > 1:
        with Stage(stage, group):
            dist.broadcast(values, group=group, group_src=0)


def _broadcast_frozen(parameter: torch.Tensor, sharding: Sharding) -> None:
    """Collective: give a parameter that has no master the bytes of rank 0."""
    quantized = isinstance(parameter, NVFP4Tensor)
    tensors = [buffer for _, buffer in parameter.record.buffers()] if quantized else [parameter]
    # First within each replica, from its first rank, then from the first replica to the others.
    for group in (sharding.group, sharding.replicas):
        for tensor in filter(torch.Tensor.numel, tensors):
            values = tensor.detach().contiguous()
            _broadcast(values.view(-1).view(torch.uint8), group, "sending rank 0's frozen parameters")
            if values.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(values)
