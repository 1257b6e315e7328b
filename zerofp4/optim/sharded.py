"""The weights of a model and their sharded masters: made once, published after every update of the
masters.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from zerofp4.cast import CastPlan
from zerofp4.ops import Addresses
from zerofp4.optim.flat import DenseBuffer, FlatBuffer, PackedBuffer
from zerofp4.optim.fused import FusedAdamW
from zerofp4.optim.initial import HeldMaster, initialize_masters
from zerofp4.optim.parameters import kind_of
from zerofp4.tensors import NVFP4Tensor


class ShardedParameters:
    """Parameters as views of flat buffers, with this rank's pieces of their FP32 masters and gradients.

    names: what messages call the parameters.
    masters[i], gradients[i]: 1D float32, this rank's piece of parameters[i], None where it owns nothing.
    found_inf: float32 [1], what the last publish() was given, or 1 where it left NVFP4 weights alone because
    of a NaN or Inf.

    Building it is collective, and so are its methods. The parameters move into the buffers; the masters have
    no values until initialize_masters().
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        group: dist.ProcessGroup | None,
        amax_groups: Sequence[Sequence[torch.Tensor]] | None,
    ):
        self.parameters, self.names = list(parameters), list(names)
        self._kinds = [(kind_of(p), p.device) for p in self.parameters]
        self.buffers = build_buffers(self.parameters, group)
        self.masters: list[torch.Tensor | None] = [None] * len(self.parameters)
        self.gradients: list[torch.Tensor | None] = [None] * len(self.parameters)
        for buffer in self.buffers:
            buffer.allocate()
            buffer.take_values()
            buffer.bind()
            views = zip(buffer.own_views(buffer.masters), buffer.own_views(buffer.gradients), strict=True)
            for index, (master, gradient) in zip(buffer.indices, views, strict=True):
                self.masters[index], self.gradients[index] = master, gradient
        self._packed = next((b for b in self.buffers if isinstance(b, PackedBuffer)), None)
        self._dense = [b for b in self.buffers if isinstance(b, DenseBuffer)]
        self.found_inf = torch.zeros(1, dtype=torch.float32, device=self.parameters[0].device)
        self._plan = None if self._packed is None else self._build_plan(self._packed, group, amax_groups)
        self._amaxes_from: FusedAdamW | None = None
        self._take_addresses()

    def _build_plan(
        self,
        packed: PackedBuffer,
        group: dist.ProcessGroup | None,
        amax_groups: Sequence[Sequence[torch.Tensor]] | None,
    ) -> CastPlan:
        return CastPlan(
            packed.parameters,
            packed.own_views(packed.masters),
            [shard.start if shard.numel else None for shard in packed.shards],
            group,
            amax_groups=amax_groups,
            on_nonfinite="skip",
            found_inf=self.found_inf,
        )

    # Addresses

    def _take_addresses(self) -> None:
        named = list(zip(self.names, self.parameters, strict=True))
        packed = {name: p for name, p in named if isinstance(p, NVFP4Tensor)}
        dense = {name: p for name, p in named if not isinstance(p, NVFP4Tensor)}
        self._dense_addresses = Addresses({}, dense, owner="optimizer")
        self._packed_addresses = Addresses(packed, {}, owner="optimizer")

    def find_moved(self) -> RuntimeError | None:
        """An error for the first parameter, master or buffer that has moved since its address was taken.

        The plan looks as far as its own step does. Whoever assigns the .data of a dense parameter leaves no
        mark, so that all of those are looked at.
        """
        error = self._dense_addresses.find_moved()
        if error is None and self._plan is not None:
            error = self._plan.find_moved(every=False)
            if error is not None:  # the plan knows a weight by its place among those of NVFP4
                error = self._packed_addresses.find_moved() or error
        return error

    def refresh(self) -> None:
        """Make the parameters views of the buffers again, with the buffers' values, and take all addresses
        anew. Not collective.

        Raises ValueError, before anything has changed, for a parameter that has another shape, dtype, device
        or kind than it was built with.
        """
        for name, p, kind in zip(self.names, self.parameters, self._kinds, strict=True):
            if (kind_of(p), p.device) != kind:
                raise ValueError(
                    f"{name} was {kind[0]} on {kind[1]}, now it is {kind_of(p)} on {p.device}: build a new "
                    "optimizer"
                )
        for buffer in self.buffers:
            buffer.bind()
        if self._plan is not None:
            self._plan.refresh()
        if self._amaxes_from is not None:
            self._amaxes_from.offer_amaxes(self._plan)
        self._take_addresses()

    def initialize_masters(self, held: Mapping[int, HeldMaster]) -> None:
        """Give all masters rank 0's values of their parameters, or what is held of them elsewhere."""
        for buffer in self.buffers:
            initialize_masters(buffer, held)

    def held_masters(self) -> dict[int, HeldMaster]:
        """This rank's pieces of the masters, by the identity of the parameter."""
        shards = {i: shard for b in self.buffers for i, shard in zip(b.indices, b.shards, strict=True)}
        pairs = enumerate(zip(self.parameters, self.masters, strict=True))
        return {id(parameter): HeldMaster(master, shards[i]) for i, (parameter, master) in pairs}

    def take_amaxes_from(self, optimizer: FusedAdamW) -> None:
        """Let the optimizer of the masters take the amaxes of those of NVFP4 weights in each of its steps."""
        if self._plan is not None:
            optimizer.offer_amaxes(self._plan)
            self._amaxes_from = optimizer

    def publish(self, found_inf: torch.Tensor | None = None) -> None:
        """Cast this rank's masters into the weights and gather the other ranks' slices, in place.

        found_inf: float32, one element on the device, which ours begins with; 0 without it. Where an update
        has left the masters as they were, the weights get the bytes that they have.
        """
        if found_inf is None:
            self.found_inf.zero_()
        else:
            self.found_inf.copy_(found_inf)
        gathers = []
        for buffer in self._dense:
            buffer.cast()
            gathers.append(buffer.start_gather())
        if self._plan is not None:
            if self._amaxes_from is not None and self._amaxes_from.amaxes_outdated():
                self._plan.begin_update()  # takes them back
            self._plan.step()
            gathers.append(self._packed.start_gather())
        for gather in gathers:
            if gather is not None:
                gather.wait()
        if self._plan is not None:
            self._plan.post()
        # As after any update in place, a backward pass through the old values must fail. The plan has said so
        # of its weights.
        torch.autograd.graph.increment_version([p for b in self._dense for p in b.parameters])

    def gathered_masters(self) -> list[torch.Tensor]:
        """The whole FP32 masters, in the order and the shapes of the parameters."""
        found: list[torch.Tensor | None] = [None] * len(self.parameters)
        for buffer in self.buffers:
            for index, master in zip(buffer.indices, buffer.gathered_masters(), strict=True):
                found[index] = master
        return found

    def gathered_bytes(self) -> dict[str, int]:
        """Bytes of the buffers that a publish() gathers; 0 in a world of one."""
        sharded = self.buffers[0].world_size > 1
        sizes = {
            "nvfp4": 0 if self._packed is None else self._packed.weights.nbytes,
            "high_precision": sum(buffer.weights.nbytes for buffer in self._dense),
            "bf16_equivalent": 2 * sum(parameter.numel() for parameter in self.parameters),
        }
        return {name: size * sharded for name, size in sizes.items()}


def build_buffers(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> list[FlatBuffer]:
    """One buffer for the NVFP4 weights and one per dtype of the others, always in the same order."""
    kinds: dict[object, list[int]] = {"nvfp4": [], torch.bfloat16: [], torch.float16: [], torch.float32: []}
    for i, parameter in enumerate(parameters):
        kinds["nvfp4" if isinstance(parameter, NVFP4Tensor) else parameter.dtype].append(i)
    return [
        (PackedBuffer if kind == "nvfp4" else DenseBuffer)(indices, [parameters[i] for i in indices], group)
        for kind, indices in kinds.items()
        if indices
    ]
