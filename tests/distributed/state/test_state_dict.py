"""State dicts of ZeroFP4Optimizer: torch's form of them, by whose names they are loaded."""

import copy
import io
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases.optim import Plain, assert_all_equal
from helpers import assert_bytes_equal
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import zerofp4
from distributed.cases import shared_folder
from distributed.run import on_ranks
from distributed.state.cases import (
    CASES,
    assert_goes_on,
    assert_same_model,
    build,
    contents,
    make_model,
    run,
    saved,
    trained,
    whole,
)
from zerofp4.optim import ZeroFP4Optimizer


@on_ranks(1, 2, 3)
def test_state_dict_has_torchs_form_on_every_rank(world):
    """Entries are those of a torch optimizer over whole FP32 masters."""
    model, optimizer = trained(world, 0)
    parameters = [p for p in model.parameters() if p.requires_grad]
    plain = Plain(parameters, torch.optim.AdamW, **CASES["adamw"][1])
    masters = [master for master in optimizer.gathered_masters() if master is not None]
    for own, master in zip(plain.masters, masters, strict=True):
        own.copy_(master)
    optimizer.register_step_pre_hook(lambda *_: plain.step())
    run(model, optimizer, range(2))
    state_dict, names = optimizer.state_dict(), [name for name, _ in model.named_parameters()]
    (group,) = state_dict["param_groups"]
    assert list(map(str, group["params"])) == names and list(group["params"]) == list(range(len(names)))
    own = [i for i, p in enumerate(model.parameters()) if p.requires_grad]
    assert list(state_dict["state"]) == own
    for i, master in zip(own, plain.masters, strict=True):
        entries, expected = state_dict["state"][i], plain.optimizer.state[master]
        assert_bytes_equal(whole(entries["master"]), master, f"master {i}")
        for name in ("step", "exp_avg", "exp_avg_sq"):
            if name not in expected or not master.numel():
                assert not whole(entries[name]).any(), (i, name)
            else:
                assert entries[name].shape == expected[name].shape
                assert_bytes_equal(whole(entries[name]), expected[name], f"{name} {i}")
    assert dict(optimizer.state) and list(optimizer.state[model.gain]) == list(state_dict["state"][own[-2]])


FULL, OFFLOAD = {"full_state_dict": True}, {"cpu_offload": True}


@on_ranks(1, 2, nightly=[3])
@pytest.mark.parametrize(
    ("get", "put"),
    [
        ({}, {}),
        (FULL, FULL),
        (OFFLOAD, OFFLOAD),
        ({"flatten_optimizer_state_dict": True}, {"flatten_optimizer_state_dict": True}),
    ],
)
def test_get_and_set_state_dict(world, get, put):
    """None of the functions takes a step, though torch tries one with an optimizer that has no state."""
    get, put = StateDictOptions(**get), StateDictOptions(**put)
    other, loaded = trained(world, 0, seed=1, lr=0.7)
    masters = [m for m in loaded.gathered_masters() if m is not None]
    get_optimizer_state_dict(other, loaded, options=get)
    assert_all_equal([m for m in loaded.gathered_masters() if m is not None], masters, "master")
    assert loaded.state_dict()["steps"] == 0 and not loaded.inner.state
    model, optimizer = trained(world)
    model_state, state = get_state_dict(model, optimizer, options=get)
    set_state_dict(
        other, loaded, model_state_dict=model_state, optim_state_dict=copy.deepcopy(state), options=put
    )
    assert_goes_on((model, optimizer), (other, loaded))


@on_ranks(2)
def test_a_full_state_dict_gathers_nothing(world):
    """torch gathers DTensors alone. consolidate_state_dict() is for that, and a save says so."""
    options = StateDictOptions(**FULL, **OFFLOAD)
    state = get_optimizer_state_dict(*trained(world), options=options)
    assert bool(state) == (world.rank == 0)
    if state:
        with pytest.warns(UserWarning, match=r"call consolidate_state_dict\(\)"):
            torch.save(state, io.BytesIO())


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
    path = saved(world, optimizer)
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
def test_without_names_a_checkpoint_has_those_of_the_converted_model(world):
    model, path = make_model(world), shared_folder(world)
    optimizer = ZeroFP4Optimizer(model.parameters(), lr=0.1)
    dcp.save({"optimizer": optimizer}, checkpoint_id=path)
    other = make_model(world, seed=1)
    loaded = ZeroFP4Optimizer(list(other.named_parameters())[::-1], lr=0.1)
    dcp.load({"optimizer": loaded}, checkpoint_id=path)
    assert_same_model(model, other)
    path = shared_folder(world)
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=path)
    third = make_model(world, seed=2)
    loaded = ZeroFP4Optimizer(third.parameters(), lr=0.1)
    state = get_optimizer_state_dict(third, loaded)
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(third, loaded, state)
    assert_same_model(model, third)


@on_ranks(1, 2)
def test_a_checkpoint_of_two_models_without_names_has_positions(world):
    """Each has names, of which two are the same: an error would stop what works without checkpoints."""

    def build_over(*seeds):
        models = nn.ModuleList(make_model(world, seed) for seed in seeds)
        with pytest.warns(UserWarning) if world.rank == 0 else nullcontext() as caught:
            optimizer = ZeroFP4Optimizer(models.parameters(), lr=0.1)
        return models, optimizer, caught

    models, optimizer, caught = build_over(0, 1)
    if caught:
        ((message, file),) = [(str(warning.message), warning.filename) for warning in caught]
        assert "by position" in message and "Pass model.named_parameters()" in message and file == __file__
    path = shared_folder(world)
    dcp.save({"optimizer": optimizer}, checkpoint_id=path)
    assert "optimizer.state.0.master" in dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    others, loaded, _ = build_over(2, 3)
    dcp.load({"optimizer": loaded}, checkpoint_id=path)
    assert_same_model(models, others)


@on_ranks(2)
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(5), r"rank 1: state_dict does not fit: cube\.master has shape \(5,\)"),
        ("0.5", "rank 1: state_dict cannot be loaded: AttributeError"),
    ],
)
def test_a_rank_with_a_bad_entry_gathers_the_others(world, bad, message):
    """Ranks gather what another optimizer has entry by entry, and nothing of plain tensors."""
    model, optimizer = trained(world)
    other, loaded = trained(world, 1, seed=1)
    state, before = optimizer.state_dict(), contents(other, loaded)
    master = state["state"][0]["master"].full_tensor()
    state["state"][0]["master"] = bad if world.rank else master
    with pytest.raises(ValueError, match=message):
        loaded.load_state_dict(state)
    assert contents(other, loaded) == before
    loaded.load_state_dict(optimizer.state_dict())
    assert_goes_on((model, optimizer), (other, loaded))


@on_ranks(2)
def test_a_copy_of_a_state_outlives_its_process_group(world):
    """As it is kept by who begins anew after a rank was lost."""
    group = dist.new_group(range(2))
    model, optimizer = trained(world, group=group)
    state, masters = copy.deepcopy(optimizer.state_dict()), optimizer.gathered_masters()
    del model, optimizer
    dist.destroy_process_group(group)
    del group
    _, loaded = trained(world, 0, seed=1)
    loaded.load_state_dict(state)
    pairs = zip(loaded.gathered_masters(), masters, strict=True)
    for master, expected in ((one, other) for one, other in pairs if one is not None):
        assert_bytes_equal(master, expected, "master")
