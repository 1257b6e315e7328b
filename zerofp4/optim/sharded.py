"""The weights of a model and their sharded masters: made once, published after every update of the
masters.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zerofp4.cast import CastPlan
from zerofp4.distributed import GroupReference, OwnError
from zerofp4.engine import (
    Arrivals,
    FlatBuffer,
    GradientReducer,
    Peers,
    Sharding,
    Updated,
    Wire,
    build_buffers,
    describe_buckets,
)
from zerofp4.ops import Addresses
from zerofp4.optim.build import amax_group_numbers, kind_of
from zerofp4.optim.fused import FusedAdamW
from zerofp4.optim.initial import HeldMaster, initialize_masters
from zerofp4.optim.matrices import matrices_of
from zerofp4.optim.publishing import publish_groups
from zerofp4.shard import Shard
from zerofp4.storage import record_of
from zerofp4.tensors import NVFP4Tensor

_TAKEN_OVER = (
    "another ZeroFP4Optimizer was built over these parameters, which follow its masters now: go on with that "
    "one and delete this one. A new optimizer takes over the masters of the one that it gets as masters_from"
)


class ShardedParameters:
    """Parameters that lie in flat buffers, with this rank's pieces of their FP32 masters and gradients.

    names: what messages call the parameters. shardings: of each. world_size: the number of all ranks that
    step together. updated: how their masters are. peers: the ranks, where weights lie in memory that they
    share. as_made: whether gradients travel in backward passes. defers: whether NVFP4 weights may be gathered
    while the next forward pass runs.
    masters[i], gradients[i]: 1D float32, this rank's piece of parameters[i], None where it owns nothing. The
    memory of gradients is made when they are first asked for.
    optimized[i]: what an optimizer updates of parameters[i]: nothing, the piece, or the matrices in it.
    found_inf: float32 [1], what the last publish() was given, or 1 where it left NVFP4 weights alone because
    of a NaN or Inf.
    is_taken_over: whether a later optimizer has made parameters of these views of its own buffers.

    Building it is collective, and so are its methods. The parameters move into the buffers; the masters have
    no values until initialize_masters().
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        shardings: Sequence[Sharding],
        world_size: int,
        amax_groups: Sequence[Sequence[torch.Tensor]] | None,
        wire: Wire,
        updated: Sequence[Updated],
        peers: Peers | None = None,
        as_made: bool = False,
        defers: bool = False,
    ):
        self._world_size, self.is_taken_over = world_size, False
        self.parameters, self.names, self.updated = list(parameters), list(names), list(updated)
        self._kinds = [(kind_of(p), p.device) for p in self.parameters]
        numbers = amax_group_numbers(self.parameters, amax_groups)
        order = as_made, defers and not as_made
        self.buffers = build_buffers(self.parameters, numbers, shardings, wire, self.updated, *order)
        self._arrivals = Arrivals(self.parameters[0].device) if defers else None
        self.masters: list[torch.Tensor | None] = [None] * len(self.parameters)
        self._views: list[list[torch.Tensor | None] | None] = [None] * len(self.buffers)
        for buffer in self.buffers:
            buffer.peers = peers
            buffer.allocate()
            buffer.take_values()
            self._bind(buffer)
            for index, master in zip(buffer.indices, buffer.own_views(buffer.masters), strict=True):
                self.masters[index] = master
        found = {i: shard for b in self.buffers for i, shard in zip(b.indices, b.shards, strict=True)}
        self._shards = [found[i] for i in range(len(self.parameters))]
        self.optimized = [self._as_optimized(i, master) for i, master in enumerate(self.masters)]
        self.found_inf = torch.zeros(1, dtype=torch.float32, device=self.parameters[0].device)
        self._plans = [self._build_plan(buffer, amax_groups or ()) for buffer in self.buffers]
        self._amaxes_from: tuple[torch.optim.Optimizer, ...] = ()
        self._take_addresses()

    @functools.cached_property
    def gradients(self) -> list[torch.Tensor | None]:
        """With the memory for them, which stays."""
        views: list[torch.Tensor | None] = [None] * len(self.parameters)
        for b, buffer in enumerate(self.buffers):
            for index, view in zip(buffer.indices, self.gradients_of(b), strict=True):
                views[index] = view
        return views

    def _as_optimized(self, i: int, piece: torch.Tensor | None) -> list[torch.Tensor]:
        if piece is None:
            return []
        if self.updated[i].work is None:
            return [piece]
        return matrices_of(piece, self.parameters[i].shape)

    @functools.cached_property
    def optimized_gradients(self) -> list[list[torch.Tensor]]:
        """Of `optimized`: the same views in every step."""
        return [self._as_optimized(i, gradient) for i, gradient in enumerate(self.gradients)]

    def gradients_of(self, b: int) -> list[torch.Tensor | None]:
        """Of buffer b, with the memory for them: the same views in every step."""
        if self._views[b] is None:
            self._views[b] = self.buffers[b].own_views(self.buffers[b].gradients)
        return self._views[b]

    def make_gradients(self) -> None:
        """Have memory for all of them."""
        for b in range(len(self.buffers)):
            self.gradients_of(b)

    def has_gradients(self) -> bool:
        """Whether there is memory for them by now."""
        return all(buffer.has_gradients for buffer in self.buffers)

    def _build_plan(
        self,
        buffer: FlatBuffer,
        amax_groups: Sequence[Sequence[torch.Tensor]],
    ) -> CastPlan | None:
        """Of a bucket of NVFP4 weights, with the amax groups that lie in it."""
        if buffer.kind != "nvfp4":
            return None
        inside = {id(weight.record) for weight in buffer.parameters}
        return CastPlan(
            buffer.parameters,
            [self.masters[i] for i in buffer.indices],
            [shard.start if shard.numel else None for shard in buffer.shards],
            buffer.group(),
            amax_groups=[members for members in amax_groups if {id(record_of(m)) for m in members} & inside],
            on_nonfinite="skip",
            found_inf=self.found_inf,
        )

    def _bind(self, buffer: FlatBuffer) -> None:
        buffer.bind()
        if self._arrivals is not None and buffer.kind == "nvfp4":
            self._arrivals.watch(buffer)

    # Addresses

    def _take_addresses(self) -> None:
        named = list(zip(self.names, self.parameters, strict=True))
        packed = {name: p for name, p in named if isinstance(p, NVFP4Tensor)}
        dense = {name: p for name, p in named if not isinstance(p, NVFP4Tensor)}
        self._dense_addresses = Addresses({}, dense, owner="optimizer")
        self._packed_addresses = Addresses(packed, {}, owner="optimizer")

    def find_moved(self) -> RuntimeError | None:
        """An error for the first parameter, master or buffer that has moved since its address was taken.

        Looks at every address: whoever assigns the .data of a parameter or a master leaves no mark. It is the
        only look of a step at all of them. What a later optimizer has taken over does not come back.
        """
        if self.is_taken_over:
            return RuntimeError(_TAKEN_OVER)
        error = self._dense_addresses.find_moved()
        for plan in self._present_plans() if error is None else ():
            error = plan.find_moved()
            if error is not None:  # the plan knows a weight by its place among those of its bucket
                return self._packed_addresses.find_moved() or error
        return error

    def _present_plans(self) -> list[CastPlan]:
        return [plan for plan in self._plans if plan is not None]

    def refresh(self) -> None:
        """Give the parameters the memory of the buffers again, with its values, and take all addresses anew.
        Not collective.

        Raises, before anything has changed, ValueError for a parameter that has another shape, dtype, device
        or kind than it was built with, and RuntimeError where a later optimizer has taken parameters over.
        """
        self.check_not_taken_over()
        for name, p, kind in zip(self.names, self.parameters, self._kinds, strict=True):
            if (kind_of(p), p.device) != kind:
                raise ValueError(
                    f"{name} was {kind[0]} on {kind[1]}, now it is {kind_of(p)} on {p.device}: build a new "
                    "optimizer"
                )
        self.settle()
        for buffer in self.buffers:
            self._bind(buffer)
        for plan in self._present_plans():
            plan.refresh()
        self.take_amaxes_from(self._amaxes_from)
        self._take_addresses()

    def check_not_taken_over(self) -> None:
        if self.is_taken_over:
            raise RuntimeError(_TAKEN_OVER)

    def initialize_masters(self, held: Mapping[int, HeldMaster]) -> None:
        """Give all masters rank 0's values of their parameters, or what is held of them elsewhere."""
        for buffer in self.buffers:
            initialize_masters(buffer, held)

    def held_master(self, i: int) -> HeldMaster:
        """This rank's piece of the master of parameters[i]."""
        return HeldMaster(self.masters[i], self._shards[i])

    def held_masters(self) -> dict[int, HeldMaster]:
        """This rank's pieces of the masters, by the identity of the parameter."""
        return {id(parameter): self.held_master(i) for i, parameter in enumerate(self.parameters)}

    def groups(self) -> list[GroupReference]:
        """By parameter, the ranks that it is sharded over."""
        found = {i: buffer.group for buffer in self.buffers for i in buffer.indices}
        return [found[i] for i in range(len(self.parameters))]

    def shards(self) -> list[Shard]:
        """By parameter, what this rank owns."""
        return self._shards

    def take_amaxes_from(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Let those optimizers of masters that can update theirs bucket by bucket, and leave the amaxes of
        those of NVFP4 weights in each step.

        optimizers: by the number that `updated` has.
        """
        pairs = [
            (self.updated[buffer.indices[0]].by, buffer, plan)
            for buffer, plan in zip(self.buffers, self._plans, strict=True)
        ]
        for number, optimizer in enumerate(optimizers):
            if isinstance(optimizer, FusedAdamW):
                parts = [
                    ([master for i in buffer.indices for master in self.optimized[i]], plan)
                    for by, buffer, plan in pairs
                    if by == number
                ]
                optimizer.offer_parts(parts)
        self._amaxes_from = tuple(optimizers)

    def publish(
        self,
        found_inf: torch.Tensor | None = None,
        update: Callable[[int], None] | None = None,
        error: Exception | None = None,
    ) -> None:
        """Cast this rank's masters into the weights and gather the other ranks' slices, in place.

        found_inf: float32, one element on the device, which ours begins with; 0 without it. Where an update
        has left the masters as they were, the weights get the bytes that they have.
        update: updates the masters of one buffer, and leaves their amaxes; without it they are as they are.
        error: what went wrong on this rank, which takes its part, without giving anything, and raises it.
        """
        self.check_not_taken_over()
        try:
            self.settle()
            if found_inf is None:
                self.found_inf.zero_()
            else:
                self.found_inf.copy_(found_inf)
            leaving = [one for one in self._amaxes_from if isinstance(one, FusedAdamW)]
            if update is None and any(one.amaxes_outdated() for one in leaving):
                for plan in self._present_plans():
                    plan.begin_update()  # takes them back
            publish_groups(self.buffers, self._plans, self._world_size, update, error, self._arrivals)
        finally:  # see OwnError
            del error

    def settle(self) -> None:
        """What is queued next on the current stream finds all weights, or may write to them."""
        if self._arrivals is not None:
            self._arrivals.settle()

    def check(self) -> None:
        """Wait for the device, and raise RuntimeError for what has gone wrong in publications, or has moved
        since.
        """
        if self._arrivals is not None:
            self._arrivals.synchronize()
        OwnError(self.find_moved()).raise_if_any()
        for plan in self._present_plans():
            plan.check()

    def describe(
        self, reducer: GradientReducer, optimizers: Sequence[torch.optim.Optimizer]
    ) -> dict[str, Any]:
        """optimizers: by the number that `updated` has."""
        described = describe_buckets(self.buffers, self._plans, reducer)
        for bucket, buffer in zip(described["buckets"], self.buffers, strict=True):
            bucket["optimizer"] = type(optimizers[self.updated[buffer.indices[0]].by]).__name__
            late = self._arrivals is not None and buffer.kind == "nvfp4"
            bucket["gathered_in"] = None if buffer.world_size == 1 else "forward" if late else "step"
        return described

    def gathered_masters(self) -> list[torch.Tensor]:
        """The whole FP32 masters, in the order and the shapes of the parameters."""
        found: list[torch.Tensor | None] = [None] * len(self.parameters)
        for buffer in self.buffers:
            for index, master in zip(buffer.indices, buffer.gathered_masters(), strict=True):
                found[index] = master
        return found

    def gathered_bytes(self) -> dict[str, int]:
        """Bytes of the buffers that a publish() gathers; 0 in a world of one."""
        sharded = [b for b in self.buffers if b.world_size > 1]
        return {
            "nvfp4": sum(b.weights.nbytes for b in sharded if b.kind == "nvfp4"),
            "high_precision": sum(b.weights.nbytes for b in sharded if b.kind != "nvfp4"),
            "bf16_equivalent": 2 * sum(p.numel() for b in sharded for p in b.parameters),
        }
