"""Ranks as a mesh of two dimensions, over which gradients are averaged one after the other."""

from __future__ import annotations

import torch
from helpers import assert_bytes_equal
from optim_cases import assert_all_equal, assert_weights_follow, make_gradients, plain_masters, set_gradients
from torch.distributed.device_mesh import init_device_mesh

from distributed.checks_optim import assert_same_on_all_ranks, model_bytes, parameters_of
from distributed.group_cases import give
from zerofp4 import ops, reference
from zerofp4.optim import FusedAdamW

CLASSES = {"AdamW": torch.optim.AdamW, "FusedAdamW": FusedAdamW}
OPTIONS = {"lr": 0.02, "weight_decay": 0.1}


def mesh_of(world, shape):
    return init_device_mesh(world.device.type, shape)


def gradients_of(parameters, rank: int, step: int) -> list[torch.Tensor]:
    made = make_gradients(parameters, 100 * rank + step)
    return [g.to(p.dtype) for g, p in zip(made, parameters, strict=True)]


def mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Added in their order, divided."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total / len(tensors)


def means_of(parameters, shape, step: int) -> list[torch.Tensor]:
    """Of the second dimension, and then of the first: of 2 x 2 ((g0 + g1) / 2 + (g2 + g3) / 2) / 2."""
    rows, size = shape
    by_rank = [gradients_of(parameters, rank, step) for rank in range(rows * size)]
    return [
        mean([mean([by_rank[r * size + s][i].float() for s in range(size)]) for r in range(rows)])
        for i in range(len(parameters))
    ]


def check_order_of_addition(world, shape, build, name: str, clip: bool, **options) -> None:
    """Three steps give the masters and weights of one machine with means_of the gradients, and the norm has
    the bits of theirs. build: an optimizer, of parameters, the class of that name and options.
    """
    parameters = parameters_of(world)
    masters = plain_masters(parameters)
    plain = CLASSES[name](masters, **OPTIONS)
    optimizer = build(parameters, CLASSES[name], **OPTIONS, **options)
    for step in range(3):
        set_gradients(parameters, gradients_of(parameters, world.rank, step))
        means = means_of(parameters, shape, step)
        if clip:
            words = sum(reference.square_sums(m.flatten().cpu()) for m in means)
            expected = ops.norm_of_squares(words.to(world.device))
            for max_norm in (1e9, 0.7):  # the second looks at what the first has reduced
                total = optimizer.clip_grad_norm_(max_norm)
                assert_bytes_equal(total, expected, f"{shape}, step {step}: norm")
            means = [m * (0.7 / (total + 1e-6)).clamp(max=1.0) for m in means]
        give(masters, means)
        plain.step()
        optimizer.step()
        found = optimizer.gathered_masters()
        assert_all_equal(found, masters, f"{shape}, step {step}: master")
        assert_weights_follow(parameters, found)
        assert_same_on_all_ranks(model_bytes(parameters))
    assert optimizer.describe()["in_buckets"] == (name == "FusedAdamW")
