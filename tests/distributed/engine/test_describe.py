"""describe(): what a step does, how, when, and with how many bytes; and the exchange by reduce-scatter."""

import os
from unittest import mock

import pytest
import torch
from cases.optim import assert_all_equal, keywords, make_gradients, make_parameters, set_gradients
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from distributed.cases import raised_everywhere
from distributed.engine.overlap_cases import SMALL, make
from distributed.optim.cases import SPECIFICATIONS, built, model_bytes
from distributed.optim.group_cases import OPTIONS, expert_group
from distributed.run import on_ranks
from zerofp4.ops import MEANS_FORMATS
from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer
from zerofp4.optim.description import bytes_by_use


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
def test_memory_by_use(world):
    """It counts all parameters, this rank's part of masters and moments, and each byte once."""
    parameters, optimizer = built(world, FusedAdamW)
    size = world.world_size
    set_gradients(parameters, make_gradients(parameters, 0))
    optimizer.step()
    described = optimizer.describe()
    uses = ["weights", "masters", "state", "gradients", "received gradients", "pinned slots"]
    assert list(described["memory"]) == uses
    memory = {name: each["device"] for name, each in described["memory"].items()}
    assert not any(each["host"] for each in described["memory"].values())
    weights = sum(parameter.nbytes for parameter in parameters)
    padding = 256 * 4 * size * (len(parameters) + 1)
    assert weights <= memory["weights"] <= weights + padding
    others = sum(p.numel() for p in parameters if p.dtype != torch.float32)
    assert 4 * others // size <= memory["masters"] <= (4 * others + padding) // size + padding
    assert memory["state"] > memory["masters"]  # two moments of all parameters
    assert (memory["received gradients"] > 0) == (size > 1 and described["transport"] == "collective")
    lines = repr(described).splitlines()
    assert lines[0].split() == ["MB", "device", "host"] and lines[7].startswith("sum ")
    assert float(lines[7].split()[1]) == pytest.approx(sum(memory.values()) / 1e6, abs=1e-3)
    assert dict(described) == described and str(described) == repr(described)


def test_bytes_count_once():
    flat = torch.zeros(100, dtype=torch.float32)
    used = bytes_by_use({"a": [flat[10:20], None, flat[15:30]], "b": [flat], "c": [flat[:5], torch.zeros(2)]})
    assert used == {name: {"device": n, "host": 0} for name, n in (("a", 80), ("b", 320), ("c", 8))}


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


# Gradients that torch's reduce-scatter adds up


BY_LIBRARY = {"transport": "collective", "reduction": "reduce_scatter"}


def parameters_of(world) -> list[nn.Parameter]:
    return make_parameters(world.device, 0, [s for s in SPECIFICATIONS if s[1] != torch.float16])


@on_ranks(2, 3)
@pytest.mark.parametrize("transport", ["auto", "collective"])
def test_the_default_over_several_hosts(world, transport):
    """Whatever the numbers of their ranks; what is given stays, and no memory is shared between hosts."""
    name = "first" if world.rank == 0 else "second"
    with mock.patch.dict(os.environ, {"NCCL_HOSTID": name}):
        for given, reduction in [(None, "reduce_scatter"), ("ordered", "ordered")]:
            way = Communication(transport=transport, reduction=given)
            optimizer = ZeroFP4Optimizer(parameters_of(world), FusedAdamW, communication=way, **OPTIONS)
            described = optimizer.describe()
            assert described["hosts"] == ((2, 1) if world.world_size == 2 else None)
            assert [described[k] for k in ("transport", "reduction")] == ["collective", reduction]
        if transport == "auto" and world.device.type == "cuda":
            assert "differ (first and second) in the host" in described["why_collective"]
        arguments = {"params": parameters_of(world), "lr": 0.1}
        peer = keywords(arguments, transport="peer")
        message = raised_everywhere(world, ValueError, ZeroFP4Optimizer, **peer)
        assert 'transport="peer" is not available' in message
    on_one = ZeroFP4Optimizer(**arguments).describe()
    assert (on_one["hosts"], on_one["reduction"]) == ((1, world.world_size), "ordered")


@on_ranks(2, 4)
@pytest.mark.parametrize("wire", MEANS_FORMATS)
def test_bytes_between_hosts(world, wire):
    """In the format of NVFP4 weights that its blocks divide, float32 of others; inside a host each gradient
    in its own dtype.
    """
    local, others = world.world_size // 2, world.world_size - 1
    way = Communication(between_hosts=wire)
    parameters = [
        *parameters_of(world),
        *make_parameters(world.device, 1, [((64, 96), torch.bfloat16, True)]),
    ]
    with mock.patch.dict(os.environ, {"NCCL_HOSTID": str(world.rank // local)}):
        described = ZeroFP4Optimizer(parameters, FusedAdamW, communication=way, **OPTIONS).describe()
    assert [described[k] for k in ("hosts", "reduction", "transport")] == [
        (2, local),
        "ordered",
        "collective",
    ]
    kinds = {(bucket["kind"], bucket["means_travel_as"]) for bucket in described["buckets"]}
    exact = {("bfloat16", "float32"), ("float32", "float32")}
    assert kinds == exact | {("nvfp4", wire)} | ({("nvfp4", "float32")} if wire != "bf16" else set())
    exact = sorted(name for bucket in described["buckets"] for name in bucket["exactly"])
    numbers = {"bf16": [1, 3, 4, 5], "mxfp8": range(7), "nvfp4": range(1, 7)}[wire]
    assert exact == [f"param_groups[0]['params'][{i}]" for i in numbers]
    for bucket in described["buckets"]:
        size = {"nvfp4": 0.5, "bfloat16": 2, "float32": 4}[bucket["kind"]]
        numel = int(bucket["weights"] / others / size)  # of a slice
        assert numel * world.world_size >= bucket["elements"] > 0
        least = {"float32": 4, "bf16": 2, "mxfp8": 33 / 32, "nvfp4": 9 / 16}[
            bucket["means_travel_as"]
        ] * numel
        amaxes = 0 if bucket["means_travel_as"] != "nvfp4" else 4 * 4  # of four strips at most
        assert least <= bucket["between_hosts"] < least + amaxes + 16
        itemsize = 4 if bucket["gradients_travel_as"] == "float32" else 2
        assert bucket["gradients"] == bucket["between_hosts"] + 2 * (local - 1) * numel * itemsize
    arguments = {"optimizer_class": FusedAdamW, "lr": 0.1, "communication": way}
    sums = {"offload": 1.0, "offload_gradients": True}
    message = raised_everywhere(
        world, ValueError, ZeroFP4Optimizer, parameters_of(world), **arguments, **sums
    )
    assert "offload_gradients is not supported with between_hosts" in message
    message = raised_everywhere(world, ValueError, ZeroFP4Optimizer, parameters_of(world), **arguments)
    assert f"between_hosts='{wire}' needs two hosts or more" in message


@on_ranks(2)
def test_ranks_choose_alike_what_travels_exactly(world):
    """A function itself is not compared: a lambda cannot be sent."""
    parameters, ways = parameters_of(world), {"lr": 0.1, "optimizer_class": FusedAdamW}
    with mock.patch.dict(os.environ, {"NCCL_HOSTID": str(world.rank)}):
        for chosen in (None, world.rank):
            way = Communication(between_hosts="bf16", exactly=lambda _, p, chosen=chosen: p.dim() == chosen)
            if chosen is None:
                described = ZeroFP4Optimizer(parameters, communication=way, **ways).describe()
                assert {bucket["means_travel_as"] for bucket in described["buckets"]} == {"bf16"}
                continue
            message = raised_everywhere(
                world, ValueError, ZeroFP4Optimizer, parameters_of(world), communication=way, **ways
            )
            assert "parameters sharded over ranks [0, 1]" in message or "bf16 between hosts" in message


@pytest.mark.parametrize("other", [{"reduction": "reduce_scatter"}, {"transport": "peer"}])
def test_options_that_exclude_few_bits_between_hosts(other):
    ((name, value),) = other.items()
    with pytest.raises(ValueError, match=f"{name}='{value}' is not supported with between_hosts='bf16'"):
        Communication(between_hosts="bf16", **other)


@on_ranks(4)
def test_the_default_of_parameters_that_are_sharded_inside_of_hosts(world):
    mesh, group = init_device_mesh(world.device.type, (2, 2)), expert_group(world)
    with mock.patch.dict(os.environ, {"NCCL_HOSTID": str(world.rank // 2)}):
        for named, reduction in [(mesh, "ordered"), (group, "reduce_scatter")]:
            groups = [{"params": parameters_of(world), "process_group": named}]
            described = ZeroFP4Optimizer(groups, lr=0.1).describe()
            assert (described["hosts"], described["reduction"]) == ((2, 2), reduction)


@on_ranks(2, 4)
@pytest.mark.parametrize("wire", [None, torch.bfloat16, torch.float32])
def test_sums_of_the_library(world, wire):
    """Of integers they are those in rank order: over all ranks, replicas, and ranks that share experts."""
    mesh = init_device_mesh(world.device.type, (2, world.world_size // 2))
    for group in (None, mesh, expert_group(world)):
        sides = []
        for reduction in ("ordered", "reduce_scatter"):
            parameters = parameters_of(world)
            own = {} if group is None else {"process_group": group}
            groups = [{"params": parameters[:2], **own}, {"params": parameters[2:]}]
            way = Communication(transport="collective", reduction=reduction, gradient_wire=wire)
            optimizer = ZeroFP4Optimizer(groups, FusedAdamW, communication=way, **OPTIONS)
            set_gradients(
                parameters, [g.clamp(-8, 8).round() for g in make_gradients(parameters, world.rank)]
            )
            norm = optimizer.clip_grad_norm_(1e3)
            optimizer.step()
            sides.append([norm, *model_bytes(parameters), *optimizer.gathered_masters()])
        assert_all_equal(*sides, "tensor")


@on_ranks(2)
def test_float16_gradients_need_another_dtype_to_be_added_up_in(world):
    """Their sum may overflow where their mean does not, and nothing would skip that step."""
    parameters = make_parameters(world.device, 0, [((64,), torch.float16, False)])
    arguments = keywords({"params": parameters, "lr": 0.1}, BY_LIBRARY)
    message = raised_everywhere(world, TypeError, ZeroFP4Optimizer, **arguments)
    assert "has gradients of torch.float16, whose sums may overflow" in message
    with mock.patch.dict(os.environ, {"NCCL_HOSTID": str(world.rank)}):
        message = raised_everywhere(world, TypeError, ZeroFP4Optimizer, parameters, lr=0.1)
    assert 'reduction="reduce_scatter", the default over several hosts, needs' in message
    optimizer = ZeroFP4Optimizer(**keywords(arguments, BY_LIBRARY, gradient_wire=torch.float32))
    parameters[0].grad = torch.full_like(parameters[0], 6e4)
    optimizer.step()
    assert not optimizer.skipped_steps and parameters[0].isfinite().all()
