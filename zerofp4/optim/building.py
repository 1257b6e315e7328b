"""How a ZeRO optimizer is built: what its ranks agree on first, and what it is made of then."""

import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerofp4.distributed import GroupReference, attempt, exchange, rank_and_size, resolve_group
from zerofp4.engine import (
    TRANSPORTS,
    EarlyPeerReducer,
    EarlyReducer,
    GradientReducer,
    HostReducer,
    Hosts,
    LocalReducer,
    PeerReducer,
    Sharding,
    Updated,
    Wire,
    check_gradient_dtype,
    join_host,
    join_peers,
    make_wire,
    set_gradient_dtype,
)
from zerofp4.optim.bucketed import BucketedStep
from zerofp4.optim.build import (
    Announcement,
    amax_group_numbers,
    announce,
    check_announcements,
    check_can_overlap,
    check_hosts,
    check_overlap,
    check_parameters,
    check_transport,
    describe,
    find_slots,
    overlaps_backward,
    overlaps_forward,
)
from zerofp4.optim.groups import Place, find_hosts, find_places
from zerofp4.optim.initial import HandedMaster, HeldMaster, broadcast_frozen, take_over
from zerofp4.optim.inner import (
    InnerOptimizers,
    check_amax_groups,
    check_values,
    group_classes,
    how_updated,
    try_options,
    without_class,
)
from zerofp4.optim.names import find_saved_names
from zerofp4.optim.nonfinite import NonfiniteGradients, check_policy
from zerofp4.optim.param_groups import parameter_names
from zerofp4.optim.rounds import Rounds
from zerofp4.optim.seal import draw_token
from zerofp4.optim.sharded import ShardedParameters
from zerofp4.optim.stepping import SteppedOptimizer
from zerofp4.optim.votes import Votes
from zerofp4.optim.watch import ParameterWatch
from zerofp4.tensors import NVFP4Tensor, had_master


class Choices(NamedTuple):
    """The arguments of ZeroFP4Optimizer beside parameters, their optimizer and their ranks."""

    amax_groups: Sequence[Sequence[torch.Tensor]] | None
    transport: str
    hosts: dist.device_mesh.DeviceMesh | None
    gradient_dtype: torch.dtype | None
    gradient_wire: torch.dtype | None
    overlap: str | None
    accumulate: str
    bucket_mb: float | None
    whole_matrices: bool | None
    masters_from: "BuiltOptimizer | None"
    on_nonfinite: str


class Checked(NamedTuple):
    """What this rank makes of its arguments alone. updated, shardings: by trainable parameter. places: by
    group. hosts: None where there are none to tell apart.
    """

    updated: list[Updated]
    places: list[Place]
    shardings: list[Sharding]
    hosts: Hosts | None
    wire: Wire
    held: Mapping[int, HeldMaster]
    announcement: Announcement


class BuiltOptimizer(SteppedOptimizer):
    """The half of ZeroFP4Optimizer that is done once."""

    _built = False

    def _build(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None,
        choices: Choices,
        defaults: dict[str, Any],
    ) -> None:
        """Collective. What is wrong on any rank raises on all, before anything has changed."""
        group = resolve_group(process_group)
        self.process_group = GroupReference(group)
        checked, error = attempt(self._check, params, optimizer_class, group, choices, defaults)
        announcement = None if checked is None else checked.announcement
        told = exchange((announcement, draw_token()), error, group, "building ZeroFP4Optimizer")
        announced, (self._token, *_) = zip(*told, strict=True)
        check_announcements(announced)
        transport, why_collective = check_transport(choices.transport, announced)
        if transport == "auto" and choices.accumulate == "sharded":
            transport, why_collective = "collective", "accumulate='sharded' adds up every backward pass"
        self._saved_names = find_saved_names(announced, rank_and_size(group)[0])
        self._hosts, device = checked.hosts, self._trainable[0].device
        if self._hosts is None:
            self._peers, obstacle = join_peers(transport, group, device)
        else:
            self._peers, obstacle = join_host(self._hosts, group, device), "hosts share no memory"
        set_gradient_dtype(choices.gradient_dtype, self._trainable)
        self._why_collective = obstacle if len(announced) == 1 else why_collective or obstacle
        self._overlap, self._accumulate = choices.overlap, choices.accumulate
        earlier = choices.masters_from
        if earlier is not None and earlier._rounds is not None:
            earlier._rounds.stop()
        with torch.no_grad():
            self._make(choices, checked, announced, group)
        self._built = True

    def _check(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        group: dist.ProcessGroup | None,
        choices: Choices,
        defaults: dict[str, Any],
    ) -> Checked:
        """What one rank can check alone; the parameters stay as they are."""
        check_policy(choices.on_nonfinite)
        check_overlap(choices.overlap, choices.accumulate)
        if choices.transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {TRANSPORTS}, got {choices.transport!r}")
        updated = self._take_arguments(params, optimizer_class, choices, defaults)
        check_gradient_dtype(choices.gradient_dtype, self._trainable, self._trainable_names)
        places = find_places(self.param_groups, group)
        shardings = self._shardings(places)
        hosts = find_hosts(choices.hosts, group)
        check_hosts(hosts, choices.transport, choices.overlap, choices.accumulate, shardings, group)
        dtypes = choices.gradient_wire, choices.gradient_dtype
        wire = make_wire(dtypes[0], choices.bucket_mb, self._trainable, dtypes[1])
        held = take_over(choices.masters_from, self._trainable, self._trainable_names, group, shardings)
        groups = [sharding.group for sharding in shardings]
        check_can_overlap(choices.overlap, choices.accumulate, choices.transport, groups, group)
        announcement = self._announce(choices, places, hosts, updated, held, wire)
        return Checked(updated, places, shardings, hosts, wire, held, announcement)

    def _make(
        self,
        choices: Choices,
        checked: Checked,
        announced: Sequence[Announcement],
        group: dist.ProcessGroup | None,
    ) -> None:
        """All that the optimizer is made of, and the first weights."""
        rank, size = rank_and_size(group)
        slots = find_slots(announced, rank)
        wire = checked.wire._replace(bucket_mb=max(other.bucket_mb for other in announced))
        self._shards = ShardedParameters(
            self._trainable,
            self._trainable_names,
            checked.shardings,
            size,
            choices.amax_groups,
            wire,
            checked.updated,
            self._peers if self._hosts is None else None,
            overlaps_backward(choices.overlap),
            overlaps_forward(choices.overlap),
        )
        pairs = zip(self._trainable, self._trainable_names, strict=True)
        lost = [name for p, name in pairs if id(p) not in checked.held and had_master(p)]
        self._shards.initialize_masters(checked.held)
        self._broadcast_frozen(checked.places)
        self._build_inners()
        self._reducer = self._make_reducer(group, wire)
        self._bucketed = BucketedStep(self.inners, self._shards, self._reducer, self._peers)
        self._votes = Votes(slots, self._shards.buffers[0].device, group)
        self._reduced = self._factor = self._unheard = self._agreed_in_sequence = None
        self._nonfinite = NonfiniteGradients(
            choices.on_nonfinite, slots, size, self._shards.parameters[0].device, self.inners, wire.dtype
        )
        self._steps = self._cleared = 0
        self._watch = ParameterWatch(self.param_groups, self._names, self._shards)
        self._weights_follow = True
        self._publish()
        self._shards.settle()
        if lost:
            _warn_of_lost_masters(lost)

    def _take_arguments(
        self, params: Any, optimizer_class: type, choices: Choices, defaults: dict
    ) -> list[Updated]:
        """Returns how the masters of the trainable parameters are updated."""
        amax_groups = choices.amax_groups
        super().__init__(params, {})
        self._classes = group_classes(self.param_groups, optimizer_class, choices.whole_matrices, defaults)
        # What is in them is an option: checkpoints have it, and all ranks must agree on it.
        self.param_groups = [without_class(group) for group in self.param_groups]
        self._parameters = [p for group in self.param_groups for p in group["params"]]
        self._names = parameter_names(self.param_groups)
        check_parameters(self._parameters, self._names)
        pairs = [(p, n) for p, n in zip(self._parameters, self._names, strict=True) if p.requires_grad]
        self._trainable, self._trainable_names = [p for p, _ in pairs], [name for _, name in pairs]
        if amax_groups and not any(isinstance(p, NVFP4Tensor) for p in self._trainable):
            raise ValueError("amax_groups was given, but no NVFP4 weight of params requires a gradient")
        device = self._parameters[0].device
        tried = try_options(self._classes, self.param_groups, device)
        check_values(self._classes, self.param_groups, device)
        own = [one.defaults for one in tried if type(one) is optimizer_class]
        self.defaults = own[0] if own else tried[0].defaults
        updated = how_updated(self.param_groups, self._classes, tried)
        check_amax_groups(amax_group_numbers(self._trainable, amax_groups), updated, self._trainable_names)
        return updated

    def _make_reducer(self, group: dist.ProcessGroup | None, wire: Wire) -> GradientReducer:
        arguments, adds = (self._shards.buffers, group, wire), self._accumulate == "sharded"
        early, self._rounds = overlaps_backward(self._overlap) and rank_and_size(group)[1] > 1, None
        if self._hosts is not None:
            return HostReducer(*arguments, self._peers, self._hosts)
        if not (early or adds):
            if self._peers is not None:
                return PeerReducer(*arguments, self._peers)
            rounds = wire.dtype not in (None, torch.float32)
            alone = rank_and_size(group)[1] == 1 and not rounds
            return (LocalReducer if alone else GradientReducer)(*arguments)
        me = weakref.ref(self)  # the parameters hold what holds this
        reducer = (
            EarlyReducer(*arguments, adds=adds)
            if self._peers is None
            else EarlyPeerReducer(*arguments, self._peers)
        )
        self._rounds = Rounds(
            *(self._trainable, self._trainable_names, reducer),
            early=early,
            adds=adds,
            word_of=lambda gradients: me()._nonfinite.word(gradients),
            is_reduced=lambda: me()._reduced is not None or me()._shards.is_taken_over,
        )
        return reducer

    def _shardings(self, places: Sequence[Place]) -> list[Sharding]:
        """By trainable parameter."""
        pairs = zip(self.param_groups, places, strict=True)
        return [place.sharding for group, place in pairs for p in group["params"] if p.requires_grad]

    def _announce(
        self,
        choices: Choices,
        places: Sequence[Place],
        hosts: Hosts | None,
        updated: Sequence[Updated],
        held: Mapping[int, HeldMaster],
        wire: Wire,
    ) -> Announcement:
        given = wire if choices.bucket_mb is not None else wire._replace(bucket_mb=None)
        names = [inner.name for inner in self._classes]
        common = {
            "optimizer_class": " and ".join(dict.fromkeys(names)),
            "on_nonfinite": choices.on_nonfinite,
            "transport": choices.transport,
            "hosts": str(hosts and hosts.shape),
            "overlap and accumulate": f"{choices.overlap} and {choices.accumulate}",
            "gradient_dtype, gradient_wire and bucket_mb": str(given),
        }
        numbers = amax_group_numbers(self._trainable, choices.amax_groups)
        kinds = describe(self.param_groups, names, updated)
        return announce(self.param_groups, self._names, kinds, places, numbers, held, common, wire.bucket_mb)

    def _broadcast_frozen(self, places: Sequence[Place]) -> None:
        for param_group, place in zip(self.param_groups, places, strict=True):
            for parameter in param_group["params"]:
                if not parameter.requires_grad:
                    broadcast_frozen(parameter, place.sharding)

    def _handed_masters(self) -> dict[int, HandedMaster]:
        """What this optimizer offers to the one that is built with it as masters_from, by id(parameter)."""
        if self.broken is not None:
            raise ValueError(f"masters_from is of no more use: {self.broken}")
        if self._rounds is not None and self._rounds.adds and self._rounds.is_holding:
            raise ValueError(
                "masters_from holds gradients of backward passes that no step has used, which would be lost: "
                "call its step() or zero_grad() first"
            )
        written = set(self._watch.written())
        return {
            id(p): HandedMaster(self._shards.held_master(i), group, i in written)
            for i, (p, group) in enumerate(zip(self._shards.parameters, self._shards.groups(), strict=True))
        }

    def _build_inners(self) -> None:
        optimized = zip(self._trainable, self._shards.optimized, strict=True)
        self.inners = InnerOptimizers(self._classes, self.param_groups, {id(p): own for p, own in optimized})
        self._shards.take_amaxes_from(self.inners.all)
        self.state = self._view_state()
        self._pull_options()


def _warn_of_lost_masters(names: Sequence[str]) -> None:
    warnings.warn(
        f"the masters of {len(names)} weights ({names[0]}{', ...' * (len(names) > 1)}) begin with 4-bit "
        "values: an earlier ZeroFP4Optimizer had their FP32 masters. Give that one as masters_from, or its "
        "state_dict() to load_state_dict() before the first step",
        stacklevel=5,
    )
