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
from distributed.engine.overlap_cases import make, nothing_changes, step_of
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
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


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


def _move_without_masters(entries, cube):
    for own in entries.values():
        del own["master"]
    cube.data = cube.data.clone()


DAMAGES = {
    r"does not fit: cube\.master has shape \(5,\)": lambda entries, _: entries[0].update(
        master=torch.zeros(5)
    ),
    "cannot be loaded: AttributeError": lambda entries, _: entries[0].update(master="0.5"),
    "no master of .*cube.* has moved since": _move_without_masters,
}
"""By what the rank says."""


@on_ranks(2)
@pytest.mark.parametrize("message", DAMAGES)
def test_a_state_that_one_rank_cannot_load_changes_no_rank(world, message):
    """Ranks gather what another optimizer has entry by entry, and nothing of plain tensors."""
    model, optimizer = trained(world)
    other, loaded = trained(world, 1, seed=1)
    before, inner = contents(other, loaded), loaded.inner
    kept = inner.state, inner.param_groups
    # Of its own state: the other ranks would wait to gather what one rank lacks.
    state = (loaded if DAMAGES[message] is _move_without_masters else optimizer).state_dict()
    entries = state["state"]
    entries[0]["master"] = entries[0]["master"].full_tensor()
    if world.rank == 1:
        DAMAGES[message](entries, other.cube)
    with pytest.raises(ValueError, match=f"rank 1: .*{message}"):
        loaded.load_state_dict(state)
    assert contents(other, loaded) == before
    assert inner.state is kept[0] and inner.param_groups is kept[1]
    loaded.refresh()
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


# consolidate_state_dict(): the whole state of an optimizer on one rank, for what saves it there alone


@on_ranks(2)
@pytest.mark.parametrize("name", ["AdamW", "FusedAdamW"])
def test_every_entry_is_whole_on_the_rank_that_is_named(world, name):
    """On the CPU; until the next step, and not where the optimizer is broken on one rank before a load."""
    net, optimizer = make(world, name)
    step_of(world, [(net, optimizer)], 0)
    saved = copy.deepcopy(optimizer.state_dict())
    if world.rank == 1:
        optimizer._shards.broken = RuntimeError("on this rank alone")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="on this rank alone"):
            optimizer.consolidate_state_dict()
    optimizer.load_state_dict(saved)
    optimizer.consolidate_state_dict(1)
    state_dict = optimizer.state_dict()
    pieces = optimizer.state_dict()["state"]  # only once whole
    assert state_dict["state"].keys() == pieces.keys()
    for number, entries in pieces.items():
        for entry, piece in entries.items():
            whole, found = piece.full_tensor(), state_dict["state"][number][entry]
            assert (type(found) is torch.Tensor) == (world.rank == 1)
            if world.rank == 1:
                assert_bytes_equal(found, whole.cpu(), f"{number}.{entry}")


@on_ranks(2)
def test_state_of_options_that_have_changed_is_there_too(world):
    """Ranks know of it alone that own elements of the parameter."""

    def build():
        named = [(name, nn.Parameter(torch.ones(3, device=world.device))) for name in ("first", "second")]
        return named, ZeroFP4Optimizer(named, torch.optim.SGD, lr=0.1, momentum=0.9)

    named, optimizer = build()
    for momentum in (0.9, 0.0):
        optimizer.param_groups[0]["momentum"] = momentum
        for _, p in named:
            p.grad = torch.ones_like(p)
        optimizer.step()
    _, other = build()
    other.param_groups[0]["momentum"] = 0.0
    other.load_state_dict(optimizer.state_dict())
    assert_all_equal(other.gathered_masters(), optimizer.gathered_masters(), "master")
    for each in (optimizer, other):
        each.consolidate_state_dict()
        for entries in each.state_dict()["state"].values() if world.rank == 0 else ():
            assert_bytes_equal(entries["momentum_buffer"], torch.ones(3), "momentum_buffer")


@on_ranks(1, 2)
@pytest.mark.parametrize("name", ["fused", "sgd", "muon"])
def test_a_copy_in_memory_can_be_loaded_again(world, name):
    """Steps after a load leave it as it was."""
    model, optimizer = trained(world, case=name)
    best = copy.deepcopy(optimizer.state_dict())
    run(model, optimizer, range(2, 4))
    expected = contents(model, optimizer)
    for _ in range(2):
        optimizer.load_state_dict(best)
        run(model, optimizer, range(2, 4))
        assert contents(model, optimizer) == expected


@on_ranks(2)
def test_a_step_drops_it_and_a_part_names_the_way(world):
    net, optimizer = make(world)
    optimizer.consolidate_state_dict()
    step_of(world, [(net, optimizer)], 0)
    state = optimizer.state_dict()["state"]
    assert not any(type(value) is torch.Tensor for entries in state.values() for value in entries.values())
    with pytest.warns(UserWarning, match=r"consolidate_state_dict\(\) of the optimizer on every rank before"):
        torch.save(optimizer.state_dict(), file := io.BytesIO())
    dist.broadcast_object_list(told := [file.getvalue()], 0)
    found = r"rank 1: state_dict does not fit: \S+ has the elements of another rank"
    message = rf"{found}.*: call consolidate_state_dict\(\) of the optimizer"
    with nothing_changes(net, optimizer), pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(torch.load(io.BytesIO(told[0]), weights_only=True))


@on_ranks(2)
def test_what_cannot_be_gathered_on_one_rank(world):
    _, optimizer = make(world)
    for to in (2, -1, "0"):
        with pytest.raises(ValueError, match=rf"to must be a rank from 0 to 1, got {to!r}"):
            optimizer.consolidate_state_dict(to)
    groups = [dist.new_group([rank]) for rank in range(2)]
    own = torch.nn.Parameter(torch.ones(4, 4, device=world.device))
    shared = torch.nn.Parameter(torch.ones(4, device=world.device))
    groups = [
        {"params": [("shared", shared)]},
        {"params": [(f"experts.{world.rank}", own)], "process_group": groups[world.rank]},
    ]
    optimizer = ZeroFP4Optimizer(groups, FusedAdamW, lr=0.1)
    message = r"consolidate_state_dict\(\) needs .* other ranks train other .*torch\.distributed\.checkpoint"
    with pytest.raises(ValueError, match=message):
        optimizer.consolidate_state_dict()
