"""Parameter groups with a process group of their own, and their checkpoints: experts, replicas, and slices of
tensor parallelism.
"""

from __future__ import annotations

import os
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases.fsdp2 import Collectives
from cases.optim import (
    Plain,
    assert_all_equal,
    built,
    check,
    keywords,
    make_gradients,
    make_parameters,
    plain_masters,
    set_gradients,
    through_a_file,
)
from helpers import assert_bytes_equal
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zerofp4
from distributed.cases import raised_everywhere, shared_folder
from distributed.optim.cases import WAYS, model_bytes, parameters_of
from distributed.optim.group_cases import (
    CLASSES,
    OPTIONS,
    REPLICATED,
    SHAPES,
    Mesh,
    Mixture,
    Parts,
    check_steps,
    expert_group,
    gradients_of,
    mean,
    members,
    mesh_of,
    named,
)
from distributed.optim.step_cases import HYPERS, weight_of
from distributed.run import on_ranks
from zerofp4 import reference
from zerofp4.ops import MEANS_FORMATS
from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer

LAYOUTS = {
    "experts": lambda world: [Mixture(world)],
    "parts": lambda world: [Parts(world)],
    "replicas": lambda world: [Mesh(world, shape) for shape in SHAPES[world.world_size]],
}


@on_ranks(2, 4, time_limit=120)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "bucket_mb", "clip"), WAYS)
def test_steps_are_those_of_whole_masters(world, layout, name, bucket_mb, clip):
    """In the documented order of addition; the norm counts every element once."""
    for model in LAYOUTS[layout](world):

        def build(cls, groups=model.param_groups(), **options):  # noqa: B008
            return ZeroFP4Optimizer(groups, cls, **keywords(options))

        overlap = "forward" if bucket_mb and name == "FusedAdamW" else None
        check_steps(model, build, name, clip, bucket_mb=bucket_mb, overlap=overlap)


@on_ranks(4)
def test_a_group_begins_when_the_one_before_is_done(world):
    """No collective of the experts begins before the last of the dense parameters: ranks whose groups have
    different numbers of buckets would wait for each other crosswise.
    """
    model = Mixture(world)
    options = {"transport": "collective", "bucket_mb": 1e-4, **OPTIONS}
    optimizer = ZeroFP4Optimizer(model.param_groups(), FusedAdamW, **keywords(options))
    for clip in (False, True):
        model.set_gradients(0)
        if clip:
            optimizer.clip_grad_norm_(1.0)
        with Collectives() as begun:
            optimizer.step()
        assert begun.sizes == sorted(begun.sizes, reverse=True) and set(begun.sizes) == {4, 2}, begun.sizes


# Hosts


@on_ranks(4)
@pytest.mark.parametrize("wire", MEANS_FORMATS)
def test_means_of_hosts_in_groups_that_span_them_alike(world, wire):
    """Two hosts, each with two ranks of all and with one of each group of experts."""
    kind, cpu = world.rank % 2, torch.device("cpu")
    whole = dist.new_group(backend="gloo")
    groups = whole, [dist.new_group(members(world, k), backend="gloo") for k in (0, 1)][kind]
    specifications = [((64, 96), torch.bfloat16, True), ((40,), torch.bfloat16, False)]
    parameters = [make_parameters(cpu, seed, specifications) for seed in (0, 1 + kind)]
    expected = [
        [
            reference.ShardedParameter(
                values, p.dtype, 2 * g + i, groups[g], quantized=i == 0, between_hosts=None if i else wire
            )
            for i, (p, values) in enumerate(zip(own, plain_masters(own), strict=True))
        ]
        for g, own in enumerate(parameters)
    ]
    for own, group in zip(expected, groups, strict=True):
        reference.cast_and_gather(own, group)
    named = [{"params": own, "process_group": group} for own, group in zip(parameters, groups, strict=True)]
    with mock.patch.dict(os.environ, {"NCCL_HOSTID": str(world.rank // 2)}):
        way = Communication(between_hosts=wire)
        optimizer = ZeroFP4Optimizer(named, FusedAdamW, process_group=whole, communication=way, **HYPERS)
    assert {(b["ranks"], b["between_hosts"] > 0) for b in optimizer.describe()["buckets"]} == {
        (4, True),
        (2, True),
    }
    for step in range(3):
        for own in parameters:
            set_gradients(own, gradients_of(own, world.rank, step))
        optimizer.step()
        for own, mine, group in zip(parameters, expected, groups, strict=True):
            gradients = gradients_of(own, world.rank, step)
            found_inf, _ = reference.zero_step(mine, gradients, group, between=(2, step), **HYPERS)
            assert not found_inf
            for p, one in zip(own, mine, strict=True):
                for name, found, values in weight_of(p, one):
                    assert_bytes_equal(found, values, f"step {step}: {name}")


@on_ranks(2, 4)
@pytest.mark.parametrize("wire", MEANS_FORMATS)
def test_replicas_on_hosts(world, wire):
    """The bytes of ranks that are all in one group, and messages as long."""
    local, way = world.world_size // 2, Communication(between_hosts=wire, bucket_mb=1e-3)
    more = [((64, 96), torch.bfloat16, True)]
    both = [[*parameters_of(world), *make_parameters(world.device, 1, more)] for _ in range(2)]
    groups = [{"params": both[0]}], [{"params": both[1], "process_group": mesh_of(world, (2, local))}]
    with mock.patch.dict(os.environ, {"NCCL_HOSTID": str(world.rank // local)}):
        optimizers = [ZeroFP4Optimizer(own, FusedAdamW, communication=way, **HYPERS) for own in groups]
    wires = [{bucket["means_travel_as"] for bucket in one.describe()["buckets"]} for one in optimizers]
    assert wires[0] == wires[1] == {wire, "float32"}
    for step in range(4):
        norms = []
        for own, optimizer in zip(both, optimizers, strict=True):
            set_gradients(own, gradients_of(own, world.rank, step))
            if step % 2:
                norms.append(optimizer.clip_grad_norm_(0.3))
            optimizer.step()
        assert_all_equal(norms[1:], norms[:1], f"step {step}: norm")
        assert_all_equal(model_bytes(both[1]), model_bytes(both[0]), f"step {step}: weight")
    masters = [optimizer.gathered_masters() for optimizer in optimizers]
    assert_all_equal(masters[1], masters[0], "master")


@on_ranks(2, 4)
def test_groups_between_hosts_that_cannot_be(world):
    """Groups on one host each, and replicas over which ranks of one host are sharded in part."""
    local = world.world_size // 2
    halves = [dist.new_group([*range(first, first + local)]) for first in (0, local)]
    cases = [(halves[world.rank // local], world.rank // local)]
    if world.world_size == 4:
        cases += [(mesh_of(world, (4, 1)), world.rank // 2), (mesh_of(world, (2, 2)), world.rank)]
    for group, host in cases:
        with mock.patch.dict(os.environ, {"NCCL_HOSTID": str(host)}):
            groups = [{"params": parameters_of(world), "process_group": group}]
            arguments = {"lr": 0.1, "communication": Communication(between_hosts="mxfp8")}
            message = raised_everywhere(world, ValueError, ZeroFP4Optimizer, groups, **arguments)
            assert "or within each host and replicated over all" in message


# Experts


@on_ranks(2, 4)
def test_masters_begin_with_the_first_rank_of_their_group(world):
    """Frozen parameters too."""
    model = Mixture(world, seed=1000 * world.rank)
    mesh = Mesh(world, SHAPES[world.world_size][0], seed=world.rank)
    for parameters in (model.dense, model.experts, mesh.parameters):
        parameters[0].requires_grad_(False)
    ZeroFP4Optimizer(model.param_groups(), lr=0.1)
    firsts = Mixture(world, seed=1000 * members(world, model.kind)[0])
    assert_all_equal(model_bytes(model.dense), model_bytes(Mixture(world).dense), "dense")
    assert_all_equal(model_bytes(model.experts), model_bytes(firsts.experts), "expert")
    optimizer = ZeroFP4Optimizer(mesh.param_groups(), lr=0.1)
    assert_all_equal(model_bytes(mesh.parameters), model_bytes(parameters_of(world)), "replica")
    buckets = optimizer.describe()["buckets"]
    assert {(bucket["replicas"], bucket["ranks"]) for bucket in buckets} == {mesh.shape}


@on_ranks(2, 4)
@pytest.mark.parametrize("name", CLASSES)
def test_an_expert_without_gradient_is_skipped_where_it_has_none(world, name):
    """Not where others have one for another expert in its place."""
    model = Mixture(world)
    plain = Plain(model.parameters, CLASSES[name], **OPTIONS)
    optimizer = ZeroFP4Optimizer(model.param_groups(), CLASSES[name], **OPTIONS)
    for step in range(3):
        model.set_gradients(step)
        means = model.means(step)
        if step == 1 and model.kind == 1:  # on all of its ranks
            for p in model.experts:
                p.grad = None
            means[len(model.dense) :] = [None] * len(model.experts)
        if step == 2:  # on one of them: its gradient counts as zeros
            first, i = members(world, model.kind)[0], len(model.dense)
            if world.rank == first:
                model.experts[0].grad = None
            given = [model.gradients(rank, step)[i] * (rank != first) for rank in members(world, model.kind)]
            means[i] = mean(given) if len(given) > 1 else None
        plain.step(means)
        optimizer.step()
        check(optimizer, plain, f"step {step}:")
        model.check_same()


FROZEN_DTYPES = (torch.uint8, torch.bool, torch.int64, torch.float8_e4m3fn, torch.float64, torch.complex64)


@on_ranks(1, 2)
def test_frozen_parameters_of_any_dtype_get_rank_0s_bytes(world):
    """As the codes of QLoRA, or weights in fp8. One is not contiguous."""
    values = torch.arange(24.0, device=world.device).view(4, 6)
    expected = [(values % 7).to(dtype) for dtype in FROZEN_DTYPES]
    own = expected if world.rank == 0 else [torch.zeros_like(each) for each in expected]
    frozen = [nn.Parameter(each.clone(), requires_grad=False) for each in own]
    frozen.append(nn.Parameter(frozen[0].detach().clone().t(), requires_grad=False))
    parameters = [*frozen, *parameters_of(world)]
    optimizer = ZeroFP4Optimizer(parameters, lr=0.1)
    for step in range(2):
        gradients = make_gradients(parameters, step)[len(frozen) :]
        set_gradients(parameters[len(frozen) :], gradients)
        optimizer.step()
        optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_all_equal([p.detach() for p in frozen], [*expected, expected[0].t()], "frozen parameter")
    assert optimizer.gathered_masters()[: len(frozen)] == [None] * len(frozen)


# Replicas


@on_ranks(4, time_limit=120)
def test_checkpoints_of_replicas_and_of_one_group_load_each_other(world):
    mesh, folders = mesh_of(world, (2, 2)), [shared_folder(world) for _ in range(2)]
    optimizers = []
    for folder, group in zip(folders, (mesh, None), strict=True):
        parameters = parameters_of(world)
        groups = [{"params": named(parameters, "p"), "process_group": group}]
        optimizer = ZeroFP4Optimizer(groups, FusedAdamW, **OPTIONS)
        set_gradients(parameters, [g.round() for g in gradients_of(parameters, world.rank, 0)])
        optimizer.step()
        dcp.save({"optimizer": optimizer}, checkpoint_id=folder)
        optimizers.append((parameters, optimizer))
    for (parameters, optimizer), folder in zip(optimizers, reversed(folders), strict=True):
        expected, weights = optimizer.gathered_masters(), [b.clone() for b in model_bytes(parameters)]
        set_gradients(parameters, gradients_of(parameters, world.rank, 1))
        optimizer.step()
        dcp.load({"optimizer": optimizer}, checkpoint_id=folder)
        assert_all_equal(optimizer.gathered_masters(), expected, "master")
        assert_all_equal(model_bytes(parameters), weights, "weight")


@on_ranks(2)
def test_replicas_have_one_number(world):
    """Their random bytes are those of it. Here a rank has one or two parameters of its own before it."""
    alone = [dist.new_group([rank]) for rank in range(2)][world.rank]
    mesh = mesh_of(world, (2, 1))
    own, shared = ([torch.zeros(4, 64, device=world.device) for _ in range(n)] for n in (1 + world.rank, 1))
    groups = [
        {"params": [nn.Parameter(p) for p in own], "process_group": alone},
        {"params": [nn.Parameter(p) for p in shared], "process_group": mesh},
    ]
    ZeroFP4Optimizer(groups, FusedAdamW, lr=1e-3)
    with pytest.raises(ValueError, match=r"compact state as number 1.* compact state as number 2"):
        ZeroFP4Optimizer(groups, FusedAdamW, lr=1e-3, state="compact")


# Checkpoints of experts, of which ranks hold different ones


def build_named(model: Mixture, group: dist.ProcessGroup, name=None, **options) -> ZeroFP4Optimizer:
    """name: of the experts; by default one that says which they are."""
    prefix = f"experts.{model.kind}" if name is None else name
    groups = [
        {"params": named(model.dense, "dense")},
        {"params": named(model.experts, prefix), "process_group": group, "weight_decay": 0.3},
    ]
    return ZeroFP4Optimizer(groups, FusedAdamW, **keywords(OPTIONS | options))


def run(model: Mixture, optimizer: ZeroFP4Optimizer, steps: range) -> None:
    for step in steps:
        for p, gradient in zip(model.parameters, model.gradients(0, step), strict=True):
            p.grad = gradient
        optimizer.step()


def build_all(world, seed: int) -> ZeroFP4Optimizer:
    """Of the dense parameters and the experts of both kinds, on every rank."""
    kinds = [Mixture(world, kind, seed) for kind in (0, 1)]
    experts = [pair for m in kinds for pair in named(m.experts, f"experts.{m.kind}")]
    groups = [{"params": named(kinds[0].dense, "dense")}, {"params": experts, "weight_decay": 0.5}]
    return ZeroFP4Optimizer(groups, FusedAdamW, **keywords(OPTIONS | {"lr": 0.5}))


@on_ranks(2, 4, time_limit=120)
def test_a_run_goes_on_with_its_experts_on_other_ranks(world):
    """Saved where each rank has half of the experts, loaded there and where each rank has all of them, and
    the other way round.
    """
    group, folder, second = expert_group(world), shared_folder(world), shared_folder(world)
    through = Mixture(world)
    straight = build_named(through, group)
    run(through, straight, range(2))
    dcp.save({"optimizer": straight}, checkpoint_id=folder)
    run(through, straight, range(2, 4))
    expected = straight.gathered_masters()

    def resume(path, seed):
        resumed = Mixture(world, seed=seed)
        optimizer = build_named(resumed, group, lr=0.5)
        dcp.load({"optimizer": optimizer}, checkpoint_id=path)
        assert [g["lr"] for g in optimizer.param_groups] == [0.02, 0.02]
        run(resumed, optimizer, range(2, 4))
        assert_all_equal(optimizer.gathered_masters(), expected, "master")
        assert_all_equal(model_bytes(resumed.parameters), model_bytes(through.parameters), "weight")

    resume(folder, 7)
    whole = build_all(world, seed=9)
    dcp.load({"optimizer": whole}, checkpoint_id=folder)
    assert [(g["lr"], g["weight_decay"]) for g in whole.param_groups] == [(0.02, 0.1), (0.02, 0.3)]
    dcp.save({"optimizer": whole}, checkpoint_id=second)
    resume(second, 11)


@on_ranks(2, 4, time_limit=60)
@pytest.mark.parametrize("name", ["experts", ""])
def test_a_name_that_is_another_parameter_elsewhere_is_refused(world, name):
    """In files that ranks write together; what each rank writes for itself is its own."""
    group = expert_group(world)

    def make(seed):
        model = Mixture(world, seed=seed)
        if name:
            return model, build_named(model, group, name)
        return model, ZeroFP4Optimizer(model.param_groups(group), FusedAdamW, **OPTIONS)

    model, optimizer = make(0)
    run(model, optimizer, range(2))
    with pytest.raises(dcp.api.CheckpointException, match="another on ranks"):
        dcp.save({"optimizer": optimizer}, checkpoint_id=shared_folder(world))
    _, resumed = make(5)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_all_equal(resumed.gathered_masters(), optimizer.gathered_masters(), "master")


@on_ranks(2, 4, time_limit=60)
def test_masters_of_what_a_rank_has(world):
    """In its own keys; rank 0 would write a model that lacks the others' experts."""
    mixture = Mixture(world)
    model = nn.Module()
    for name, p in [*named(mixture.dense, "dense"), *named(mixture.experts, "experts")]:
        model.register_parameter(name.replace(".", "_"), p)
    optimizer = build_named(mixture, expert_group(world))
    run(mixture, optimizer, range(1))
    found = list(zerofp4.master_state_dict(model, optimizer))
    assert [key for key, _ in found] == list(model.state_dict())
    assert_all_equal([value for _, value in found], optimizer.gathered_masters(), "master")
    with pytest.raises(ValueError, match=r"save_safetensors\(\) needs .* other ranks train other"):
        zerofp4.save_safetensors(model, shared_folder(world), optimizer)


# Groups that cannot be meant, or that differ between ranks


def check_refused(model, param_groups, message: str, error=ValueError, **options) -> None:
    """On every rank, with one message, before a parameter was touched."""
    before = [b.clone() for b in model_bytes(model.parameters)]
    build = lambda: ZeroFP4Optimizer(param_groups, lr=0.1, **keywords(options))  # noqa: E731
    assert message in raised_everywhere(model.world, error, build)
    assert_all_equal(model_bytes(model.parameters), before, "parameter")


@on_ranks(3, time_limit=30)
def test_a_group_with_ranks_that_do_not_step(world):
    model = Mixture(world, kind=0)
    pair, all_ranks = dist.new_group([0, 2]), dist.group.WORLD
    if world.rank != 1:
        message = r"process_group of param_groups\[1\] has global rank 1, and the"
        with pytest.raises(ValueError, match=message):
            ZeroFP4Optimizer(model.param_groups(all_ranks), process_group=pair)
    dist.barrier()
    optimizer = ZeroFP4Optimizer(model.param_groups(dist.new_group()), process_group=all_ranks)
    why = optimizer.describe()["why_collective"]  # None where the ranks' GPUs share memory
    assert why is None or "process_group" not in why  # the same ranks are the same


@on_ranks(2, 4, time_limit=60)
def test_groups_that_one_rank_has_otherwise(world):
    """Ranks may have other experts; those of a group are the same on its ranks."""
    model, group = Mixture(world), expert_group(world)
    own, last = model.param_groups(group), world.world_size - 1
    outside = dist.new_group([0])  # for rank 1, what torch gives a rank that is not in it
    copied = {"params": model.experts, "replicated_over": 3}
    more = {"params": make_parameters(world.device, 5, [((4,), torch.float32, False)])}
    cases = [
        (1, model.param_groups("experts"), "rank 1: process_group of param_groups[1] must be a process gr"),
        (1, model.param_groups(outside), "rank 1: process_group of param_groups[1] does not contain the"),
        (1, [copied], "rank 1: replicated_over of param_groups[0] must be a process group, got int"),
        (last, [*own, more], "optimizer_class of param_groups is ['torch.optim.adamw.AdamW', "),
    ]
    if world.world_size == 4:
        alone = [dist.new_group([rank]) for rank in range(4)][world.rank]
        fewer = [own[0], {"params": model.experts[:1], "process_group": group}]
        other = Mixture(world, kind=1 - model.kind).param_groups(group)
        number = "the number of parameters sharded over ranks"
        cases += [
            (3, model.param_groups(alone), f"{number} [1, 3] is 3 on rank 1 and 0 on rank 3"),
            (3, fewer, f"{number} [1, 3] is 3 on rank 1 and 1 on rank 3"),
            (2, other, f"{number} [0, 2] is 2 on rank 0 and 3 on rank 2"),
        ]
    for rank, groups, message in cases:
        check_refused(model, groups if world.rank == rank else own, message, (TypeError, ValueError))
    if world.world_size == 4:
        model.experts[0].requires_grad_(world.rank != 3)
        kind = "nvfp4 bfloat16 (16, 34) in group 1"
        message = f"param_groups[1]['params'][0] is {kind} on rank 1 and {kind}, frozen on rank 3"
        check_refused(model, own, message)


@on_ranks(2, 4, time_limit=30)
def test_options_that_go_with_groups(world):
    model, group = Mixture(world), expert_group(world)
    check_refused(
        model,
        model.param_groups(group),
        "param_groups[0]['params'][0] and param_groups[1]['params'][0] share an amax, so they must have",
        amax_groups=[[model.dense[0], model.experts[0]]],
    )
    message = "overlap='update' is not supported because parameter groups"
    options = {"optimizer_class": FusedAdamW, "overlap": "update"}
    check_refused(model, model.param_groups(group), message, **options)
    first = ZeroFP4Optimizer(model.param_groups(group), FusedAdamW, lr=0.1)
    count = len(model.dense)
    message = f"rank 0: param_groups[0]['params'][{count}] is sharded over another process group"
    check_refused(model, [{"params": model.parameters[: count + 1]}], message, masters_from=first)
    again = ZeroFP4Optimizer(model.param_groups(group), FusedAdamW, lr=0.1, masters_from=first)
    assert_all_equal(again.gathered_masters(), first.gathered_masters(), "master")
    with pytest.raises(RuntimeError, match="add_param_group"):
        again.add_param_group({"params": [], "process_group": group})
    assert not {"process_group", "replicated_over"} & again.param_groups[1].keys()


# Slices of tensor parallelism


@on_ranks(2, 4, time_limit=30)
def test_what_is_wrong_with_slices(world):
    model = Parts(world)
    slices, replicated = model.param_groups()
    message = "rank 0: param_groups[0] names no process_group, and another is replicated_over a tensor-para"
    check_refused(model, [{"params": model.slices}, replicated], message)
    both = replicated | {"process_group": dist.group.WORLD}
    check_refused(model, [slices, both], "may have no rank in common but this one")
    with pytest.raises(ValueError, match=r"has global rank \d, and the optimizer's process_group has not"):
        ZeroFP4Optimizer([slices, replicated], process_group=model.data)
    dist.barrier()
    other = make_parameters(world.device, 1, [((301,), torch.float32, False), *REPLICATED[1:]])
    differs = replicated | {"params": other if model.part else model.replicated}
    message = "[0] is float32 (300,) in group 1 on rank 0 and float32 (301,) in group 1 on rank 1"
    check_refused(model, [slices, differs], message)
    if world.world_size == 4:
        alone = [dist.new_group([rank]) for rank in range(4)][world.rank]
        some = replicated | ({"replicated_over": alone} if world.rank == 3 else {})
        message = "the number of parameters replicated over ranks [2, 3] is 3 on rank 2 and 0 on rank 3"
        check_refused(model, [slices, some], message)


@on_ranks(4, time_limit=30)
def test_meshes_that_cannot_be_meant(world):
    square, line = mesh_of(world, (2, 2)), mesh_of(world, (4,))
    model, other = Mesh(world, (2, 2)), square if world.rank < 3 else dist.group.WORLD
    outside = DeviceMesh(world.device.type, [[0], [1]])
    for group, message, options in [
        (line, "rank 0: process_group of param_groups[0] may be a DeviceMesh of two dimensions", {}),
        (other, "in 2 parts on rank 0 and", {}),
        (outside, "rank 2: process_group of param_groups[0] does not contain the calling process", {}),
        (square, "transport='peer' is not supported because", {"transport": "peer"}),
    ]:
        check_refused(model, [{"params": model.parameters, "process_group": group}], message, **options)


@on_ranks(2)
def test_a_group_ends_when_it_is_destroyed(world):
    """An optimizer does not keep it alive: a thread of gloo could outlive the interpreter. So on CPUs."""
    group = dist.new_group(backend="gloo")
    optimizer = built(torch.device("cpu"), FusedAdamW, 0, process_group=group)[1]
    optimizer.step()
    known = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    assert known() is None and optimizer.world_size == 2
