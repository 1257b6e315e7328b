"""Checkpoints of ZeroFP4Optimizer through torch.distributed.checkpoint, from any world to any other."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import assert_bytes_equal
from optim_cases import assert_all_equal
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import zerofp4
from distributed.cases import shared_folder
from distributed.checkpoint_cases import (
    CASES,
    assert_same_model,
    build,
    convert_loaded,
    load_moments,
    make_model,
    run,
    save_plain,
    whole,
)
from distributed.checks_optim import model_bytes
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW

LONG = ("adamw", "fused", "sgd", "muon")
"""Cases of which 50 steps after the load are compared; of the others 2."""


@on_ranks(4, time_limit=240.0)
@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_in_a_world_of_any_size(world, case):
    """Saved on 4 ranks, loaded on 1, 2, 3 and 4; saved on 3, loaded on 2 and 1: the same bytes as without a
    stop.
    """
    steps = range(3, 53 if case in LONG else 5)
    through = make_model(world)
    straight = build(through, case)
    run(through, straight, range(3))
    run(through, straight, steps)
    expected = [m for m in straight.gathered_masters() if m is not None]
    groups = {size: dist.new_group(range(size)) for size in (1, 2, 3, 4)}
    paths = {}
    for saved in (3, 4):
        paths[saved] = shared_folder(world)
        if world.rank < saved:
            model = make_model(world)
            stopped = build(model, case, groups[saved])
            run(model, stopped, range(3))
            state = {"model": model, "optimizer": stopped}
            dcp.save(state, checkpoint_id=paths[saved], process_group=groups[saved])
    for saved, loaded in [(4, 1), (4, 2), (4, 3), (4, 4), (3, 2), (3, 1)]:
        dist.barrier()
        if world.rank < loaded:
            model = make_model(world, seed=7)
            resumed = build(model, case, groups[loaded], lr=0.5)
            state = {"model": model, "optimizer": resumed}
            dcp.load(state, checkpoint_id=paths[saved], process_group=groups[loaded])
            run(model, resumed, steps)
            sides = [model_bytes(list(one.parameters())) for one in (model, through)]
            assert_all_equal(*sides, f"{saved} to {loaded} ranks: buffer")
            assert resumed.state_dict()["steps"] == steps.stop
            masters = [m for m in resumed.gathered_masters() if m is not None]
            assert_all_equal(masters, expected, f"{saved} to {loaded} ranks: master")
    dist.barrier()


@on_ranks(1, 2, 3)
def test_async_save_holds_what_was_there_when_it_was_called(world):
    model, other = make_model(world), make_model(world, seed=1)
    optimizer, loaded = build(model), build(other)
    run(model, optimizer, range(2))
    expected = [buffer.clone() for buffer in model_bytes(list(model.parameters()))]
    path = shared_folder(world)
    # Beside the collectives of the steps; torch wants it to have a backend for the CPU.
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else None
    own = dist.new_group(backend=backend) if dist.is_initialized() else None
    future = dcp.async_save({"model": model, "optimizer": optimizer}, checkpoint_id=path, process_group=own)
    run(model, optimizer, range(2, 4))
    future.result()
    dcp.load({"model": other, "optimizer": loaded}, checkpoint_id=path)
    assert_all_equal(model_bytes(list(other.parameters())), expected, "buffer")
    run(other, loaded, range(2, 4))
    assert_same_model(model, other)


@on_ranks(2)
@pytest.mark.parametrize("keys", [("a model", "optimizer"), ("model", "an optimizer")])
def test_model_and_optimizer_load_in_any_order(world, keys):
    model, other = make_model(world), make_model(world, seed=1)
    optimizer, loaded = build(model), build(other)
    run(model, optimizer, range(2))
    path = shared_folder(world)
    dcp.save(dict(zip(keys, (model, optimizer), strict=True)), checkpoint_id=path)
    dcp.load(dict(zip(keys, (other, loaded), strict=True)), checkpoint_id=path)
    assert_same_model(model, other)
    run(model, optimizer, range(2, 4))
    run(other, loaded, range(2, 4))
    assert_same_model(model, other)


@on_ranks(1, 2)
def test_masters_win_over_a_model_that_is_loaded_after_them_and_not_without(world):
    model, other = make_model(world), make_model(world, seed=1)
    optimizer, loaded = build(model), build(other)
    run(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    third = make_model(world, seed=2)
    for p, q in zip(third.parameters(), model.parameters(), strict=True):
        if p.dtype == torch.float32:  # its own master, so that a model's load writes into that
            p.data.copy_(q)
    loaded.load_state_dict(state)
    other.load_state_dict(third.state_dict())
    run(model, optimizer, range(2, 3))
    run(other, loaded, range(2, 3))
    assert_same_model(model, other)
    other.load_state_dict(third.state_dict())
    with pytest.raises(RuntimeError, match="was written to since the last step"):
        run(other, loaded, range(3, 4))


@on_ranks(2)
@pytest.mark.parametrize("missing", ["exp_avg", "master"])
def test_what_a_partial_load_leaves_out_is_found(world, missing):
    """Where a planner lets entries be missing, one without a moment changes nothing and names it."""
    model, other = make_model(world), make_model(world, seed=1)
    optimizer, loaded = build(model), build(other)
    run(model, optimizer, range(2))
    run(other, loaded, range(5, 6))
    state = optimizer.state_dict()
    for entries in state["state"].values():
        del entries[missing]
    path = shared_folder(world)
    dcp.save({"optimizer": state}, checkpoint_id=path)
    before, lr = copy.deepcopy(loaded.state_dict()), loaded.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 0.125
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    if missing == "master":  # they stay as they are
        dcp.load({"optimizer": loaded}, checkpoint_id=path, planner=planner)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            if p.requires_grad:
                moments = whole(loaded.state[q]["exp_avg"]), whole(optimizer.state[p]["exp_avg"])
                assert_bytes_equal(*moments, "moment")
    else:
        with pytest.raises(ValueError, match=r"missing: cube.exp_avg, gain.exp_avg, "):
            dcp.load({"optimizer": loaded}, checkpoint_id=path, planner=planner)
        assert loaded.param_groups[0]["lr"] == lr
        assert_same_state(loaded.state_dict(), before)


def assert_same_state(one, other) -> None:
    assert one["param_groups"] == other["param_groups"] and one["steps"] == other["steps"]
    for i, entries in other["state"].items():
        for name, value in entries.items():
            assert bytes_of(one["state"][i][name]) == bytes_of(value), (i, name)


def bytes_of(piece) -> bytes:
    return piece.values.cpu().numpy().tobytes()


@on_ranks(2)
@pytest.mark.parametrize(
    ("case", "name", "value", "message"),
    [
        ("fused", "step", math.nan, r"no whole number, 0 or more: \S+\.step \(nan\)"),
        ("fused", "step", math.inf, r"no whole number, 0 or more: \S+\.step \(inf\)"),
        ("adamw", "step", -1, r"no whole number, 0 or more: \S+\.step \(-1\.0\)"),
        ("nadam", "mu_product", math.nan, r"not finite: \S+\.mu_product \(nan\)"),
        ("nadam", "mu_product", math.inf, r"not finite: \S+\.mu_product \(inf\)"),
    ],
)
def test_scalars_that_would_poison_the_masters_are_refused_on_every_rank(world, case, name, value, message):
    """Where one rank alone has them, too."""
    model, other = make_model(world), make_model(world, seed=1)
    optimizer, loaded = build(model, case), build(other, case)
    run(model, optimizer, range(2))
    run(other, loaded, range(5, 6))
    if world.rank == 1:
        for state in optimizer.inner.state.values():
            state[name].fill_(value)
    path = shared_folder(world)
    dcp.save({"optimizer": optimizer}, checkpoint_id=path)
    before = copy.deepcopy(loaded.state_dict())
    weights = [buffer.clone() for buffer in model_bytes(list(other.parameters()))]
    for load in (
        lambda: dcp.load({"optimizer": loaded}, checkpoint_id=path),
        lambda: loaded.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    ):
        with pytest.raises(ValueError, match=message):
            load()
        assert_same_state(loaded.state_dict(), before)
        assert_all_equal(model_bytes(list(other.parameters())), weights, "buffer")
    run(other, loaded, range(6, 7))


@on_ranks(2)
def test_another_model_is_refused_and_changes_nothing(world):
    model, other = make_model(world), make_model(world, seed=1)
    optimizer, loaded = build(model), build(other)
    run(model, optimizer, range(2))
    run(other, loaded, range(5, 6))
    before = copy.deepcopy(loaded.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        group["param_names"] = [f"net.{name}" for name in group["param_names"]]
    with pytest.raises(ValueError, match=r"does not fit: missing: cube, gain, empty, unused, first.weight"):
        loaded.load_state_dict(state)
    path = shared_folder(world)
    state = optimizer.state_dict()
    state["state"][5]["exp_avg"] = torch.zeros(34, 49)
    dcp.save({"optimizer": state}, checkpoint_id=path)
    with pytest.raises(dcp.CheckpointException, match="Size mismatch between saved"):
        dcp.load({"optimizer": loaded}, checkpoint_id=path)
    state = copy.deepcopy(optimizer.state_dict())
    if world.rank == 1:
        state["state"][5]["exp_avg"] = torch.zeros(34, 49)
    with pytest.raises(
        ValueError, match=r"other shapes: first.weight.exp_avg \(\(34, 49\), here \(34, 48\)\)"
    ):
        loaded.load_state_dict(state)
    assert_same_state(loaded.state_dict(), before)
    run(other, loaded, range(6, 7))


@on_ranks(1, 2)
@pytest.mark.parametrize("damage", ["cut", "gone", "no metadata", "foreign"])
def test_a_file_that_cannot_be_read_changes_nothing_of_the_optimizer(world, damage):
    model, other = make_model(world), make_model(world, seed=1)
    optimizer, loaded = build(model), build(other)
    run(model, optimizer, range(2))
    run(other, loaded, range(5, 6))
    path = shared_folder(world)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    if world.rank == 0:
        file = max(path.glob("*.distcp"))
        if damage == "cut":
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        elif damage == "gone":
            file.unlink()
        elif damage == "no metadata":
            (path / ".metadata").unlink()
        else:
            file.write_bytes(b"x" * file.stat().st_size)
    if dist.is_initialized():
        dist.barrier()
    before = copy.deepcopy(loaded.state_dict())
    weights = [buffer.clone() for buffer in model_bytes([p for p in other.parameters() if p.requires_grad])]
    with pytest.raises(dcp.CheckpointException):
        dcp.load({"optimizer": loaded}, checkpoint_id=path)
    assert_same_state(loaded.state_dict(), before)
    assert_all_equal(model_bytes([p for p in other.parameters() if p.requires_grad]), weights, "buffer")
    run(other, loaded, range(6, 7))
    twin = make_model(world, seed=1)
    same = build(twin)
    run(twin, same, range(5, 7))
    assert_same_model(other, twin)


@on_ranks(2)
def test_a_weight_in_pieces_is_not_read_into_copies_of_a_quantized_one(world):
    """torch would read into dequantized parts of it, and lose them."""
    mesh = init_device_mesh(world.device.type, (2,))
    values = torch.randn(48, 32, device=world.device).bfloat16()
    path = shared_folder(world)
    dcp.save({"weight": distribute_tensor(values, mesh, [Shard(0)])}, checkpoint_id=path)
    layer = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16, device=world.device)
    zerofp4.convert_model(layer, lambda *_: True)
    with pytest.raises(dcp.CheckpointException, match="load the model before convert_model, or call"):
        dcp.load(layer.state_dict(), checkpoint_id=path)
    zerofp4.plain_state_dict(layer)
    dcp.load({"weight": (state := layer.state_dict())["weight"]}, checkpoint_id=path)
    layer.load_state_dict(state)
    assert_bytes_equal(layer.weight.get_high_precision_init_val(), values.cpu(), "weight")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(48, 34), nn.LayerNorm(34)
        self.second = nn.Linear(34, 16, bias=False)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


def train(world, model, optimizer, steps) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(8, 48, device=world.device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_a_checkpoint_of_plain_fsdp2_and_back(world):
    """The model before it is converted; moments, steps and options go on; and so they do in FSDP2."""
    torch.manual_seed(0)
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    plain = fully_shard(Net().to(world.device), mesh=mesh)
    adamw = torch.optim.AdamW(plain.parameters(), lr=0.03)
    train(world, plain, adamw, 3)
    there, back = shared_folder(world), shared_folder(world)
    save_plain(plain, adamw, there)
    model = Net().to(world.device)
    convert_loaded(model, there)
    optimizer = zerofp4.optim.ZeroFP4Optimizer(model.named_parameters(), FusedAdamW, lr=0.5)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    with pytest.warns(UserWarning, match="lr and other options stay as they are here"):
        dcp.load({"optimizer": optimizer}, checkpoint_id=there, planner=planner)
    load_moments(model, optimizer, there)
    assert optimizer.param_groups[0]["lr"] == 0.03
    pairs = zip(model.parameters(), plain.parameters(), optimizer.gathered_masters(), strict=True)
    for p, q, master in pairs:
        assert_bytes_equal(master, q.detach().full_tensor(), "master")
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert_bytes_equal(whole(optimizer.state[p][name]), whole(adamw.state[q][name]), name)

    train(world, model, optimizer, 2)
    masters = dict(zerofp4.master_state_dict(model, optimizer))
    dcp.save({"model": masters, "optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=back)
    model_state, optimizer_state = get_state_dict(plain, adamw)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=back)
    set_state_dict(plain, adamw, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for (name, q), p in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert_bytes_equal(q.detach().full_tensor(), masters[name], name)
        assert_bytes_equal(whole(adamw.state[q]["exp_avg"]), whole(optimizer.state[p]["exp_avg"]), name)
