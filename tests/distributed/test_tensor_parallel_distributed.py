"""Slices of tensor parallelism beside what is replicated over it: norms and steps of the whole model."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
import torch.distributed as dist
from helpers import assert_bytes_equal
from optim_cases import (
    assert_all_equal,
    assert_weights_follow,
    make_gradients,
    make_parameters,
    plain_masters,
)
from torch import nn

from distributed.cases import raised_everywhere
from distributed.group_cases import give
from distributed.run import on_ranks
from zerofp4 import ops, quantize, reference
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

WHOLE = [
    ((64, 48), torch.bfloat16, False),
    ((96, 32), torch.float32, False),
    ((32, 512), torch.bfloat16, False),
]
"""Matrices whose rows are cut in two; each half is whole tiles of 16 x 16, and whole chunks of a norm."""
REPLICATED = [
    ((300,), torch.float32, False),
    ((34, 48), torch.bfloat16, True),
    ((40,), torch.bfloat16, False),
]
CLASSES = {"AdamW": torch.optim.AdamW, "FusedAdamW": FusedAdamW}
OPTIONS = {"lr": 0.02, "weight_decay": 0.1}


class Layout:
    """Neighbours are a tensor-parallel pair; ranks of the same half are a data-parallel group."""

    def __init__(self, world):
        size = world.world_size
        pairs = [[first, first + 1] for first in range(0, size, 2)]
        halves = [list(range(half, size, 2)) for half in (0, 1)]
        self.half, self.data_rank = world.rank % 2, world.rank // 2
        self.tensor = [dist.new_group(pair) for pair in pairs][self.data_rank]
        self.data = [dist.new_group(half) for half in halves][self.half]
        self.copies = size // 2


class Model:
    """This rank's half of matrices, quantized, and what both halves have."""

    def __init__(self, world):
        self.layout = Layout(world)
        self.whole = make_parameters(world.device, 0, WHOLE)
        halves = [self.cut(p.detach()) for p in self.whole]
        self.slices = [nn.Parameter(quantize(half, columnwise=True)) for half in halves]
        self.replicated = make_parameters(world.device, 1, REPLICATED)
        self.parameters = [*self.slices, *self.replicated]

    def cut(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.chunk(2)[self.layout.half].contiguous()

    def param_groups(self) -> list[dict]:
        data, tensor = self.layout.data, self.layout.tensor
        return [
            {"params": self.slices, "process_group": data},
            {"params": self.replicated, "process_group": data, "replicated_over": tensor},
        ]

    def gradients(self, data_rank: int, step: int) -> list[torch.Tensor]:
        """Of the whole model, on the ranks of one tensor-parallel pair."""
        parameters = [*self.whole, *self.replicated]
        made = make_gradients(parameters, 100 * data_rank + step)
        return [g.to(p.dtype) for g, p in zip(made, parameters, strict=True)]

    def own(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """What this rank has of tensors of the whole model."""
        count = len(self.whole)
        return [*map(self.cut, tensors[:count]), *tensors[count:]]

    def set_gradients(self, step: int) -> None:
        own = self.own(self.gradients(self.layout.data_rank, step))
        for p, gradient in zip(self.parameters, own, strict=True):
            p.grad = gradient.to(p.dtype)

    def means(self, step: int) -> list[torch.Tensor]:
        total = [g.float() for g in self.gradients(0, step)]
        for data_rank in range(1, self.layout.copies):
            total = [t + g.float() for t, g in zip(total, self.gradients(data_rank, step), strict=True)]
        return [t / self.layout.copies for t in total]


@on_ranks(2, 4)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("bucket_mb", [None, 0.003])
def test_clipped_steps_are_those_of_the_whole_model(world, name, bucket_mb):
    """The norm has the bits of that of the unsharded gradients, what is replicated counted once."""
    model = Model(world)
    masters = plain_masters(model.parameters)
    plain = CLASSES[name](masters, **OPTIONS)
    optimizer = ZeroFP4Optimizer(model.param_groups(), CLASSES[name], bucket_mb=bucket_mb, **OPTIONS)
    for step in range(3):
        model.set_gradients(step)
        means = model.means(step)
        words = sum(reference.square_sums(mean.flatten().cpu()) for mean in means)
        expected = ops.norm_of_squares(words.to(world.device))
        total = optimizer.clip_grad_norm_(0.5)
        assert_bytes_equal(total, expected, f"step {step}: norm")
        factor = (0.5 / (expected + 1e-6)).clamp(max=1.0)
        give(masters, [mean * factor for mean in model.own(means)])
        plain.step()
        optimizer.step()
        found = optimizer.gathered_masters()
        assert_all_equal(found, masters, f"step {step}: master")
        assert_weights_follow(model.parameters, found)


@on_ranks(2, 4)
@pytest.mark.parametrize("norm_type", [1.0, 3.0, math.inf])
def test_other_norms_count_what_is_replicated_once(world, norm_type):
    model = Model(world)
    optimizer = ZeroFP4Optimizer(model.param_groups(), torch.optim.SGD)
    model.set_gradients(0)
    whole = torch.cat([mean.flatten().double() for mean in model.means(0)])
    # Sums in FP32 of a few hundred elements, in another order than here.
    total, expected = optimizer.clip_grad_norm_(1.0, norm_type), torch.linalg.vector_norm(whole, norm_type)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)


@on_ranks(2, 4)
@pytest.mark.parametrize("clip", [False, True])
def test_a_nan_in_a_slice_skips_the_step_of_both_halves(world, clip):
    model = Model(world)
    optimizer = ZeroFP4Optimizer(model.param_groups(), **OPTIONS)
    before = optimizer.gathered_masters()
    model.set_gradients(0)
    if world.rank == world.world_size - 1:
        model.slices[2].grad[0, 0] = math.nan
    if clip:
        assert optimizer.clip_grad_norm_(1.0).isnan()
    optimizer.step()
    assert (optimizer.skipped_steps, optimizer.found_inf.item()) == (1, 1)
    assert optimizer.first_nonfinite().startswith("param_groups[0]['params'][2]")
    assert_all_equal(optimizer.gathered_masters(), before, "master")


@on_ranks(2, 4, time_limit=30)
def test_what_is_wrong_is_said_on_every_rank(world):
    model = Model(world)
    slices, replicated = model.param_groups()
    everyone, bad = dist.group.WORLD, world.rank == world.world_size - 1

    def build(*param_groups, **options):
        return lambda: ZeroFP4Optimizer(list(param_groups), lr=0.1, **options)

    forgotten = build({"params": model.slices}, replicated)
    message = r"rank 0: param_groups[0] names no process_group, and param_groups[1] is replicated_over a tens"
    assert raised_everywhere(world, ValueError, forgotten).startswith(message)
    both = build(slices, replicated | {"process_group": everyone})
    assert "may have no rank in common but this one" in raised_everywhere(world, ValueError, both)
    with pytest.raises(ValueError, match=r"has global rank \d, and the optimizer's process_group has not"):
        build(slices, replicated, process_group=model.layout.data)()
    dist.barrier()
    other = make_parameters(world.device, 1, [((301,), torch.float32, False), *REPLICATED[1:]])
    differs = build(slices, replicated | {"params": other if model.layout.half else model.replicated})
    assert "is replicated_over ranks [0, 1], but rank 0 has" in raised_everywhere(world, ValueError, differs)
    if world.world_size == 4:
        alone = [dist.new_group([rank]) for rank in range(4)][world.rank]
        some = build(slices, replicated | ({"replicated_over": alone} if bad else {}))
        message = "replicated_over of param_groups[1] is ranks [2, 3] on rank 2 and ranks [3] on rank 3"
        assert raised_everywhere(world, ValueError, some) == message
    optimizer = build(*model.param_groups())()
    model.set_gradients(0)
    optimizer.step()
    assert_weights_follow(model.parameters, optimizer.gathered_masters())


@on_ranks(4, time_limit=30)
def test_pairs_in_another_order_are_refused(world):
    """The first rank of the second pair would count what the first rank of the first pair does."""
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        pytest.skip("this torch sorts the ranks of every group")
    model = Model(world)
    slices, replicated = model.param_groups()
    turned = [dist.new_group(pair, sort_ranks=False) for pair in ([0, 1], [3, 2])][world.rank // 2]
    groups = [slices, replicated | {"replicated_over": turned}]
    message = raised_everywhere(world, ValueError, lambda: ZeroFP4Optimizer(groups, lr=0.1))
    assert "all must have the same" in message
