"""Masters of FSDP2 that are written to from outside, checkpoints, and the optimizers that train them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases.fsdp2 import (
    Collectives,
    Model,
    Run,
    check_gathered,
    inject,
    make_model,
    masters_of,
    mesh_of,
    shard,
    start,
    take_experts,
    unsharded,
)
from helpers import assert_bytes_equal
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zerofp4
from distributed.cases import shared_folder
from distributed.optim.fused_cases import stages_of_plans
from distributed.run import on_ranks
from zerofp4.integrations import fsdp2
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

OPTIMIZERS = {
    "fused": lambda params: FusedAdamW(params, lr=0.02, weight_decay=0.1),
    "compact": lambda params: FusedAdamW(params, lr=0.02, weight_decay=0.1, state="compact"),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.02, foreach=True),
    "torch's fused": lambda params: torch.optim.AdamW(params, lr=0.02, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
}


def assert_same_masters(one: nn.Module, other: nn.Module) -> None:
    mine, theirs = masters_of(one), masters_of(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert_bytes_equal(value, theirs[name], name)


def other_run(world, **options) -> Run:
    """A run of other masters than start() makes."""
    return start(world, model=make_model(world, 5), **options)


# Stale codes


@on_ranks(1, 2)
@pytest.mark.parametrize("how", ["whole", "assigned", "one module"])
def test_after_a_load_the_next_forward_casts(world, how):
    run, other = start(world), other_run(world)
    run.step(0)
    model, loaded = (r.model.second if how == "one module" else r.model for r in (run, other))
    model.load_state_dict(loaded.state_dict(), assign=how == "assigned")
    if how == "whole":
        message = r"master of 'second.weight' was written to since it was cast: attach the optimizer"
        with pytest.raises(RuntimeError, match=message):
            run.model.second.unshard()
    assert run.output(1).equal(other.output(1)) == (how != "one module")
    run.check()
    assert_same_masters(model, loaded)


@on_ranks(2)
@pytest.mark.parametrize("how", ["refresh", "step"])
def test_a_write_on_one_rank_is_cast_by_refresh_and_by_a_step(world, how):
    """To a parameter, or to what state_dict() returns, as dcp.load does."""
    run = start(world)
    run.step(0)
    written = run.model.state_dict()["second.weight"] if how == "refresh" else run.model.second.weight
    if world.rank == 1:
        with torch.no_grad():
            written.to_local()[1:].mul_(3)
        with pytest.raises(RuntimeError, match=r"the master of 'second.weight' was written to .*refresh\(\)"):
            run.model.second.unshard()
    run.attachment.refresh() if how == "refresh" else run.optimizer.step()
    run.check()


@on_ranks(2)
def test_what_was_not_resharded_is_gathered_anew_after_a_step(world):
    run, plain = (start(world, reshard_after_forward=reshards) for reshards in (False, True))
    for each in (run, plain):
        each.backward(0)
        each.output(0)  # gathers, and nothing reshards
        each.optimizer.step()
    assert_bytes_equal(run.output(0), plain.output(0), "outputs")


# State dicts and checkpoints


@on_ranks(1, 2)
def test_state_dicts_hold_plain_tensors(world):
    run = start(world)
    run.step(0)
    for name, value in run.model.state_dict().items():
        assert type(value) is DTensor and type(value._local_tensor) is torch.Tensor, name
        assert value.dtype == torch.float32
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    full, masters = states.get_model_state_dict(run.model, options=options), run.masters()
    assert full.keys() == (masters.keys() if world.rank == 0 else set())
    for name, value in full.items():
        assert type(value) is torch.Tensor, name
        assert_bytes_equal(value, masters[name].cpu(), name)


@on_ranks(1, 2)
@pytest.mark.parametrize("device", ["meta", "own"])
def test_a_full_state_dict_comes_from_rank_0(world, device):
    other = make_model(world, 5)
    full = {name: value.clone() for name, value in other.state_dict().items()} if world.rank == 0 else {}
    with torch.device("meta" if device == "meta" else world.device):
        model = Model()
    fsdp2.prepare(model, take_experts)
    shard(model, mesh_of(world))
    if device == "meta":
        with pytest.raises(RuntimeError, match="is on the meta device: give it values before attach"):
            fsdp2.attach(model, OPTIMIZERS["sgd"](model.parameters()))
        model.to_empty(device=world.device)
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, full, options=options)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    fsdp2.attach(model, optimizer)
    check_gathered(model)
    assert_same_masters(model, other)


def state_of(run: Run) -> dict:
    """What torch.distributed.checkpoint reads and writes in place."""
    optimizer = states.get_optimizer_state_dict(run.model, run.optimizer)
    return {"model": run.model.state_dict(), "optimizer": optimizer}


def resumed(world, path, group=None, **options) -> Run:
    """A run of other masters that loads a checkpoint, and takes its third and fourth step."""
    run = other_run(world, **options)
    dcp.load(state_of(run), checkpoint_id=path, process_group=group)
    run.inject(range(2, 4))
    run.check()
    return run


@on_ranks(4, time_limit=120.0)
@pytest.mark.parametrize(("case", "saver"), [("fused", (4,)), ("compact", (4,)), ("foreach", (2, 2))])
def test_a_run_goes_on_in_another_mesh(world, case, saver):
    """Of fewer ranks, and of replicas."""
    path, optimizer, names = shared_folder(world), OPTIMIZERS[case], ("replicate", "shard")
    run = start(world, mesh=mesh_of(world, saver, names[-len(saver) :]), optimizer=optimizer)
    run.inject(range(2))
    dcp.save(state_of(run), checkpoint_id=path)
    run.inject(range(2, 4))
    expected = run.masters()
    for shape in ((1,), (3,), (2, 2)):
        ranks = torch.arange(math.prod(shape))
        mesh = DeviceMesh(world.device.type, ranks.view(shape), mesh_dim_names=names[-len(shape) :])
        group = dist.new_group(ranks.tolist())
        if world.rank < len(ranks):
            found = resumed(world, path, group, mesh=mesh, optimizer=optimizer).masters()
            for name, value in found.items():
                assert_bytes_equal(value, expected[name], f"{name} in a mesh {shape}")
        dist.barrier()


@on_ranks(2)
@pytest.mark.parametrize(("saver", "loader"), [("foreach", "fused"), ("fused", "torch's fused")])
def test_adamw_and_fusedadamw_load_checkpoints_of_each_other(world, saver, loader):
    """step, exp_avg and exp_avg_sq have the same names, and groups the same options."""
    path, run = shared_folder(world), start(world, optimizer=OPTIMIZERS[saver])
    run.inject(range(2))
    run.optimizer.param_groups[0]["lr"] = 0.125
    dcp.save(state_of(run), checkpoint_id=path)
    other = other_run(world, optimizer=OPTIMIZERS[loader])
    state = state_of(other)
    dcp.load(state, checkpoint_id=path)
    states.set_optimizer_state_dict(other.model, other.optimizer, state["optimizer"])
    assert other.optimizer.param_groups[0]["lr"] == 0.125
    assert_same_masters(run.model, other.model)
    for p, q in zip(run.model.parameters(), other.model.parameters(), strict=True):
        found, expected = other.optimizer.state[q], run.optimizer.state[p]
        assert found.keys() == expected.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for name, value in expected.items():
            mine, theirs = (getattr(v, "_local_tensor", v).cpu() for v in (found[name], value))
            assert_bytes_equal(mine, theirs, name)
    other.inject(range(2, 4))
    other.check()


def zero_run(world, seed: int = 0) -> Run:
    """A run of ZeroFP4Optimizer with the options of OPTIMIZERS["fused"]."""
    model = make_model(world, seed)
    zerofp4.convert_model(model, take_experts)
    named = model.named_parameters()
    return Run(world, model, ZeroFP4Optimizer(named, FusedAdamW, lr=0.02, weight_decay=0.1), None)


def assert_same_weights(sharded: nn.Module, converted: nn.Module) -> None:
    with unsharded(sharded) as found:
        for name, p in converted.named_parameters():
            if name in found:
                for buffer_name, buffer in found[name].record.buffers():
                    assert_bytes_equal(buffer, p.record.buffer(buffer_name), f"{name}: {buffer_name}")
            else:
                assert_bytes_equal(sharded.get_parameter(name).detach(), p.detach(), name)


@on_ranks(2, 4)
def test_steps_and_checkpoints_are_those_of_zerofp4optimizer(world):
    """Each of the two goes on from a checkpoint of the other."""
    codes = {"optimizer": OPTIMIZERS["fused"], "reshard_after_forward": False}
    run, zero, paths = start(world, **codes), zero_run(world), [shared_folder(world) for _ in range(2)]
    for each in (run, zero):
        each.inject(range(20))
    assert_same_weights(run.model, zero.model)
    dcp.save({"optimizer": fsdp2.zero_state_dict(run.model, run.optimizer)}, checkpoint_id=paths[0])
    dcp.save({"optimizer": zero.optimizer}, checkpoint_id=paths[1])
    run_after, zero_after = other_run(world, **codes), zero_run(world, 5)
    partly = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"optimizer": zero_after.optimizer}, checkpoint_id=paths[0], planner=partly)
    state = {"optimizer": fsdp2.zero_state_dict(run_after.model, run_after.optimizer)}
    dcp.load(state, checkpoint_id=paths[1], planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    for each in (run, run_after, zero_after):
        each.inject(range(20, 22))
    assert_same_masters(run_after.model, run.model)
    assert_same_weights(run.model, zero_after.model)


# Optimizers


@on_ranks(1, 2)
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_optimizers_clipping_and_schedulers_see_plain_masters(world, case):
    """The masters are those that the same optimizer trains without zerofp4."""
    run, plain = start(world, optimizer=OPTIMIZERS[case]), shard(make_model(world), mesh_of(world))
    pairs = [(run.model, run.optimizer), (plain, OPTIMIZERS[case](plain.parameters()))]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for _, optimizer in pairs]
    for step in range(3):
        for (model, optimizer), scheduler in zip(pairs, schedulers, strict=True):
            inject(model, step)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    assert_same_masters(run.model, plain)
    run.check()
    for p in run.model.parameters():
        for value in run.optimizer.state[p].values():
            inner = getattr(value, "_local_tensor", value)
            assert inner is None or not isinstance(inner, torch.Tensor) or type(inner) is torch.Tensor


@on_ranks(1, 2)
def test_fusedadamw_leaves_the_amaxes(world):
    run = start(world, optimizer=OPTIMIZERS["fused"])
    run.backward(0)  # where shards are uneven, fully_shard moves them now
    with stages_of_plans() as stages:
        run.optimizer.step()
        assert "begin_amax" not in stages
        with torch.no_grad():
            run.model.second.weight.mul_(2)
        run.attachment.refresh()
        assert stages.count("begin_amax") == 1
    run.check()


@on_ranks(2)
def test_two_optimizers_cast_what_is_theirs(world):
    def build(params):
        params = list(params)
        muon = torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.02)
        return [muon, torch.optim.AdamW([p for p in params if p.dim() != 2], lr=0.02)]

    run = start(world, optimizer=build)
    for step in range(2):
        run.backward(step)
        for optimizer in run.optimizer:
            with Collectives() as calls:
                optimizer.step()
            assert [call[2] for call in calls.named("allreduce")].count(torch.float32) == 1
            optimizer.zero_grad()
        run.check()
    run.attachment.check()
    assert all(not found.item() for found in run.attachment.found_inf.values())


@on_ranks(2)
def test_compact_state_of_matrices_that_are_cut_by_columns(world):
    """Between groups of 64 the codes and scales are those of the whole; elsewhere it is refused."""
    mesh, cut = mesh_of(world), [Shard(1)]
    torch.manual_seed(0)
    plain = torch.randn(6, 256, device=world.device)
    p = distribute_tensor(plain.clone(), mesh, cut)
    one, other = (OPTIMIZERS["compact"]([tensor]) for tensor in (plain, p))
    for _ in range(2):
        plain.grad = torch.randn_like(plain)
        p.grad = distribute_tensor(plain.grad, mesh, cut)
        one.step()
        other.step()
    assert_bytes_equal(p.full_tensor(), plain, "parameter")
    for name, value in one.state[plain].items():
        found = other.state[p][name]
        assert_bytes_equal(found.full_tensor() if isinstance(found, DTensor) else found, value, name)
    narrow = distribute_tensor(torch.randn(6, 192, device=world.device), mesh, cut)
    edited = FusedAdamW([narrow])
    edited.param_groups[0]["state"] = "compact"
    for call in (lambda: OPTIMIZERS["compact"]([narrow]), edited.step):
        with pytest.raises(ValueError, match=r"rows of 192 .* over 2 ranks.* must be a multiple of 128"):
            call()
