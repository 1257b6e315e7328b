"""Models of which ranks hold different parts: experts, replicas, and slices of tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from cases.optim import Plain, assert_all_equal, check, make_gradients, make_parameters, set_gradients
from helpers import assert_bytes_equal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from distributed.optim.cases import SPECIFICATIONS, assert_same_on_all_ranks, model_bytes, parameters_of
from zerofp4 import ops, quantize, reference
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

CLASSES = {"AdamW": torch.optim.AdamW, "FusedAdamW": FusedAdamW}
OPTIONS = {"lr": 0.02, "weight_decay": 0.1}
EXPERTS = [
    [((34, 48), torch.bfloat16, True), ((300,), torch.float32, False)],
    [((16, 34), torch.bfloat16, True), ((5, 18, 34), torch.float16, True), ((7,), torch.bfloat16, False)],
]
"""Of the two kinds of ranks: other shapes, and another number."""
WHOLE = [
    ((96, 64), torch.bfloat16, False),
    ((96, 32), torch.float32, False),
    ((96, 512), torch.bfloat16, False),
]
"""Matrices whose rows are cut in parts; each is whole tiles of 16 x 16, and whole chunks of a norm."""
SHAPES = {2: [(2, 1)], 4: [(2, 2), (4, 1), (1, 4)]}
REPLICATED = [
    ((300,), torch.float32, False),
    ((34, 48), torch.bfloat16, True),
    ((40,), torch.bfloat16, False),
]


def mean(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Added in FP32 in their order, divided."""
    total, *others = [tensor.float() for tensor in tensors]
    for other in others:
        total = total + other
    return total / len(tensors)


def in_dtypes(gradients, parameters) -> list[torch.Tensor]:
    return [g.to(p.dtype) for g, p in zip(gradients, parameters, strict=True)]


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
        self.bad, self.place = self.experts[1], f"param_groups[1]['params'][1] (of ranks {members(world, 1)})"

    def param_groups(self, group: dist.ProcessGroup | None = None) -> list[dict]:
        group = expert_group(self.world) if group is None else group
        return [{"params": self.dense}, {"params": self.experts, "process_group": group}]

    def gradients(self, rank: int, step: int) -> list[torch.Tensor]:
        """Those that a rank has in a step, in the parameters' dtypes."""
        dense = make_gradients(self.dense, 100 * rank + step)
        return in_dtypes([*dense, *make_gradients(self.experts, 5000 + 100 * rank + step)], self.parameters)

    def set_gradients(self, step: int) -> None:
        set_gradients(self.parameters, self.gradients(self.world.rank, step))

    def means(self, step: int) -> list[torch.Tensor]:
        """What the ranks of each parameter make of theirs."""
        by_rank = [self.gradients(rank, step) for rank in range(self.world.world_size)]
        return [mean([by_rank[rank][i] for rank in ranks]) for i, ranks in enumerate(self.groups)]

    def all_means(self, step: int) -> list[torch.Tensor]:
        """Of every parameter of any rank, once."""
        count = len(self.dense)
        other = Mixture(self.world, 1 - self.kind)
        return [*self.means(step), *other.means(step)[count:]]

    def check_same(self) -> None:
        """On every rank that holds them."""
        assert_same_on(self.world, range(self.world.world_size), model_bytes(self.dense), "dense")
        assert_same_on(self.world, members(self.world, self.kind), model_bytes(self.experts), "expert")


class Parts:
    """This rank's part of matrices, quantized, and what all parts have.

    Two neighbours are a tensor-parallel group. Ranks of the same part are a data-parallel group.
    """

    def __init__(self, world):
        self.world, self.count, size = world, 2, world.world_size
        self.part, self.data_rank = world.rank % self.count, world.rank // self.count
        tensor = [[*range(first, first + self.count)] for first in range(0, size, self.count)]
        data = [[*range(part, size, self.count)] for part in range(self.count)]
        self.tensor = [dist.new_group(ranks) for ranks in tensor][self.data_rank]
        self.data = [dist.new_group(ranks) for ranks in data][self.part]
        self.whole = make_parameters(world.device, 0, WHOLE)
        self.slices = [nn.Parameter(quantize(self.cut(p.detach()), columnwise=True)) for p in self.whole]
        self.replicated = make_parameters(world.device, 1, REPLICATED)
        self.parameters = [*self.slices, *self.replicated]
        self.bad, self.place = self.parameters[2], "param_groups[0]['params'][2]"

    def cut(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.chunk(self.count)[self.part].contiguous()

    def own(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """What this rank has of tensors of the whole model."""
        return [*map(self.cut, tensors[: len(self.whole)]), *tensors[len(self.whole) :]]

    def param_groups(self) -> list[dict]:
        slices = {"params": self.slices, "process_group": self.data}
        return [slices, {**slices, "params": self.replicated, "replicated_over": self.tensor}]

    def gradients(self, data_rank: int, step: int) -> list[torch.Tensor]:
        """Of the whole model, on the ranks of one tensor-parallel group."""
        parameters = [*self.whole, *self.replicated]
        return in_dtypes(make_gradients(parameters, 100 * data_rank + step), parameters)

    def set_gradients(self, step: int) -> None:
        set_gradients(self.parameters, self.own(self.gradients(self.data_rank, step)))

    def all_means(self, step: int) -> list[torch.Tensor]:
        copies = range(self.world.world_size // self.count)
        return list(map(mean, zip(*(self.gradients(rank, step) for rank in copies), strict=True)))

    def means(self, step: int) -> list[torch.Tensor]:
        return self.own(self.all_means(step))

    def check_same(self) -> None:
        assert_same_on(self.world, range(self.world.world_size), model_bytes(self.replicated), "replicated")


def mesh_of(world, shape):
    return init_device_mesh(world.device.type, shape)


def gradients_of(parameters, rank: int, step: int) -> list[torch.Tensor]:
    return in_dtypes(make_gradients(parameters, 100 * rank + step), parameters)


class Mesh:
    """Parameters that are sharded over the second dimension, and replicated over the first."""

    def __init__(self, world, shape, seed: int = 0):
        self.world, self.shape, self.parameters = world, shape, parameters_of(world, seed)
        self.bad, self.place = self.parameters[2], "param_groups[0]['params'][2]"

    def param_groups(self) -> list[dict]:
        return [{"params": self.parameters, "process_group": mesh_of(self.world, self.shape)}]

    def set_gradients(self, step: int) -> None:
        set_gradients(self.parameters, gradients_of(self.parameters, self.world.rank, step))

    def means(self, step: int) -> list[torch.Tensor]:
        """Of the second dimension, and then of the first: of 2 x 2 ((g0 + g1) / 2 + (g2 + g3) / 2) / 2."""
        rows, size = self.shape
        by_rank = [gradients_of(self.parameters, rank, step) for rank in range(rows * size)]
        in_rows = [[by_rank[r * size + s] for s in range(size)] for r in range(rows)]
        return [
            mean([mean([gradients[i] for gradients in row]) for row in in_rows])
            for i in range(len(self.parameters))
        ]

    all_means = means

    def check_same(self) -> None:
        assert_same_on_all_ranks(model_bytes(self.parameters))


def check_steps(model, build: Callable[..., ZeroFP4Optimizer], name: str, clip: bool, **options) -> None:
    """Steps give the bytes of whole masters, updated on one machine with the means of the gradients; norms
    count each element once, and that of squares has the bits of theirs. A NaN in model.bad on rank 1 skips
    the last step of all ranks, with a name that begins with model.place. build: an optimizer, of the class of
    that name and options.
    """
    plain = Plain(model.parameters, CLASSES[name], **OPTIONS)
    optimizer = build(CLASSES[name], **OPTIONS, **options)
    check(optimizer, plain, "built")
    for step in range(4):
        model.set_gradients(step)
        if step == 3 and model.world.rank == 1:
            model.bad.grad.view(-1)[-1] = math.nan
        means = model.means(step)
        if clip and step == 3:
            assert optimizer.clip_grad_norm_(0.7).isnan()
        elif clip:
            whole = [mean.flatten() for mean in model.all_means(step)]
            words = sum(reference.square_sums(mean.cpu()) for mean in whole)
            expected = ops.norm_of_squares(words.to(model.world.device))
            for norm_type in (1.0, 3.0, math.inf):
                other = torch.linalg.vector_norm(torch.cat(whole).double(), norm_type)
                total = optimizer.clip_grad_norm_(math.inf, norm_type)
                # Sums in FP32 of a few hundred elements, in another order than here.
                torch.testing.assert_close(total.double(), other, rtol=1e-6, atol=0)
            for max_norm in (1e9, 0.7):  # later ones look at what the first has reduced
                total = optimizer.clip_grad_norm_(max_norm)
                assert_bytes_equal(total, expected, f"step {step}: norm")
            means = [mean * (0.7 / (total + 1e-6)).clamp(max=1.0) for mean in means]
        if step < 3:
            plain.step(means)
        optimizer.step()
        check(optimizer, plain, f"step {step}:")
        model.check_same()
        found = optimizer.first_nonfinite()
        assert found.startswith(model.place) if step == 3 else found is None
        assert (optimizer.skipped_steps, optimizer.found_inf.item()) == (step == 3, step == 3)
    assert optimizer.describe()["in_buckets"] == (name == "FusedAdamW")


def assert_same_on(world, ranks: Sequence[int], tensors: Sequence[torch.Tensor], what: str) -> None:
    """Collective over all ranks, which may bring other tensors than these have."""
    gathered: list = [None] * world.world_size
    dist.all_gather_object(gathered, [tensor.cpu() for tensor in tensors])
    for rank in ranks:
        theirs = [tensor.to(world.device) for tensor in gathered[rank]]
        assert_all_equal(list(tensors), theirs, f"{what} here and on rank {rank}:")


def named(parameters: Sequence[nn.Parameter], prefix: str) -> list[tuple[str, nn.Parameter]]:
    return [(f"{prefix}.{i}", p) for i, p in enumerate(parameters)]
