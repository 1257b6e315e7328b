"""Checkpoints of ZeroFP4Optimizer through torch.distributed.checkpoint, from any world to any other."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import assert_bytes_equal
from optim_cases import OPTIMIZERS, assert_all_equal, make_gradients, plain_masters, set_gradients
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zerofp4
from distributed.checks_optim import Injected, model_bytes
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW

CASES = {name: OPTIMIZERS[name] for name in ("adamw", "amsgrad", "sgd", "nadam", "adagrad")}
CASES |= {
    "fused": (FusedAdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "plain sgd": (torch.optim.SGD, {"lr": 0.1}),
}


class Model(nn.Module):
    """Of every kind of parameter: cut inside rows, without an element, without dimensions, unused, frozen."""

    def __init__(self, filter_fn=None):
        super().__init__()
        self.first = nn.Linear(48, 34, dtype=torch.bfloat16)
        self.second = nn.Linear(66, 130, bias=False, dtype=torch.float16)
        self.cube = nn.Parameter(torch.randn(3, 5, 7))
        self.gain = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.zeros(0, 4, dtype=torch.bfloat16))
        self.unused = nn.Parameter(torch.randn(40, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        zerofp4.convert_model(self, filter_fn)


def make_model(world, seed=0, filter_fn=None) -> Model:
    torch.manual_seed(seed)
    return Model(filter_fn).to(world.device)


def build(model, case="adamw", group=None, groups=None, **options):
    optimizer_class, defaults = CASES[case]
    params = groups or model.named_parameters()
    return Injected(params, optimizer_class, process_group=group, **{**defaults, **options})


def run(model, optimizer, steps) -> None:
    """Gradients that depend on the step alone."""
    parameters = list(model.parameters())
    for step in steps:
        gradients = make_gradients(parameters, step)
        for p, gradient in zip(parameters, gradients, strict=True):
            used = p.requires_grad and p is not model.unused
            p.grad = gradient.to(p.dtype) if used else None
        optimizer.step()
        optimizer.zero_grad()


def folder(world) -> str:
    """The same on every rank."""
    found = [tempfile.mkdtemp(prefix="zerofp4-dcp-") if world.rank == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    return found[0]


def assert_same_model(one, other) -> None:
    """All that is trained."""
    sides = [model_bytes([p for p in model.parameters() if p.requires_grad]) for model in (one, other)]
    assert_all_equal(*sides, "buffer")


@on_ranks(4, time_limit=240.0)
@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_in_a_world_of_any_size(world, case):
    """Saved on 4 ranks, loaded on 1, 2, 3 and 4; saved on 3, loaded on 2: the same bytes as without a
    stop.
    """
    for saved, loaded in [(4, 1), (4, 2), (4, 3), (4, 4), (3, 2)]:
        path = folder(world)
        before, after = (dist.new_group(range(size)) for size in (saved, loaded))
        through = make_model(world)
        optimizer = build(through, case)
        run(through, optimizer, range(5))
        if world.rank < saved:
            model = make_model(world)
            stopped = build(model, case, before)
            run(model, stopped, range(3))
            dcp.save({"model": model, "optimizer": stopped}, checkpoint_id=path, process_group=before)
        dist.barrier()
        if world.rank < loaded:
            model = make_model(world, seed=7)
            resumed = build(model, case, after, lr=0.5)
            dcp.load({"model": model, "optimizer": resumed}, checkpoint_id=path, process_group=after)
            run(model, resumed, range(3, 5))
            assert_all_equal(
                model_bytes(list(model.parameters())), model_bytes(list(through.parameters())), "buffer"
            )
            assert resumed.state_dict()["steps"] == 5
        dist.barrier()
        masters = [m for m in optimizer.gathered_masters() if m is not None]
        if world.rank < loaded:
            mine = [m for m in resumed.gathered_masters() if m is not None]
            assert_all_equal(mine, masters, "master")
        dist.barrier()


@on_ranks(2)
def test_fifty_steps_after_a_restart(world):
    path = folder(world)
    through, stopped, resumed = (make_model(world, seed) for seed in (0, 0, 1))
    straight, before, after = (build(model, "fused") for model in (through, stopped, resumed))
    run(through, straight, range(60))
    run(stopped, before, range(10))
    dcp.save({"model": stopped, "optimizer": before}, checkpoint_id=path)
    dcp.load({"model": resumed, "optimizer": after}, checkpoint_id=path)
    run(resumed, after, range(10, 60))
    assert_same_model(through, resumed)


def plain_run(world, steps, case="adamw"):
    """Whole FP32 masters of the model and a torch optimizer over them."""
    model = make_model(world)
    parameters = [p for p in model.parameters() if p.requires_grad]
    masters = plain_masters(parameters)
    for p, master in zip(parameters, masters, strict=True):
        if isinstance(p, zerofp4.NVFP4Tensor):
            master.copy_(p.get_high_precision_init_val())
    optimizer = CASES[case][0](masters, **CASES[case][1])
    for step in range(steps):
        gradients = make_gradients(list(model.parameters()), step)
        kept = [g for p, g in zip(model.parameters(), gradients, strict=True) if p.requires_grad]
        for p, master, gradient in zip(parameters, masters, kept, strict=True):
            master.grad = None if p is model.unused else gradient.to(p.dtype).float()
        optimizer.step()
    return model, parameters, masters, optimizer


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@on_ranks(1, 2, 3)
def test_state_dict_has_torchs_form_on_every_rank(world):
    _, parameters, masters, plain = plain_run(world, 2)
    model = make_model(world)
    optimizer = build(model)
    run(model, optimizer, range(2))
    state_dict = optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    assert [[str(i) for i in g["params"]] for g in state_dict["param_groups"]] == [names]
    assert [list(g["params"]) for g in state_dict["param_groups"]] == [list(range(len(names)))]
    trained = [i for i, p in enumerate(model.parameters()) if p.requires_grad]
    assert list(state_dict["state"]) == trained
    for i, p, master in zip(trained, parameters, masters, strict=True):
        entries = state_dict["state"][i]
        assert_bytes_equal(whole(entries["master"]), master, f"master {i}")
        for name in ("step", "exp_avg", "exp_avg_sq"):
            expected = plain.state[master].get(name)
            if expected is None or not p.numel():
                assert not whole(entries[name]).any(), (i, name)
            else:
                assert entries[name].shape == expected.shape and entries[name].dtype == expected.dtype
                assert_bytes_equal(whole(entries[name]), expected, f"{name} {i}")
    assert dict(optimizer.state) and list(optimizer.state[model.gain]) == list(
        state_dict["state"][trained[-2]]
    )


@on_ranks(1, 2)
def test_a_piece_moves_without_the_others(world):
    """As torch's full state dicts move it, whatever torch does with DTensors."""
    model = make_model(world)
    for entries in build(model).state_dict()["state"].values():
        master = entries["master"]
        for moved in (master.to("meta"), master.to(device="meta"), master.to("meta", torch.float64)):
            assert type(moved) is type(master) and moved.shard == master.shard
            assert moved.device.type == "meta" and moved.shape == master.shape
        assert master.to(world.device).values.data_ptr() == master.values.data_ptr()


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(
    "options",
    [{}, {"full_state_dict": True}, {"full_state_dict": True, "cpu_offload": True}, {"cpu_offload": True}],
)
def test_get_and_set_state_dict(world, options):
    """None of the functions takes a step, though torch tries one with an optimizer that has no state."""
    options = StateDictOptions(**options)
    model, other = make_model(world), make_model(world, seed=1)
    optimizer, loaded = build(model), build(other)
    masters = [m for m in loaded.gathered_masters() if m is not None]
    get_optimizer_state_dict(other, loaded, options=options)
    assert_all_equal([m for m in loaded.gathered_masters() if m is not None], masters, "master")
    assert loaded.state_dict()["steps"] == 0 and not loaded.inner.state
    run(model, optimizer, range(2))
    model_state, state = get_state_dict(model, optimizer, options=options)
    if options.full_state_dict and options.cpu_offload:
        if world.rank == 0 and world.world_size > 1:
            assert all(type(v) is torch.Tensor for v in state["state"]["cube"].values())
        state, model_state = (broadcast(x) for x in (state, model_state))
    set_state_dict(
        other, loaded, model_state_dict=model_state, optim_state_dict=copy.deepcopy(state), options=options
    )
    assert_same_model(model, other)
    run(model, optimizer, range(2, 4))
    run(other, loaded, range(2, 4))
    assert_same_model(model, other)


def broadcast(value):
    found = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    return found[0]


@on_ranks(2)
def test_rank_0_has_the_full_state_dict(world):
    model, other = make_model(world), make_model(world, seed=1)
    optimizer, loaded = build(model), build(other)
    run(model, optimizer, range(2))
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(model, optimizer, options=full)
    assert bool(state) == (world.rank == 0)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(other, loaded, state, options=options)
    run(model, optimizer, range(2, 4))
    run(other, loaded, range(2, 4))
    assert_same_model(model, other)


@on_ranks(2)
def test_flattened_by_name(world):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, other = make_model(world), make_model(world, seed=1)
    optimizer, loaded = build(model), build(other, lr=0.7)
    run(model, optimizer, range(2))
    path = folder(world)
    dcp.save(get_optimizer_state_dict(model, optimizer, options=options), checkpoint_id=path)
    state = get_optimizer_state_dict(other, loaded, options=options)
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(other, loaded, state, options=options)
    assert loaded.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    run(model, optimizer, range(2, 4))
    run(other, loaded, range(2, 4))
    assert_same_model(model, other)


@on_ranks(1, 2, 3)
def test_async_save_holds_what_was_there_when_it_was_called(world):
    model, other = make_model(world), make_model(world, seed=1)
    optimizer, loaded = build(model), build(other)
    run(model, optimizer, range(2))
    expected = [buffer.clone() for buffer in model_bytes(list(model.parameters()))]
    path = folder(world)
    own = dist.new_group() if dist.is_initialized() else None  # beside the collectives of the steps
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
    path = folder(world)
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


@on_ranks(1, 2)
def test_other_groups_and_another_filter_load_by_name(world):
    model = make_model(world)
    named = dict(model.named_parameters())
    decays = {n: p for n, p in named.items() if p.dim() > 1}
    groups = [
        {"params": list(decays.items()), "weight_decay": 0.3, "lr": 0.02},
        {"params": [(n, p) for n, p in named.items() if n not in decays], "weight_decay": 0.0, "lr": 0.02},
    ]
    optimizer = build(model, groups=groups)
    run(model, optimizer, range(2))
    path = folder(world)
    dcp.save({"optimizer": optimizer}, checkpoint_id=path)
    other = make_model(world, 1, filter_fn=lambda module, name: name == "second")
    assert not isinstance(other.first.weight, zerofp4.NVFP4Tensor)
    backwards = list(other.named_parameters())[::-1]
    loaded = build(other, groups=[{"params": backwards, "weight_decay": 0.7}], lr=0.9)
    dcp.load({"optimizer": loaded}, checkpoint_id=path)
    assert loaded.param_groups[0]["lr"] == 0.02 and loaded.param_groups[0]["weight_decay"] == 0.7
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    masters = dict(zip(names, optimizer.gathered_masters(), strict=True))
    for (name, p), master in zip(backwards, loaded.gathered_masters(), strict=True):
        if p.requires_grad:
            assert_bytes_equal(master, masters[name], name)


@on_ranks(1, 2)
@pytest.mark.parametrize(("one", "other"), [("adamw", "fused"), ("fused", "adamw")])
def test_adamw_and_fused_adamw_load_each_other(world, one, other):
    model, target = make_model(world), make_model(world, seed=1)
    optimizer, loaded = build(model, one), build(target, other)
    run(model, optimizer, range(2))
    path = folder(world)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    dcp.load({"model": target, "optimizer": loaded}, checkpoint_id=path)
    for name in ("master", "step", "exp_avg", "exp_avg_sq"):
        mine, theirs = loaded.state[target.cube][name], optimizer.state[model.cube][name]
        assert_bytes_equal(whole(mine), whole(theirs), name)
    run(target, loaded, range(2, 4))


class PlainModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(48, 34, dtype=torch.bfloat16)
        self.norm = nn.Parameter(torch.randn(34))


@on_ranks(1, 2, 3)
def test_a_plain_checkpoint_of_torchs_adamw(world):
    """The model before it is converted, then the optimizer: masters begin with the values, moments go on."""
    torch.manual_seed(0)
    plain = PlainModel().to(world.device)
    adamw = torch.optim.AdamW(plain.named_parameters(), lr=0.03)
    for step in range(3):
        set_gradients(list(plain.parameters()), make_gradients(list(plain.parameters()), step))
        adamw.step()
    path = folder(world)
    model_state, optimizer_state = get_state_dict(plain, adamw)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)

    model = PlainModel().to(world.device)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    zerofp4.convert_model(model)
    optimizer = Injected(model.named_parameters(), torch.optim.AdamW, lr=0.5)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    with pytest.raises(dcp.CheckpointException, match=r"Missing key .*: optimizer.state.norm.master"):
        dcp.load(copy.copy(state), checkpoint_id=path)
    dcp.load(state, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.03
    for (name, p), q, master in zip(
        model.named_parameters(), plain.parameters(), optimizer.gathered_masters(), strict=True
    ):
        assert_bytes_equal(master, q.detach().float(), name)
        assert_bytes_equal(whole(optimizer.state[p]["exp_avg"]), adamw.state[q]["exp_avg"].float(), name)
        assert whole(optimizer.state[p]["step"]) == 3

    other = PlainModel().to(world.device)
    other.load_state_dict(plain.state_dict())
    zerofp4.convert_model(other)
    direct = Injected(other.named_parameters(), torch.optim.AdamW, lr=0.5)
    direct.load_state_dict(copy.deepcopy(adamw.state_dict()))
    for one, net in ((optimizer, model), (direct, other)):
        set_gradients(list(net.parameters()), make_gradients(list(net.parameters()), 3))
        one.step()
    assert_same_model(model, other)


@on_ranks(2)
def test_a_torch_optimizer_loads_ours(world):
    model = make_model(world)
    optimizer = build(model)
    run(model, optimizer, range(2))
    path = folder(world)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)
    torch.manual_seed(3)
    plain = Model(lambda *_: False)
    adamw = torch.optim.AdamW(plain.named_parameters(), lr=0.5)
    state = {"optimizer": get_optimizer_state_dict(plain, adamw)}
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(plain, adamw, state["optimizer"])
    for name, p in plain.named_parameters():
        if p.requires_grad and p is not plain.unused:
            mine = whole(optimizer.state[model.get_parameter(name)]["exp_avg"])
            assert_bytes_equal(adamw.state[p]["exp_avg"], mine.to(p.dtype), name)
    assert adamw.param_groups[0]["lr"] == 0.01


@on_ranks(1, 2)
def test_without_names_a_checkpoint_is_refused(world):
    model = make_model(world)
    optimizer = Injected(model.parameters(), lr=0.1)
    with pytest.raises(dcp.CheckpointException, match=r"build the optimizer with model.named_parameters\(\)"):
        dcp.save({"optimizer": optimizer}, checkpoint_id=folder(world))
    path = folder(world)
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=path)
    other = make_model(world, seed=1)
    loaded = Injected(other.parameters(), lr=0.1)
    state = get_optimizer_state_dict(other, loaded)
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(other, loaded, state)
    assert_same_model(model, other)


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
    path = folder(world)
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
    path = folder(world)
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


@on_ranks(2, 3)
def test_model_state_is_full_where_it_is_asked_for(world):
    model = make_model(world)
    build(model)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert state["cube"].shape == (3, 5, 7)


@on_ranks(1, 2)
@pytest.mark.parametrize("damage", ["cut", "gone", "no metadata", "foreign"])
def test_a_file_that_cannot_be_read_changes_nothing_of_the_optimizer(world, damage):
    model, other = make_model(world), make_model(world, seed=1)
    optimizer, loaded = build(model), build(other)
    run(model, optimizer, range(2))
    run(other, loaded, range(5, 6))
    path = Path(folder(world))
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
    path = folder(world)
    dcp.save({"weight": distribute_tensor(values, mesh, [Shard(0)])}, checkpoint_id=path)
    layer = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16, device=world.device)
    zerofp4.convert_model(layer, lambda *_: True)
    with pytest.raises(dcp.CheckpointException, match="load the model before convert_model, or call"):
        dcp.load(layer.state_dict(), checkpoint_id=path)
    zerofp4.plain_state_dict(layer)
    dcp.load({"weight": (state := layer.state_dict())["weight"]}, checkpoint_id=path)
    layer.load_state_dict(state)
    assert_bytes_equal(layer.weight.get_high_precision_init_val(), values.cpu(), "weight")
