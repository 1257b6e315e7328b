"""Masters of FSDP2 that are written to from outside, checkpoints, and the optimizers that train them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp2_cases import (
    CONVERTED,
    Collectives,
    Model,
    assert_same_masters,
    batch_of,
    check_gathered,
    folder,
    gathered,
    inject,
    injected_steps,
    make_model,
    mesh_of,
    reshard,
    shard,
    start,
    take_experts,
    whole,
)
from helpers import assert_bytes_equal
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import zerofp4
from distributed.checks_optim import Injected
from distributed.run import on_ranks
from zerofp4.integrations import fsdp2
from zerofp4.ops import CastStages
from zerofp4.optim import FusedAdamW

OPTIMIZERS = {
    "fused": lambda params: FusedAdamW(params, lr=0.02, weight_decay=0.1),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.02, foreach=True),
    "torch's fused": lambda params: torch.optim.AdamW(params, lr=0.02, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
}


# Stale codes


@on_ranks(1, 3)
def test_after_a_load_the_next_forward_casts(world):
    run, other = start(world), start(world, model=make_model(world, 5))
    run.step(batch_of(world, 0))
    run.model.load_state_dict(other.model.state_dict())
    with pytest.raises(RuntimeError, match=r"the master of 'second.weight' was written to since it was cast"):
        run.model.second.unshard()
    with torch.no_grad():
        loss, expected = (r.model(batch_of(world, 1)) for r in (run, other))
    assert_bytes_equal(loss, expected, "outputs")
    check_gathered(run.model)
    assert_same_masters(run.model, other.model)


@on_ranks(2)
def test_after_a_load_of_one_module_the_next_forward_casts(world):
    run, other = start(world), start(world, model=make_model(world, 5))
    run.model.second.load_state_dict(other.model.second.state_dict())
    with torch.no_grad():
        run.model(batch_of(world, 1))
    check_gathered(run.model)


@on_ranks(2, 3)
@pytest.mark.parametrize("how", ["refresh", "step"])
def test_a_write_on_one_rank_is_cast_by_refresh_and_by_a_step(world, how):
    run = start(world)
    run.step(batch_of(world, 0))
    if world.rank == world.world_size - 1:
        with torch.no_grad():
            run.model.second.weight.to_local()[1:].mul_(3)
        with pytest.raises(RuntimeError, match=r"the master of 'second.weight' was written to .*refresh\(\)"):
            run.model.second.unshard()
    run.attachment.refresh() if how == "refresh" else run.optimizer.step()
    check_gathered(run.model)


@on_ranks(2)
def test_what_is_read_into_a_state_dict_needs_refresh(world):
    """In place: nothing calls load_state_dict. The codes of before are never used."""
    run, other = start(world), start(world, model=make_model(world, 5))
    run.step(batch_of(world, 0))
    path = folder(world)
    dcp.save(other.model.state_dict(), checkpoint_id=path)
    dcp.load(run.model.state_dict(), checkpoint_id=path)
    with pytest.raises(RuntimeError, match=r"written to since it was cast: call refresh\(\)"):
        run.model(batch_of(world, 1))
    run.attachment.refresh()
    with torch.no_grad():
        outputs = [r.model(batch_of(world, 1)) for r in (run, other)]
    assert_bytes_equal(*outputs, "outputs")
    check_gathered(run.model)


@on_ranks(1, 2)
def test_nothing_is_cast_where_nothing_was_written(world):
    run = start(world)
    run.step(batch_of(world, 0))
    record = next(w.record for *_, w in fsdp2.prepared_weights(run.model) if w.name == "second.weight")
    before = record.amax.clone()
    with Collectives() as forward:
        run.backward(batch_of(world, 1))
    assert not forward.named("allreduce")
    assert_bytes_equal(record.amax, before, "an amax")


@on_ranks(2)
def test_what_was_not_resharded_is_gathered_anew_after_a_step(world):
    run = start(world, reshard_after_forward=False)
    run.backward(batch_of(world, 0))
    with torch.no_grad():
        run.model(batch_of(world, 0))  # gathers, and nothing reshards
    run.optimizer.step()
    run.model(batch_of(world, 0))
    found = {n: p for n, p in run.model.named_parameters() if isinstance(p, zerofp4.NVFP4Tensor)}
    assert set(found) == set(CONVERTED)
    codes = {name: tensor.rowwise_data.clone() for name, tensor in found.items()}
    state = run.model.state_dict()
    for name, bytes_ in codes.items():
        assert_bytes_equal(bytes_, zerofp4.quantize(whole(state[name])).rowwise_data, name)


@on_ranks(2)
def test_a_backward_pass_through_the_weights_of_before_a_step_fails(world):
    run = start(world, reshard_after_forward=True)
    run.backward(batch_of(world, 0))
    loss = run.model(batch_of(world, 1)).square().mean()
    run.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_ranks(1, 2)
def test_forward_needs_attach(world):
    model = make_model(world)
    fsdp2.prepare(model, take_experts)
    shard(model, DeviceMesh(world.device.type, list(range(world.world_size))))
    with pytest.raises(RuntimeError, match=r"'first.weight' has no codes yet: call .*attach"):
        model(batch_of(world, 0))


# State dicts


@on_ranks(1, 3)
def test_state_dicts_hold_plain_tensors(world):
    run = start(world)
    run.step(batch_of(world, 0))
    state = run.model.state_dict()
    for name, value in state.items():
        assert type(value) is DTensor and type(value._local_tensor) is torch.Tensor, name
        assert value.dtype == torch.float32
    full = get_model_state_dict(run.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if world.rank == 0:
        for name, value in full.items():
            assert type(value) is torch.Tensor, name
    for name in CONVERTED:
        expected = whole(state[name])
        if world.rank == 0:
            assert_bytes_equal(full[name], expected.cpu(), name)


@on_ranks(1, 3)
@pytest.mark.parametrize("assign", [False, True])
def test_a_full_state_dict_comes_from_rank_0(world, assign):
    other = make_model(world, 5)
    full = {k: v.clone() for k, v in other.state_dict().items()} if world.rank == 0 else {}
    with torch.device("meta") if assign else torch.device(world.device):
        model = Model()
    fsdp2.prepare(model, take_experts)
    shard(model, DeviceMesh(world.device.type, list(range(world.world_size))))
    if assign:
        with pytest.raises(RuntimeError, match="is on the meta device: give it values before attach"):
            fsdp2.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model.to_empty(device=world.device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp2.attach(model, optimizer)
    check_gathered(model)
    state = model.state_dict()
    for name, value in other.state_dict().items():
        assert_bytes_equal(whole(state[name]), value, name)


@on_ranks(3)
def test_assigned_masters_are_masters(world):
    run, other = start(world), start(world, model=make_model(world, 5))
    run.model.load_state_dict(other.model.state_dict(), assign=True)
    with torch.no_grad():
        run.model(batch_of(world, 0))
    check_gathered(run.model)
    assert_same_masters(run.model, other.model)


def mesh_of_first(world, size: int) -> DeviceMesh:
    return DeviceMesh(world.device.type, list(range(size)), mesh_dim_names=("shard",))


@on_ranks(4, time_limit=120.0)
@pytest.mark.parametrize("case", ["fused", "foreach"])
def test_a_run_goes_on_in_a_world_of_another_size(world, case):
    through = start(world, optimizer=OPTIMIZERS[case])
    injected_steps(through, range(4))
    path = folder(world)
    stopped = start(world, optimizer=OPTIMIZERS[case])
    injected_steps(stopped, range(2))
    dcp.save(state_of(stopped), checkpoint_id=path)
    expected = {name: whole(value).clone() for name, value in through.model.state_dict().items()}
    for size in (1, 2, 3):
        mesh, group = mesh_of_first(world, size), dist.new_group(range(size))
        if world.rank < size:
            resumed = start(world, model=make_model(world, 5), mesh=mesh, optimizer=OPTIMIZERS[case])
            state = state_of(resumed)
            dcp.load(state, checkpoint_id=path, process_group=group)
            injected_steps(resumed, range(2, 4))
            check_gathered(resumed.model)
            for name, value in resumed.model.state_dict().items():
                assert_bytes_equal(whole(value), expected[name], f"{name} on {size} ranks")
        dist.barrier()


@on_ranks(4)
def test_checkpoints_of_replicas_of_shards(world):
    """A mesh of two dimensions loads what one of one has saved, and the other way round."""
    meshes = {"one": mesh_of(world), "two": mesh_of(world, (2, 2), ("replicate", "shard"))}
    runs = {name: start(world, mesh=mesh) for name, mesh in meshes.items()}
    for name, other in (("two", "one"), ("one", "two")):
        injected_steps(runs[name], range(2))
        path = folder(world)
        dcp.save(state_of(runs[name]), checkpoint_id=path)
        resumed = start(world, model=make_model(world, 5), mesh=meshes[other])
        state = state_of(resumed)
        dcp.load(state, checkpoint_id=path)
        injected_steps(resumed, range(2, 4))
        injected_steps(runs[name], range(2, 4))
        check_gathered(resumed.model)
        assert_same_masters(resumed.model, runs[name].model)


def state_of(run) -> dict:
    """What torch.distributed.checkpoint reads and writes in place."""
    return {"model": run.model.state_dict(), "optimizer": get_optimizer_state_dict(run.model, run.optimizer)}


# ZeroFP4Optimizer


def zero_run(world, seed=0):
    model = make_model(world, seed)
    zerofp4.convert_model(model, take_experts)
    return model, Injected(model.named_parameters(), FusedAdamW, lr=0.02, weight_decay=0.1)


def zero_steps(model, optimizer, steps) -> None:
    for step in steps:
        for i, p in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(7919 * step + i)
            p.grad = torch.randn(p.shape, generator=generator).to(p.device)
        optimizer.step()


def assert_same_weights(sharded: nn.Module, converted: nn.Module) -> None:
    found = gathered(sharded)
    for name, p in converted.named_parameters():
        if name in found:
            for buffer_name, buffer in found[name].record.buffers():
                assert_bytes_equal(buffer, p.record.buffer(buffer_name), f"{name}: {buffer_name}")
        else:
            assert_bytes_equal(sharded.get_parameter(name).detach(), p.detach(), name)
    reshard(sharded)


@pytest.mark.heavy
@on_ranks(3, time_limit=120.0)
def test_200_steps_give_the_bytes_of_zerofp4optimizer(world):
    run = start(
        world, optimizer=OPTIMIZERS["fused"], reshard_after_forward=False
    )  # what is gathered is codes
    model, optimizer = zero_run(world)
    for first in range(0, 200, 50):
        injected_steps(run, range(first, first + 50))
        zero_steps(model, optimizer, range(first, first + 50))
        assert_same_weights(run.model, model)


@on_ranks(2, 3)
def test_checkpoints_of_zerofp4optimizer_and_of_fsdp2_load_each_other(world):
    paths = folder(world), folder(world)
    run = start(
        world, optimizer=OPTIMIZERS["fused"], reshard_after_forward=False
    )  # what is gathered is codes
    model, optimizer = zero_run(world)
    injected_steps(run, range(3))
    zero_steps(model, optimizer, range(3))
    dcp.save({"optimizer": fsdp2.zero_state_dict(run.model, run.optimizer)}, checkpoint_id=paths[0])
    dcp.save({"optimizer": optimizer}, checkpoint_id=paths[1])
    partly = dcp.DefaultLoadPlanner(allow_partial_load=True)
    other, other_optimizer = zero_run(world, 5)
    dcp.load({"optimizer": other_optimizer}, checkpoint_id=paths[0], planner=partly)
    loaded = start(world, model=make_model(world, 5), optimizer=OPTIMIZERS["fused"])
    state = {"optimizer": fsdp2.zero_state_dict(loaded.model, loaded.optimizer)}
    dcp.load(state, checkpoint_id=paths[1], planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    injected_steps(loaded, range(3, 5))
    injected_steps(run, range(3, 5))
    zero_steps(other, other_optimizer, range(3, 5))
    assert_same_masters(loaded.model, run.model)
    assert_same_weights(run.model, other)


# Optimizers


@on_ranks(1, 3)
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_optimizers_clipping_and_schedulers_see_plain_masters(world, case):
    """The masters are those that the same optimizer trains without zerofp4."""
    run = start(world, optimizer=OPTIMIZERS[case])
    plain = make_model(world)
    shard(plain, DeviceMesh(world.device.type, list(range(world.world_size))))
    optimizer = OPTIMIZERS[case](plain.parameters())
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (run.optimizer, optimizer)]
    for step in range(3):
        injected = run.model, plain
        for model, opt, scheduler in zip(injected, (run.optimizer, optimizer), schedulers, strict=True):
            injected_steps_of(model, opt, step)
            scheduler.step()
    assert_same_masters(run.model, plain)
    check_gathered(run.model)
    for p in run.model.parameters():
        for value in run.optimizer.state[p].values():
            inner = getattr(value, "_local_tensor", value)
            assert inner is None or not isinstance(inner, torch.Tensor) or type(inner) is torch.Tensor


def injected_steps_of(model, optimizer, step) -> None:
    inject(model, step)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@on_ranks(1, 3)
def test_fusedadamw_leaves_the_amaxes(world):
    run = start(world, optimizer=OPTIMIZERS["fused"])
    run.backward(batch_of(world, 0))  # where shards are uneven, fully_shard moves them now
    computed = []
    original = CastStages.begin_amax
    CastStages.begin_amax = lambda stages, target: computed.append(original(stages, target))
    try:
        run.optimizer.step()
        assert not computed
        with torch.no_grad():
            run.model.second.weight.mul_(2)
        run.attachment.refresh()
        assert len(computed) == 1
    finally:
        CastStages.begin_amax = original
    check_gathered(run.model)


@on_ranks(2)
def test_two_optimizers_cast_what_is_theirs(world):
    model = make_model(world)
    fsdp2.prepare(model, take_experts)
    shard(model, DeviceMesh(world.device.type, list(range(world.world_size))))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    muon = torch.optim.Muon(matrices, lr=0.02)
    adamw = torch.optim.AdamW(others, lr=0.02)
    attachment = fsdp2.attach(model, [muon, adamw])
    for step in range(2):
        model(batch_of(world, step)).square().mean().backward()
        for optimizer in (muon, adamw):
            with Collectives() as calls:
                optimizer.step()
            assert len([call for call in calls.named("allreduce") if call[2] == torch.float32]) == 1
            optimizer.zero_grad()
        check_gathered(model)
    attachment.check()
    assert all(not found.item() for found in attachment.found_inf.values())
