"""Building an optimizer with masters in host memory: values, memory, threads, and what raises."""

from __future__ import annotations

import functools
import re
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases.optim import assert_all_equal, keywords, make_gradients, set_gradients
from safetensors.torch import save_file
from torch import nn

import zerofp4
from distributed.cases import raised_by, raised_everywhere, shared_folder
from distributed.optim import cases
from distributed.optim.cases import built, parameters_of
from distributed.optim.step_cases import TINY
from distributed.optim.test_offload import SMALL, SUMS, bytes_of, take_same_steps
from distributed.run import on_ranks
from zerofp4.engine import Bucket, find_threads
from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer


@on_ranks(1, 2)
@pytest.mark.parametrize(("state", "kept"), [("full", 4), ("compact", 3)])
def test_masters_are_made_without_a_second_copy(world, state, kept):
    """An initial value, of 2 bytes per element, is freed before the masters of the next bucket are made."""
    model = nn.Sequential(*[nn.Linear(64, 256, bias=False, dtype=torch.bfloat16) for _ in range(8)])
    zerofp4.convert_model(model.to(world.device))
    held, masters, allocate = [], [0], Bucket.allocate_masters

    def count(bucket):
        allocate(bucket)
        masters[0] += bucket.slice_numel * kept
        values = [p.record.attachments.get("high_precision_init_val") for p in model.parameters()]
        held.append(masters[0] + sum(value.nbytes for value in values if value is not None))

    options = keywords(bucket_mb=TINY, state=state, offload=1.0)
    with mock.patch.object(Bucket, "allocate_masters", count):
        ZeroFP4Optimizer(model.named_parameters(), FusedAdamW, **options)
    one = 64 * 256
    assert len(held) == 8
    assert max(held) <= max(8 * 2, 8 * kept / world.world_size) * one + max(2, kept / world.world_size) * one


def frozen_in_part(world, device) -> nn.Module:
    torch.manual_seed(3 + world.rank)
    model = nn.Sequential(*[nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(4)]).to(device)
    model[1].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


@on_ranks(1, 2)
@pytest.mark.parametrize("from_folder", [False, True])
def test_values_of_a_model_that_was_on_the_meta_device(world, from_folder):
    """From a folder of safetensors, or a function; only rank 0 reads trained ones."""
    plain = frozen_in_part(world, world.device)
    values = {name: p.detach().cpu().clone() for name, p in plain.named_parameters()}
    zerofp4.convert_model(plain)
    source, read = shared_folder(world), []
    if world.rank == 0:
        names = sorted(values)
        save_file({name: values[name] for name in names[:3]}, source / "model-1.safetensors")
        save_file({name: values[name] for name in names[3:]}, source / "model-2.safetensors")
    if world.world_size > 1:
        dist.barrier()

    def value_of(name, parameter):
        assert parameter.shape == values[name].shape and parameter.device.type == world.device.type
        read.append(name)
        return values[name]

    model = frozen_in_part(world, "meta")
    zerofp4.convert_model(model)
    model.to_empty(device=world.device)
    made = []
    for own, masters_from in ((plain, None), (model, source if from_folder else value_of)):
        options = {"lr": 0.02, "offload": 1.0, "masters_from": masters_from}
        made.append(ZeroFP4Optimizer(own.named_parameters(), FusedAdamW, **options))
    frozen = ["1.weight", "2.bias"]
    assert from_folder or sorted(read) == (sorted(values) if world.rank == 0 else frozen)
    for step in range(2):
        for own, optimizer in zip((plain, model), made, strict=True):
            trained = [p for p in own.parameters() if p.requires_grad]
            set_gradients(trained, make_gradients(trained, 10 * step + world.rank))
            optimizer.step()
        pairs = zip((plain, model), made, strict=True)
        assert_all_equal(*(bytes_of(own, one) for own, one in pairs), f"step {step}: tensor")
    assert_all_equal(*(cases.model_bytes(list(own.parameters())) for own in (plain, model)), "buffer")


@on_ranks(1, 2)
def test_values_that_are_not_there(world):
    model = frozen_in_part(world, world.device).requires_grad_(True)
    folder = shared_folder(world)
    for source, message in (
        (folder, "masters_from: no .* has '0.weight'"),
        (lambda *_: torch.zeros(3), r"'0.weight' has the shape \(3,\), and the parameter \(64, 64\)"),
    ):
        build = functools.partial(ZeroFP4Optimizer, model.named_parameters(), FusedAdamW)
        error = raised_by(functools.partial(build, masters_from=source))
        assert isinstance(error, ValueError), error
        assert re.search(message, str(error))
    with pytest.raises(ValueError, match="finds values by name"):
        ZeroFP4Optimizer(model.parameters(), FusedAdamW, masters_from=folder)


@on_ranks(1, 2)
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_memory_is_freed_with_the_optimizer(world, share):
    """At once: a worker collects no garbage."""
    optimizer = built(world, FusedAdamW, bucket_mb=SMALL, offload=share, seed=0)[1]
    optimizer.step()
    kept = [weakref.ref(optimizer._shards.offload), weakref.ref(optimizer._shards.buckets[0])]
    del optimizer
    assert [one() for one in kept] == [None, None]


@on_ranks(1, 2)
def test_threads(world):
    """They are torch's while a step runs, and no byte depends on their number."""
    environments = [
        ({"OMP_NUM_THREADS": None, "LOCAL_WORLD_SIZE": None}, 12 // world.world_size),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "4"}, 3),  # as torchrun sets them
        ({"OMP_NUM_THREADS": None, "LOCAL_WORLD_SIZE": "16"}, 1),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": None}, torch.get_num_threads()),
        ({"OMP_NUM_THREADS": "5", "LOCAL_WORLD_SIZE": "4"}, torch.get_num_threads()),
    ]
    for variables, expected in environments:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("zerofp4.optim.build.cpu_cores", lambda: set(range(12)))
            for name, value in variables.items():
                patch.setenv(name, value) if value is not None else patch.delenv(name, raising=False)
            optimizer = built(world, FusedAdamW, offload=1.0)[1]
            assert optimizer.describe()["offload_threads"] == expected, variables
    pair = [built(world, FusedAdamW, offload=1.0, offload_threads=threads) for threads in (1, 3)]
    before, used = torch.get_num_threads(), []
    for _, optimizer in pair:
        fused = optimizer.inner
        fused.update_bucket = lambda *arguments, update=fused.update_bucket: (
            used.append(torch.get_num_threads()),
            update(*arguments),
        )
    take_same_steps(world, pair, range(2))
    assert [*dict.fromkeys(used)] == [1, 3] and torch.get_num_threads() == before
    for _, optimizer in pair:
        del optimizer.inner.update_bucket


@on_ranks(1)
def test_threads_of_ranks_that_are_bound_to_cores(world):
    """As torchrun --numa-binding does; other hosts do not count."""
    first, second = set(range(12)), set(range(12, 24))
    nodes = [first, first, second, second]
    exclusive = [set(range(6 * r, 6 * r + 6)) for r in range(4)]
    for bound, ranks, expected in (
        ([first | second] * 4, 4, 6),
        (nodes, 4, 6),
        (exclusive, 4, 6),
        (nodes[:2], 4, 3),  # two ranks that step together, and two others on these cores
        (exclusive[:2], 4, 3),  # likewise
        ([first] * 4, 1, 3),  # not started by torchrun
    ):
        places = [*("a" for _ in bound), "b"], [*bound, first]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCAL_WORLD_SIZE", str(ranks))
            patch.setenv("OMP_NUM_THREADS", "1") if ranks > 1 else patch.delenv("OMP_NUM_THREADS", False)
            assert find_threads(0, *places) == expected, bound


@on_ranks(1, 2)
@pytest.mark.parametrize("limit", ["max", "17179869184"])
def test_memory_that_cannot_be_pinned(world, limit):
    """The error names the bytes and the limits."""
    file, zeros, made = shared_folder(world) / f"limit of {world.rank}", torch.zeros, []
    file.write_text(limit + "\n")

    def fail(*arguments, **options):
        if "pin_memory" in options and arguments[0] != 1:  # which is a word of the peers
            made.append(arguments[0][0])
            if len(made) == 2:
                raise RuntimeError("CUDA error: out of memory")
        return zeros(*arguments, **options)

    parameters = parameters_of(world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerofp4.engine.offload.MEMINFO", file.with_name("no such file"))
        patch.setattr("zerofp4.engine.offload.CGROUP_LIMITS", [file, file.with_name("no such file")])
        patch.setattr("resource.getrlimit", lambda _: (65536, 65536))
        patch.setattr("torch.zeros", fail)
        error = raised_by(lambda: ZeroFP4Optimizer(parameters, FusedAdamW, offload=1.0))
    assert isinstance(error, RuntimeError)
    if world.rank == 0:
        text = f"offload needs {made[1]} more bytes of pinned host memory beside {made[0]} that it has"
        assert text in str(error)
    assert "(ulimit -l is 65536 bytes" in str(error) and "CUDA error: out of memory" in str(error)
    assert (f"is {limit})" in str(error)) == (limit != "max")


@on_ranks(1, 2)
def test_masters_that_do_not_fit_into_host_memory(world):
    """Less what initial values free. Without the error the kernel would kill a rank."""
    folder, ranks = shared_folder(world) / f"of {world.rank}", str(world.world_size)
    folder.mkdir()
    meminfo, limit, usage, stat = (
        folder / name for name in ("meminfo", "memory.max", "memory.current", "memory.stat")
    )
    model = nn.Sequential(*[nn.Linear(64, 256, bias=False, dtype=torch.bfloat16) for _ in range(8)])
    zerofp4.convert_model(model.to(world.device))
    parameters, each = dict(model.named_parameters()), 64 * 256
    needed = int(8 * each * (5.125 + 4)) - 2 * 8 * each * world.world_size
    usage.write_text("5000\n")
    stat.write_text("anon 4000\nactive_file 300\ninactive_file 700\n")

    def build(free: int, most: str):
        meminfo.write_text(f"MemTotal: 9 kB\nMemAvailable: {free // 1024} kB\nSwapFree: 0 kB\n")
        limit.write_text(most + "\n")
        return ZeroFP4Optimizer(parameters.items(), FusedAdamW, state="compact", **SUMS)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", ranks)
        patch.setattr("zerofp4.engine.offload.MEMINFO", meminfo)
        patch.setattr("zerofp4.engine.offload.CGROUP_LIMITS", [limit])
        for free, most in ((needed - 2048, "max"), (2 * needed, str(needed + 4000 - 1))):
            error = raised_by(functools.partial(build, free, most))
            assert isinstance(error, RuntimeError), error
            text = f"need {needed / 1e9:.1f} GB more of host memory for {ranks} ranks of this host, and"
            assert text in str(error) and ("memory.max is" in str(error)) == (most != "max")
        build(2 * needed, str(needed + 4000)).step()


@on_ranks(1, 2)
def test_what_is_refused_and_described(world):
    parameters, both = parameters_of(world), {"communication": Communication(overlap="both")}
    for kind, message, optimizer_class, options in (
        (ValueError, "number from 0 to 1, got 1.5", FusedAdamW, {"offload": 1.5}),
        (ValueError, "number from 0 to 1, got True", FusedAdamW, {"offload": True}),
        (ValueError, "at least 1, got 0", FusedAdamW, {"offload": 1.0, "offload_threads": 0}),
        (ValueError, "needs FusedAdamW.*AdamW updates all", torch.optim.AdamW, {"offload": 1.0}),
        (ValueError, "whole matrices", FusedAdamW, {"offload": 1.0, "whole_matrices": True}),
        (ValueError, "needs offload=1.0, got 0.5", FusedAdamW, SUMS | {"offload": 0.5}),
        (TypeError, "must be a bool, got 1", FusedAdamW, SUMS | {"offload_gradients": 1}),
        (ValueError, "overlap='both' is not supported because offload_gradients", FusedAdamW, SUMS | both),
    ):
        error = raised_everywhere(world, kind, ZeroFP4Optimizer, parameters, optimizer_class, **options)
        assert re.search(message, error)
    if world.world_size > 1:
        options = {"offload": float(world.rank)}
        error = raised_everywhere(world, ValueError, ZeroFP4Optimizer, parameters, FusedAdamW, **options)
        assert error == "offload is 0.0 on rank 0 and 1.0 on rank 1"
    optimizer = built(world, FusedAdamW, bucket_mb=SMALL, offload=0.5, seed=0)[1]
    masters = sum(b.masters.nbytes for b in optimizer._shards.buckets if b.is_offloaded)
    described = optimizer.describe()
    assert described["host_bytes"] == masters and described["pinned_bytes"] > 0
    assert described["host_waits"].startswith("offload")
    pinned = [t for slots in optimizer._shards.offload._slots for t in (slots.up, slots.down, slots.amaxes)]
    assert {t.is_pinned() for t in pinned} == {world.device.type == "cuda"}
    elements = {"host": 0, "device": 0}
    for bucket in described["buckets"]:
        elements[bucket["masters"]] += bucket["elements"]
    assert 0.4 < elements["host"] / sum(elements.values()) < 0.9
    optimizer.step()
    assert optimizer.describe()["host_bytes"] > 1.5 * masters
    plain = built(world, FusedAdamW)[1].describe()
    assert plain["host_bytes"] == plain["pinned_bytes"] == 0 and plain["offload_threads"] is None
