"""Models of which ranks hold different parts: experts, and slices of tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from optim_cases import assert_all_equal, make_gradients, make_parameters, set_gradients
from torch import nn

from distributed.checks_optim import SPECIFICATIONS

EXPERTS = [
    [((34, 48), torch.bfloat16, True), ((300,), torch.float32, False)],
    [((16, 34), torch.bfloat16, True), ((5, 18, 34), torch.float16, True), ((7,), torch.bfloat16, False)],
]
"""Of the two kinds of ranks: other shapes, and another number."""


def members(world, kind: int) -> list[int]:
    """The ranks that hold the experts of a kind: those with its parity."""
    return [rank for rank in range(world.world_size) if rank % 2 == kind]


def expert_group(world) -> dist.ProcessGroup:
    """That of this rank's experts: two ranks of 4, two or one of 3, one of 2."""
    groups = [dist.new_group(members(world, kind)) for kind in (0, 1)]
    return groups[world.rank % 2]


class Mixture:
    """Dense parameters of all ranks, and experts of some; a model of either kind may be made on any rank."""

    def __init__(self, world, kind: int | None = None, seed: int = 0):
        self.world, self.kind = world, world.rank % 2 if kind is None else kind
        self.dense = make_parameters(world.device, seed, SPECIFICATIONS)
        self.experts = make_parameters(world.device, seed + 100 + self.kind, EXPERTS[self.kind])
        self.parameters = [*self.dense, *self.experts]
        self.groups: list[Sequence[int]] = [range(world.world_size)] * len(self.dense)
        self.groups += [members(world, self.kind)] * len(self.experts)

    def param_groups(self, group: dist.ProcessGroup, **options) -> list[dict]:
        return [{"params": self.dense}, {"params": self.experts, "process_group": group, **options}]

    def gradients(self, rank: int, step: int) -> list[torch.Tensor]:
        """Those that a rank has in a step, in the parameters' dtypes."""
        made = [
            *make_gradients(self.dense, 100 * rank + step),
            *make_gradients(self.experts, 5000 + 100 * rank + step),
        ]
        return [g.to(p.dtype) for g, p in zip(made, self.parameters, strict=True)]

    def set_gradients(self, step: int) -> None:
        set_gradients(self.parameters, self.gradients(self.world.rank, step))

    def means(self, step: int) -> list[torch.Tensor]:
        """What the ranks of each parameter make of theirs: added in FP32 in rank order, divided."""
        by_rank = {rank: self.gradients(rank, step) for rank in range(self.world.world_size)}
        means = []
        for i, ranks in enumerate(self.groups):
            total, *others = [by_rank[rank][i].float() for rank in ranks]
            for other in others:
                total = total + other
            means.append(total / len(ranks))
        return means


def give(masters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient


def assert_same_on(world, ranks: Sequence[int], tensors: Sequence[torch.Tensor], what: str) -> None:
    """Collective over all ranks, which may bring other tensors than these have."""
    gathered: list = [None] * world.world_size
    dist.all_gather_object(gathered, [tensor.cpu() for tensor in tensors])
    for rank in ranks:
        theirs = [tensor.to(world.device) for tensor in gathered[rank]]
        assert_all_equal(list(tensors), theirs, f"{what} here and on rank {rank}:")


def named(parameters: Sequence[nn.Parameter], prefix: str) -> list[tuple[str, nn.Parameter]]:
    return [(f"{prefix}.{i}", p) for i, p in enumerate(parameters)]
