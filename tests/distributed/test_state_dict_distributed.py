"""State dicts of ZeroFP4Optimizer: torch's form of them, by whose names they are loaded."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import assert_bytes_equal
from optim_cases import assert_all_equal, make_gradients, plain_masters, set_gradients
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import zerofp4
from distributed.cases import shared_folder
from distributed.checkpoint_cases import (
    CASES,
    Model,
    assert_same_model,
    build,
    convert_loaded,
    load_moments,
    make_model,
    run,
    save_plain,
    whole,
)
from distributed.checks_optim import Injected
from distributed.run import on_ranks


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
        staged = master.new_empty(master.size(), device="cpu")
        assert type(staged) is type(master) and staged.shard == master.shard


@on_ranks(1, 2)
def test_operators_on_a_piece_are_not_those_of_dtensor(world):
    for entries in build(make_model(world)).state_dict()["state"].values():
        master = entries["master"]
        if master.is_whole:
            assert_bytes_equal(master + 1, master.values.view(master.shape) + 1, "master + 1")
        else:
            with pytest.raises(RuntimeError, match=r"this rank holds \d+ elements: full_tensor\(\)"):
                master + 1


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


@on_ranks(2, 3)
def test_model_state_is_full_where_it_is_asked_for(world):
    model = make_model(world)
    build(model)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert state["cube"].shape == (3, 5, 7)


@on_ranks(2)
def test_flattened_by_name(world):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, other = make_model(world), make_model(world, seed=1)
    optimizer, loaded = build(model), build(other, lr=0.7)
    run(model, optimizer, range(2))
    path = shared_folder(world)
    dcp.save(get_optimizer_state_dict(model, optimizer, options=options), checkpoint_id=path)
    state = get_optimizer_state_dict(other, loaded, options=options)
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(other, loaded, state, options=options)
    assert loaded.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    run(model, optimizer, range(2, 4))
    run(other, loaded, range(2, 4))
    assert_same_model(model, other)


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
    path = shared_folder(world)
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
    path = shared_folder(world)
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
    path = shared_folder(world)
    save_plain(plain, adamw, path)
    model = PlainModel().to(world.device)
    convert_loaded(model, path)
    optimizer = Injected(model.named_parameters(), torch.optim.AdamW, lr=0.5)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    with pytest.raises(dcp.CheckpointException, match=r"Missing key .*: optimizer.state.norm.master"):
        dcp.load(state, checkpoint_id=path)
    load_moments(model, optimizer, path)
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
    path = shared_folder(world)
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
        dcp.save({"optimizer": optimizer}, checkpoint_id=shared_folder(world))
    path = shared_folder(world)
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=path)
    other = make_model(world, seed=1)
    loaded = Injected(other.parameters(), lr=0.1)
    state = get_optimizer_state_dict(other, loaded)
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(other, loaded, state)
    assert_same_model(model, other)


@on_ranks(2)
def test_what_a_piece_is_nobody_asks_torch(world):
    """Of a DTensor shape, dtype and device are functions: nine calls for each piece, 7,800 in a load of 224
    weights.
    """
    folder, model = shared_folder(world), make_model(world)
    optimizer = build(model, "fused")
    run(model, optimizer, range(1))
    dcp.save({"optimizer": optimizer}, checkpoint_id=folder)
    piece = optimizer.state_dict()["state"][0]["master"]
    kind, asked = type(piece), []
    torch_function = kind.__torch_function__

    def noted(cls, function, *arguments):
        asked.append(function)
        return torch_function(function, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__torch_function__", classmethod(noted))
        dcp.load({"optimizer": optimizer}, checkpoint_id=folder)
        assert not asked
        assert piece.layout == torch.strided and len(asked) == 1  # it would have been noted
