"""A step in buckets on several ranks: the bytes of one that does one thing after the other."""

import math

import pytest
import torch
from cases.optim import assert_all_equal, keywords, set_gradients, take_step

from distributed.engine.peer_checks import OPTIONS, InSequence
from distributed.optim.cases import all_bytes, check_weights, gradients_of, parameters_of
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

BUCKETS = 1e-4, 0.003, None
"""bucket_mb: every parameter alone and in several stretches; two or three together; all of a kind."""


def build(world, cls, **options):
    parameters = parameters_of(world)
    parameters = [*parameters[::2], *parameters[1::2]]
    groups = [{"params": parameters[:4], "lr": 0.01}, {"params": parameters[4:]}]
    return parameters, ZeroFP4Optimizer(groups, cls, **keywords(OPTIONS, options))


def assert_same(models, what):
    expected, *others = [all_bytes(*model) for model in models]
    for m, found in enumerate(others):
        assert_all_equal(found, expected, f"model {m + 1}, {what}: tensor")


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("wire", [None, torch.float32, torch.float16])
def test_the_bytes_of_a_step_in_sequence(world, wire):
    models = [build(world, InSequence, gradient_wire=wire)]
    for bucket_mb in BUCKETS if wire is None else BUCKETS[1:2]:
        models.append(build(world, FusedAdamW, bucket_mb=bucket_mb, gradient_wire=wire))
    norms = []
    for step in range(5):
        for parameters, optimizer in models:
            set_gradients(parameters, gradients_of(world, parameters, step))
            if step == 3 and world.rank == world.world_size - 1:
                parameters[3].grad = torch.full_like(parameters[3], math.inf)
            if step == 2:
                norms.append(optimizer.clip_grad_norm_(0.5))
            optimizer.step()
            assert (optimizer.found_inf.item() != 0) == (step == 3)
        assert_same(models, f"step {step}")
    assert len({norm.item() for norm in norms}) == 1  # whatever the buckets are
    check_weights(*models[1])


@on_ranks(1, 2)
def test_describe(world):
    """What a step does, and the bytes of it."""
    alone = "a world of one has nobody to share memory with"
    for options, reason in (
        ({"transport": "collective"}, "it was asked for"),
        (
            {"reduction": "reduce_scatter", "gradient_wire": torch.bfloat16},
            "reduction='reduce_scatter' is a collective",
        ),
    ):
        described = build(world, FusedAdamW, **options)[1].describe()
        assert described["why_collective"] == (reason if world.world_size > 1 else alone)
    parameters, optimizer = build(world, FusedAdamW, bucket_mb=0.01)
    described, size = optimizer.describe(), world.world_size
    several = "peer" if world.device.type == "cuda" else "collective"
    assert described["transport"] == (several if size > 1 else "none")
    assert described["in_buckets"] and described["obstacle"] is None
    assert described["world_size"] == size and described["bucket_mb"] == 0.01
    buckets = described["buckets"]
    assert sum(bucket["parameters"] for bucket in buckets) == len(parameters)
    assert sum(bucket["elements"] for bucket in buckets) == sum(p.numel() for p in parameters)
    assert {bucket["kind"] for bucket in buckets} == {"nvfp4", "bfloat16", "float16", "float32"}
    assert (len(buckets) > 4) == (size > 1)
    for bucket in buckets:
        itemsize = {"float32": 4}.get(bucket["gradients_travel_as"], 2)
        least = (size - 1) * bucket["elements"] // size * itemsize
        assert least <= bucket["gradients"] <= least + 512 * 2 * size * itemsize * bucket["parameters"]
        assert (bucket["amaxes"] > 0) == (size > 1 and bucket["kind"] == "nvfp4")
    for phase, nbytes in described["bytes_sent"].items():
        assert nbytes == sum(bucket[phase] for bucket in buckets)
        assert (nbytes > 0) == (size > 1)
    obstacle = ZeroFP4Optimizer(parameters_of(world), torch.optim.SGD).describe()["obstacle"]
    assert size == 1 or "SGD updates all" in obstacle


@on_ranks(2)
def test_gradients_take_no_memory_until_they_are_clipped(world):
    parameters, optimizer = build(world, FusedAdamW, bucket_mb=0.1)
    dtypes = {torch.float32, torch.bfloat16}
    for step in range(2):
        take_step(parameters, optimizer, step)
        for bucket in optimizer._shards.buckets:
            assert ("gradients" in vars(bucket)) == (bucket.sent_as not in dtypes)
    optimizer.clip_grad_norm_(1.0)
    assert all("gradients" in vars(bucket) for bucket in optimizer._shards.buckets)
