"""describe(): what a step does, how, when, and with how many bytes."""

import torch

from distributed.engine.overlap_cases import SMALL, make
from distributed.optim.cases import built
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW


@on_ranks(1, 2)
def test_what_a_step_does_and_the_bytes_of_it(world):
    alone = "a world of one has nobody to share memory with"
    for options, reason in (
        ({"transport": "collective"}, "it was asked for"),
        (
            {"reduction": "reduce_scatter", "gradient_wire": torch.bfloat16},
            "reduction='reduce_scatter' is a collective",
        ),
    ):
        described = built(world, FusedAdamW, **options)[1].describe()
        assert described["why_collective"] == (reason if world.world_size > 1 else alone)
    parameters, optimizer = built(world, FusedAdamW, bucket_mb=0.01)
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
    obstacle = built(world, torch.optim.SGD)[1].describe()["obstacle"]
    assert size == 1 or "SGD updates all" in obstacle


@on_ranks(1, 2)
def test_when_weights_are_gathered(world):
    for overlap in (None, "forward", "both"):
        _, optimizer = make(world, overlap=overlap, bucket_mb=SMALL)
        described = optimizer.describe()
        assert described["overlap"] == overlap
        kinds = [bucket["kind"] for bucket in described["buckets"]]
        if overlap == "forward":  # a step waits for what comes first
            assert "nvfp4" not in kinds[: -kinds.count("nvfp4")]
        for bucket in described["buckets"]:
            where = "step" if overlap is None or bucket["kind"] != "nvfp4" else "forward"
            assert bucket["gathered_in"] == (where if world.world_size > 1 else None)
