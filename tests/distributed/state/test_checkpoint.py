"""Checkpoints of ZeroFP4Optimizer through torch.distributed.checkpoint, from any world to any other."""

from __future__ import annotations

import copy
import functools
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases.optim import assert_all_equal, through_a_file
from early import waits_for
from helpers import assert_bytes_equal
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import zerofp4
from distributed.cases import raised_everywhere, shared_folder
from distributed.optim.cases import model_bytes, whole_masters
from distributed.processes import device_for
from distributed.run import on_ranks, run_ranks
from distributed.state.cases import CASES, assert_same_model, contents, run, saved, trained, whole
from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer

LONG = ("adamw", "fused", "compact", "sgd", "muon")
"""Cases that are loaded in worlds of every size and go on for 4 steps; the others in two, for 2 steps."""


@on_ranks(4, time_limit=240.0)
@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_in_a_world_of_any_size(world, case):
    """Saved on 4 ranks, loaded on 1, 2, 3 and 4; saved on 3, loaded on 2 and 1: the same bytes as without a
    stop.
    """
    steps = range(3, 7 if case in LONG else 5)
    worlds = [(4, 1), (4, 2), (4, 3), (4, 4), (3, 2), (3, 1)] if case in LONG else [(4, 3), (3, 1)]
    through, straight = trained(world, 3, case)
    run(through, straight, steps)
    expected = whole_masters(list(through.parameters()), straight)
    groups = {size: dist.new_group(range(size)) for size in (1, 2, 3, 4)}
    paths = {}
    for size in (3, 4):
        paths[size] = shared_folder(world)
        if world.rank < size:
            model, stopped = trained(world, 3, case, group=groups[size])
            state = {"model": model, "optimizer": stopped}
            dcp.save(state, checkpoint_id=paths[size], process_group=groups[size])
    for size, loaded in worlds:
        dist.barrier()
        if world.rank < loaded:
            model, resumed = trained(world, 0, case, seed=7, group=groups[loaded], lr=0.5)
            state = {"model": model, "optimizer": resumed}
            dcp.load(state, checkpoint_id=paths[size], process_group=groups[loaded])
            run(model, resumed, steps)
            sides = [model_bytes(list(one.parameters())) for one in (model, through)]
            assert_all_equal(*sides, f"{size} to {loaded} ranks: buffer")
            assert resumed.state_dict()["steps"] == steps.stop
            masters = whole_masters(list(model.parameters()), resumed)
            assert_all_equal(masters, expected, f"{size} to {loaded} ranks: master")
    dist.barrier()


@on_ranks(2, nightly=[1, 3])
def test_async_save_holds_what_was_there_when_it_was_called(world):
    """Everything in it has the id of that moment."""
    model, optimizer = trained(world)
    other, loaded = trained(world, 0, seed=1)
    path, save_id = shared_folder(world), optimizer.state_dict()["param_groups"].save_id
    # Beside the collectives of the steps; torch wants it to have a backend for the CPU.
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else None
    own = dist.new_group(backend=backend) if dist.is_initialized() else None
    future = dcp.async_save({"model": model, "optimizer": optimizer}, checkpoint_id=path, process_group=own)
    run(model, optimizer, range(2, 4))
    future.result()
    state = loaded.state_dict()
    dcp.load({"model": other, "optimizer": state}, checkpoint_id=path)
    ids = {i for entries in state["state"].values() for piece in entries.values() for i in piece.saves}
    assert ids | {state["param_groups"].save_id} == {save_id} and state["steps"] == 2
    loaded.load_state_dict(state)
    assert_same_model(other, trained(world)[0])
    run(other, loaded, range(2, 4))
    assert_same_model(model, other)


@on_ranks(2)
def test_a_moment_that_a_file_lacks(world):
    """A file without a moment where a planner lets entries be missing."""
    _, optimizer = trained(world)
    other, loaded = trained(world, 1, seed=1)
    before, state = contents(other, loaded), optimizer.state_dict()
    for entries in state["state"].values():
        del entries["exp_avg"]
    path, planner = saved(world, state), dcp.DefaultLoadPlanner(allow_partial_load=True)
    with pytest.raises(ValueError, match=r"does not fit: cube\.exp_avg is missing"):
        dcp.load({"optimizer": loaded}, checkpoint_id=path, planner=planner)
    assert contents(other, loaded) == before
    run(other, loaded, range(6, 7))


@on_ranks(2)
def test_a_weight_in_pieces_is_not_read_into_copies_of_a_quantized_one(world):
    """torch would read into dequantized parts of it, and lose them."""
    mesh = init_device_mesh(world.device.type, (2,))
    values = torch.randn(48, 32, device=world.device).bfloat16()
    path = shared_folder(world)
    dcp.save({"weight": distribute_tensor(values, mesh, [Shard(0)])}, checkpoint_id=path)
    layer = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16, device=world.device)
    zerofp4.convert_model(layer, lambda *_: True, columnwise=True)
    with pytest.raises(dcp.CheckpointException, match="load the model before convert_model, or call"):
        dcp.load(layer.state_dict(), checkpoint_id=path)
    zerofp4.register_plain_state_dict(layer)
    dcp.load({"weight": (state := layer.state_dict())["weight"]}, checkpoint_id=path)
    layer.load_state_dict(state)
    assert_bytes_equal(layer.weight.get_high_precision_init_val(), values.cpu(), "weight")


def train(world, model, optimizer, steps) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(8, 48).to(world.device, dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(1, 2)
@pytest.mark.parametrize(("kind", "dtype"), [("plain", torch.bfloat16), ("fsdp2", torch.float32)])
def test_a_checkpoint_of_torchs_adamw_and_back(world, kind, dtype):
    """The model before it is converted; moments, steps and options go on; and so they do in a plain run."""

    def make():
        torch.manual_seed(0)
        layers = nn.Linear(48, 34), nn.LayerNorm(34), nn.Linear(34, 16, bias=False)
        return nn.Sequential(*layers).to(world.device, dtype)

    plain = make()
    if kind == "fsdp2":
        plain = fully_shard(plain, mesh=init_device_mesh(world.device.type, (world.world_size,)))
    adamw = torch.optim.AdamW(plain.parameters(), lr=0.03)
    train(world, plain, adamw, range(3))
    there, back = shared_folder(world), shared_folder(world)
    model_state, optimizer_state = get_state_dict(plain, adamw)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=there)
    model, fused = make(), zerofp4.optim.FusedAdamW
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=there)
    model.load_state_dict(state["model"])
    zerofp4.convert_model(model, columnwise=True)
    optimizer = zerofp4.optim.ZeroFP4Optimizer(model.named_parameters(), fused, lr=0.5)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    with pytest.warns(UserWarning, match="lr and other options stay as they are here"):
        dcp.load({"optimizer": optimizer}, checkpoint_id=there, planner=planner)
    dcp.load(state, checkpoint_id=there, planner=planner)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.03
    pairs = zip(model.parameters(), plain.parameters(), optimizer.gathered_masters(), strict=True)
    for p, q, master in pairs:
        assert_bytes_equal(master, whole(q.detach()).float(), "master")
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert_bytes_equal(whole(optimizer.state[p][name]), whole(adamw.state[q][name]).float(), name)
    if kind == "plain":  # the same from its state dict
        other = make()
        other.load_state_dict(plain.state_dict())
        zerofp4.convert_model(other, columnwise=True)
        direct = zerofp4.optim.ZeroFP4Optimizer(other.named_parameters(), fused, lr=0.5)
        direct.load_state_dict(copy.deepcopy(adamw.state_dict()))
        for one in ((model, optimizer), (other, direct)):
            train(world, *one, range(3, 5))
        assert_same_model(model, other)
    masters = dict(zerofp4.master_state_dict(model, optimizer))
    dcp.save({"model": masters, "optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=back)
    model_state, optimizer_state = get_state_dict(plain, adamw)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=back)
    set_state_dict(plain, adamw, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for (name, q), p in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert_bytes_equal(whole(q.detach()), masters[name].to(dtype), name)
        moment = whole(optimizer.state[p]["exp_avg"])
        assert_bytes_equal(whole(adamw.state[q]["exp_avg"]), moment.to(dtype), name)


# A folder with chunks of two saves is refused, whoever left it so; every good checkpoint loads


trained_fused = functools.partial(trained, case="fused")


def save(optimizer, path, thread_count=1) -> None:
    writer = dcp.FileSystemWriter(path, thread_count=thread_count)
    dcp.save({"optimizer": optimizer}, storage_writer=writer)


def load(optimizer, path) -> None:
    dcp.load({"optimizer": optimizer}, checkpoint_id=path)


def refused(world, model, optimizer, source: Path | dict, match: str) -> None:
    """On every rank, with one message, and nothing changes. source: a checkpoint or a state dict."""
    before = contents(model, optimizer)
    call = optimizer.load_state_dict if isinstance(source, dict) else functools.partial(load, optimizer)
    assert re.match(match, raised_everywhere(world, ValueError, call, source))
    assert contents(model, optimizer) == before


def of_steps(one: int, other: int) -> str:
    """In either order."""
    first, second = (f"[0-9a-f]+-0+{step}" for step in (one, other))
    return rf".*mixes saves: ({first}, {second}|{second}, {first})\."


@on_ranks(2)
@pytest.mark.parametrize(
    ("again", "written", "thread_count"),
    [
        ("later", "__1_*", 1),
        ("later", "__0_1*", 2),
        ("another run", "__1_*", 1),
        ("resumed", "__1_*", 1),
    ],
)
def test_a_folder_with_files_of_two_saves_is_refused(world, again, written, thread_count):
    """As if one of two ranks had been killed in the second, also where it has written one of its files."""
    old, new = shared_folder(world), shared_folder(world)
    model, optimizer = trained_fused(world, 2)
    save(optimizer, old, thread_count)
    if again == "another run":
        model, optimizer = trained_fused(world, 2, seed=1)
    elif again == "resumed":
        load(optimizer, old)
    else:
        run(model, optimizer, range(2, 5))
    save(optimizer, new, thread_count)
    dist.barrier()
    if world.rank == 0:
        assert [shutil.copy(file, old) for file in new.glob(f"{written}.distcp")]
    dist.barrier()
    other, loaded = trained_fused(world, 3, seed=2)
    refused(world, other, loaded, old, of_steps(2, 5 if again == "later" else 2))
    load(loaded, new)
    assert_same_model(other, model)


@on_ranks(2)
def test_state_dicts_of_two_saves_are_refused(world):
    """Read by torch.save's own file of each rank, or with the options of another save, which may be all that
    a rank with few elements writes.
    """
    states = []
    for seed in (0, 1):
        states.append(through_a_file(trained_fused(world, 2, seed=seed)[1].state_dict()))
    model = trained_fused(world, 3)
    refused(world, *model, states[world.rank], of_steps(2, 2))
    model[1].load_state_dict(states[1])
    before, path = model[1].state_dict()["param_groups"], shared_folder(world)
    run(*model, range(2, 5))
    save(model[1].state_dict() | {"param_groups": before}, path)
    refused(world, *model, path, of_steps(2, 5))


@on_ranks(2)
def test_what_is_loaded_without_options_leaves_those_that_there_are(world):
    path = shared_folder(world)
    model, optimizer = trained_fused(world, 1)
    save(optimizer, path)
    other, loaded = trained_fused(world, 2, seed=1)
    state = loaded.state_dict()
    dcp.load({"optimizer": {"state": state["state"]}}, checkpoint_id=path)
    loaded.load_state_dict(state)
    assert_same_model(other, model)


# Memory that a save and a load take beside the state itself


MOST = {"save": 0.05, "load": 0.05 + 1 / 3}
"""Of the state of a rank: of AdamW's a third is masters, and new ones wait beside the old ones."""

COUNT, SIZE = 48, 512
UNCACHED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""glibc gives back every block of a tensor, so that resident memory is what is held."""


def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def most_above(world, call):
    """Bytes that the call took at its peak beyond what was held before."""
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - held
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is counted from here on
    held = memory("VmRSS")
    call()
    return memory("VmHWM") - held


def save_and_load(world):
    """After a step that never clipped. What gloo copies to gather weights is small."""
    weight = torch.randn(SIZE, SIZE, device=world.device, dtype=torch.bfloat16)
    named = [(f"layers.{i}", nn.Parameter(zerofp4.quantize(weight, columnwise=True))) for i in range(COUNT)]
    named[-1] = ("norm", nn.Parameter(weight.clone()))
    optimizer = ZeroFP4Optimizer(named, FusedAdamW, lr=1e-3, communication=Communication(bucket_mb=2))
    for _, p in named:
        p.grad = torch.full((SIZE, SIZE), 1e-3, device=world.device, dtype=torch.bfloat16)
    optimizer.step()
    optimizer.zero_grad()
    entries = optimizer.state_dict()["state"].values()
    state = sum(piece.values.nbytes for entry in entries for piece in entry.values())
    folder, inner, shares = shared_folder(world) / "c", optimizer.inner, {}
    del entries

    def resume():
        """As after a restart: there are no moments yet."""
        inner.load_state_dict({**inner.state_dict(), "state": {}})
        dcp.load({"optimizer": optimizer}, checkpoint_id=folder)

    for _ in range(2):  # what torch makes once is made in the first
        shares["save"] = most_above(world, lambda: dcp.save({"optimizer": optimizer}, checkpoint_id=folder))
        shares["load"] = most_above(world, resume)
        if world.rank == 0:
            shutil.rmtree(folder)
    return {part: above / state for part, above in shares.items()}


def two_ranks(_):
    return run_ranks(save_and_load, 2, env=UNCACHED)


@waits_for(two_ranks)
def test_memory_above_the_state(early):
    if device_for(2) == "cpu":
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pytest.skip("this system does not let a process have its peak of memory counted anew")
    found = early(two_ranks)
    for shares in found:
        assert all(share < MOST[part] for part, share in shares.items()), found
