"""Parameters in flat buffers, this rank's pieces of their FP32 masters, and the plans that cast them.

What others do to these parameters between two steps is noticed here, too: whoever exchanges, moves, writes to
or unfreezes one would go on without the masters.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from zerofp4.cast import CastPlan, StagedPlan
from zerofp4.distributed import GroupReference, OwnError
from zerofp4.engine import (
    FlatBuffer,
    LateGathers,
    Peers,
    Sharding,
    Updated,
    Wire,
    attributes,
    build_buffers,
    gradients_of,
)
from zerofp4.ops import Addresses
from zerofp4.optim.adamw import FusedAdamW
from zerofp4.optim.build import amax_group_numbers, kind_of
from zerofp4.shard import Shard
from zerofp4.storage import find_freed, record_of
from zerofp4.tensors import Holder, NVFP4Tensor

_version, _layout, _device, _requires_grad = map(
    attrgetter, ("_version", "layout", "device", "requires_grad")
)

_TAKEN_OVER = (
    "another ZeroFP4Optimizer was built over these parameters, which follow its masters now: go on with that "
    "one and delete this one. A new optimizer takes over the masters of the one that it gets as masters_from"
)


class ShardedParameters:
    """The trainable parameters of an optimizer. Building it is collective, and moves them into flat buffers;
    the masters have no values until initialize_masters().

    param_groups: of the optimizer.
    names: what messages call the parameters, frozen ones too.
    shardings, updated: by trainable parameter, over which ranks it is sharded and how its master is updated.
    amax_groups: lists of NVFP4 weights that share one amax.
    wire: how gradients are sent, which sizes the buckets.
    peers: the ranks that share the memory of weights; None where weights travel by collectives.
    as_made: whether buckets come in the order in which backward passes make gradients.
    late: takes the gathers of NVFP4 weights that go on behind a step.
    """

    def __init__(
        self,
        param_groups: Sequence[dict],
        names: Sequence[str],
        *,
        shardings: Sequence[Sharding],
        updated: Sequence[Updated],
        amax_groups: Sequence[Sequence[torch.Tensor]] | None,
        wire: Wire,
        peers: Peers | None,
        as_made: bool,
        late: LateGathers | None,
    ):
        self._members = [list(group["params"]) for group in param_groups]
        pairs = list(zip((p for members in self._members for p in members), names, strict=True))
        self.parameters = [p for p, _ in pairs if p.requires_grad]
        self.names = [name for p, name in pairs if p.requires_grad]
        self._frozen = {p: name for p, name in pairs if not p.requires_grad}
        self.updated = list(updated)
        self._kinds = [(kind_of(p), p.device) for p in self.parameters]
        numbers = amax_group_numbers(self.parameters, amax_groups)
        order = as_made, late is not None and not as_made
        self.buffers = build_buffers(self.parameters, numbers, shardings, wire, self.updated, *order)
        self._late = late
        for buffer in self.buffers:
            buffer.peers = peers
            buffer.allocate()
            buffer.take_values()
            self._bind(buffer)
        self.masters: list[torch.Tensor | None] = self._by_parameter(lambda b: b.own_views(b.masters))
        """By parameter, 1D float32, this rank's piece of its master; None where it owns nothing."""
        self.shards: list[Shard] = self._by_parameter(lambda b: b.shards)
        """By parameter, what this rank owns."""
        self.groups: list[GroupReference] = self._by_parameter(lambda b: [b.group] * len(b.indices))
        """By parameter, the ranks that it is sharded over."""
        self.optimized = [self._as_optimized(i, master) for i, master in enumerate(self.masters)]
        """By parameter, what an optimizer updates: nothing, the piece, or the matrices in it."""
        self.found_inf = torch.zeros(1, dtype=torch.float32, device=self.parameters[0].device)
        """1 where the last step was skipped, or left NVFP4 weights alone because of a NaN or Inf in masters.
        """
        self.plans = [self._build_plan(buffer, amax_groups or ()) for buffer in self.buffers]
        """By bucket, what casts its NVFP4 weights; None for other weights."""
        self._casts = [plan for plan in self.plans if plan is not None]
        self._amaxes_from: Sequence[torch.optim.Optimizer] = ()
        self._presence: Sequence[torch.Tensor | None] = [None] * len(self.parameters)
        self.holder = Holder(self.parameters)
        self._take_addresses()
        self.accept_values()

    def _by_parameter(self, of_bucket: Callable[[FlatBuffer], list]) -> list:
        """What a function returns for the parameters of each bucket, in the order of all parameters."""
        found: dict[int, Any] = {}
        for buffer in self.buffers:
            found |= zip(buffer.indices, of_bucket(buffer), strict=True)
        return [found[i] for i in range(len(self.parameters))]

    def _as_optimized(self, i: int, piece: torch.Tensor | None) -> list[torch.Tensor]:
        if piece is None:
            return []
        if self.updated[i].work is None:
            return [piece]
        rows, columns = self.parameters[i].shape[-2:]
        return [matrix.view(rows, columns) for matrix in piece.split(rows * columns)]

    @functools.cached_property
    def gradients(self) -> list[torch.Tensor | None]:
        """By parameter, 1D float32, this rank's piece of its averaged gradient. Their memory is made here."""
        return self._by_parameter(lambda b: b.gradient_views)

    @functools.cached_property
    def optimized_gradients(self) -> list[list[torch.Tensor]]:
        """Of `optimized`: the same views in every step."""
        return [self._as_optimized(i, gradient) for i, gradient in enumerate(self.gradients)]

    def _build_plan(
        self, buffer: FlatBuffer, amax_groups: Sequence[Sequence[torch.Tensor]]
    ) -> StagedPlan | None:
        """Of a bucket of NVFP4 weights, with the amax groups that lie in it."""
        if buffer.kind != "nvfp4":
            return None
        inside = {id(weight.record) for weight in buffer.parameters}
        plan = CastPlan(
            buffer.parameters,
            [self.masters[i] for i in buffer.indices],
            [shard.start if shard.numel else None for shard in buffer.shards],
            buffer.group(),
            amax_groups=[members for members in amax_groups if {id(record_of(m)) for m in members} & inside],
            on_nonfinite="skip",
            found_inf=self.found_inf,
        )
        return plan.staged

    def _bind(self, buffer: FlatBuffer) -> None:
        buffer.bind()
        if self._late is not None and buffer.kind == "nvfp4":
            self._late.watch(buffer)

    # What others have done to the parameters

    def read_gradients(self) -> list[torch.Tensor | None]:
        """p.grad of all parameters.

        Raises RuntimeError for one that cannot be read: sparse, on another device, or of freed memory.
        """
        gradients, device = gradients_of(self.parameters), self.buffers[0].device
        present = [gradient for gradient in gradients if gradient is not None]
        layouts, devices = set(map(_layout, present)), set(map(_device, present))
        if layouts <= {torch.strided} and devices <= {device} and find_freed(present) is None:
            return gradients
        for name, gradient in zip(self.names, gradients, strict=True):
            problem = None
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                problem = f"of layout {gradient.layout}: gradients must be dense"
            elif gradient.device != device:
                problem = f"on {gradient.device}, and its master is on {device}"
            elif find_freed([gradient]) is not None:
                problem = "whose storage was freed in place (resize_)"
            if problem is not None:
                raise RuntimeError(f"{name} has a gradient {problem}")
        return gradients

    def check_unchanged(self, param_groups: Sequence[dict]) -> None:
        """Raise RuntimeError for parameters that others than the optimizer exchanged, moved, wrote to or
        unfroze.
        """
        self.check_groups(param_groups)
        OwnError(self.find_moved()).raise_if_any()
        replaced = self.holder.find_replaced()
        if replaced is not None:
            name = dict(zip(self.parameters, self.names, strict=True))[replaced]
            raise RuntimeError(
                f"{name} was replaced in its module since the optimizer was built (by an assignment, or "
                "load_state_dict(assign=True)), and would be trained in vain: build a new optimizer from the "
                "model's present parameters"
            )
        written = self.written()
        if written:
            raise RuntimeError(
                f"{self.names[written[0]]} was written to since the last step, which its FP32 master would "
                "undo: load a model before its optimizer is built, or before the optimizer's "
                "load_state_dict(); wrap it in DistributedDataParallel, which writes rank 0's values, before "
                "that or with init_sync=False"
            )
        if any(attributes(_requires_grad, self._frozen)):
            name = next(name for p, name in self._frozen.items() if p.requires_grad)
            raise RuntimeError(
                f"{name} was frozen when the optimizer was built and has no master: build a new optimizer, "
                "with masters_from=this one, or have it load_state_dict() this one's state_dict(), moments "
                "and all"
            )

    def check_groups(self, param_groups: Sequence[dict]) -> None:
        """Raise RuntimeError unless these are the parameters that the optimizer was built with."""
        if len(param_groups) != len(self._members):
            raise RuntimeError(
                f"param_groups: there were {len(self._members)} groups, now there are {len(param_groups)}"
            )
        for g, (group, members) in enumerate(zip(param_groups, self._members, strict=True)):
            params = group["params"]
            if len(params) != len(members) or not all(map(operator.is_, params, members)):
                raise RuntimeError(
                    f"param_groups[{g}]['params'] is not the list that the optimizer was built with: masters "
                    "and weights lie in flat buffers, so build a new optimizer to change it"
                )

    def accept_values(self) -> None:
        """Take the present values of the weights for the optimizer's own."""
        self._versions = attributes(_version, self.parameters)

    def written(self) -> list[int]:
        """Which parameters others than the optimizer wrote to since its last step."""
        versions = attributes(_version, self.parameters)
        if versions == self._versions:
            return []
        return [i for i, version in enumerate(versions) if version != self._versions[i]]

    def _take_addresses(self) -> None:
        named = list(zip(self.names, self.parameters, strict=True))
        packed = {name: p for name, p in named if isinstance(p, NVFP4Tensor)}
        dense = {name: p for name, p in named if not isinstance(p, NVFP4Tensor)}
        self._dense_addresses = Addresses({}, dense, owner="optimizer")
        self._packed_addresses = Addresses(packed, {}, owner="optimizer")

    def find_moved(self) -> RuntimeError | None:
        """An error for the first parameter, master or buffer that has moved since its address was taken.

        It looks at every address, since an assignment to .data leaves no mark, and is the only look of a
        step.
        """
        if self.holder.is_taken_over:
            return RuntimeError(_TAKEN_OVER)
        error = self._dense_addresses.find_moved()
        for plan in self._casts if error is None else ():
            error = plan.find_moved()
            if error is not None:  # the plan knows a weight by its position in the bucket, not by its name
                return self._packed_addresses.find_moved() or error
        return error

    def check_not_taken_over(self) -> None:
        if self.holder.is_taken_over:
            raise RuntimeError(_TAKEN_OVER)

    def check_can_refresh(self) -> None:
        """Raise what refresh() raises."""
        self.check_not_taken_over()
        for name, p, kind in zip(self.names, self.parameters, self._kinds, strict=True):
            if (kind_of(p), p.device) != kind:
                raise ValueError(
                    f"{name} was {kind[0]} on {kind[1]}, now it is {kind_of(p)} on {p.device}: build a new "
                    "optimizer"
                )

    def refresh(self) -> None:
        """Give the parameters the memory of the buffers again, with its values, and take all addresses anew.

        Raises, before anything has changed, ValueError for a parameter that has another shape, dtype, device
        or kind than it was built with, and RuntimeError where a later optimizer has taken parameters over.
        """
        self.check_can_refresh()
        self.settle()
        for buffer in self.buffers:
            self._bind(buffer)
        for plan in self._casts:
            plan.refresh()
        self.take_amaxes_from(self._amaxes_from)
        self._take_addresses()

    # Masters

    def gathered_masters(self) -> list[torch.Tensor]:
        """The whole FP32 masters, in the order and the shapes of the parameters. Collective."""
        return self._by_parameter(lambda b: b.gathered_masters())

    def gathered_bytes(self) -> dict[str, int]:
        """Bytes that the gathers of a step fill in; 0 in a world of one."""
        sharded = [b for b in self.buffers if b.world_size > 1]
        return {
            "nvfp4": sum(b.weights.nbytes for b in sharded if b.kind == "nvfp4"),
            "high_precision": sum(b.weights.nbytes for b in sharded if b.kind != "nvfp4"),
            "bf16_equivalent": 2 * sum(p.numel() for b in sharded for p in b.parameters),
        }

    # Amaxes

    def take_amaxes_from(
        self, optimizers: Sequence[torch.optim.Optimizer], presence: Sequence[torch.Tensor | None] = ()
    ) -> None:
        """Let FusedAdamW update its masters bucket by bucket, and leave the amaxes that the plans need.

        optimizers: by the number that Updated has.
        presence: by parameter, Agreement.presence(); the same as before where it is left out.
        """
        self._amaxes_from, self._presence = optimizers, presence or self._presence
        rows = zip(self.optimized, self._presence, strict=True)
        present = {master: word for masters, word in rows if word is not None for master in masters}
        for number, optimizer in enumerate(optimizers):
            if isinstance(optimizer, FusedAdamW):
                optimizer.offer_parts(
                    [
                        ([master for i in buffer.indices for master in self.optimized[i]], plan)
                        for buffer, plan in zip(self.buffers, self.plans, strict=True)
                        if self.updated[buffer.indices[0]].by == number
                    ],
                    present,
                )

    def drop_outdated_amaxes(self) -> None:
        """Have plans compute the amaxes of masters that others have written to since their update."""
        if any(isinstance(one, FusedAdamW) and one.amaxes_outdated() for one in self._amaxes_from):
            for plan in self._casts:
                plan.begin_update()  # takes back the amaxes that the update left

    # Gathers that go on behind a step

    def settle(self) -> None:
        """What is queued next on the current stream finds all weights, or may write to them."""
        if self._late is not None:
            self._late.settle()

    def check(self) -> None:
        """Wait for the device. Raises RuntimeError for what has gone wrong in a cast, or has moved since."""
        if self._late is not None:
            self._late.synchronize()
        OwnError(self.find_moved()).raise_if_any()
        for plan in self._casts:
            plan.check()
