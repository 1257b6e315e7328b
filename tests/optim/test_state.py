"""Saving and loading the state of ZeroFP4Optimizer, in one process, and the pieces that it consists of."""

import copy
import io
import math
import pickle
import zipfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases.optim import (
    assert_all_equal,
    assert_weights_follow,
    batch,
    built,
    make_net,
    make_parameters,
    take_step,
    through_a_file,
    unchanged,
)
from distributed.optim.matrix_cases import MUON, make_groups
from helpers import assert_bytes_equal
from torch.optim.lr_scheduler import OneCycleLR

import zerofp4
from zerofp4.optim import AveragedMasters, Communication, FusedAdamW, ZeroFP4Optimizer
from zerofp4.optim.piece import Piece, SavedOptions
from zerofp4.optim.state_dict import CODES


def train(net, optimizer):
    net(batch(net.first.bias.device, 0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def build(device):
    net = make_net(device)
    groups = [{"params": [p for p in net.parameters() if p.dim() > 1]}]
    groups.append({"params": [p for p in net.parameters() if p.dim() < 2], "lr": 0.02})
    return net, ZeroFP4Optimizer(groups, torch.optim.AdamW, lr=0.01, weight_decay=0.1)


def named(device):
    net, optimizer = build(device)
    return list(net.parameters()), optimizer


def compact(device):
    parameters = [torch.nn.Parameter(torch.randn(4, 64, device=device, dtype=torch.bfloat16))]
    return parameters, ZeroFP4Optimizer(parameters, FusedAdamW, lr=0.1, state="compact")


def of_two_classes(device):
    parameters, groups = make_groups(device, "fused")
    return parameters, ZeroFP4Optimizer(groups, torch.optim.Muon, **MUON)


def entry(i, name, value):
    """A change to one entry of the state."""
    return lambda s: s["state"][i].update({name: value(s["state"][i][name])})


def shorter(state):
    """Only the state of another optimizer may lack a parameter, which is new in this one."""
    for key in ("params", "param_names"):
        state["param_groups"][1].get(key, [None]).pop()


def of_sgd(state):
    """The first entries of the second class."""
    entries = state["state"][4]
    state["state"][4] = {"master": entries["master"], "momentum_buffer": entries["exp_avg"]}


ONE_TOO_FEW = r"param_groups have \[8\] parameters, and these \[9\]; .* with named_parameters\(\)"


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (named, lambda s: s.update(param_groups=s["param_groups"][:1]), r"not fit: first\.bias is missing"),
        (named, shorter, r"does not fit: second\.bias is missing"),
        (named, lambda s: s["param_groups"][0].pop("params"), "cannot be loaded: KeyError: 'params'"),
        (named, lambda s: s["param_groups"][0].update(lr=-1.0), "Invalid learning rate: -1.0"),
        (named, entry(1, "master", lambda _: torch.zeros(5)), r"\.master has shape \(5,\), here \(6, 48\)"),
        (named, lambda s: s["state"][0]["master"].__create_chunk_list__(), r"\.master is not whole in the"),
        (named, lambda s: s["state"].pop(1), r"second\.weight\.master is missing"),
        (named, lambda s: s["state"][1].pop("master"), r"second\.weight\.master is missing"),
        (named, entry(1, "exp_avg", lambda _: None), r"second\.weight\.exp_avg is missing"),
        (named, entry(0, "exp_avg_sq", lambda _: "0.5"), "state_dict cannot be loaded: AttributeError"),
        (named, entry(0, "step", lambda _: torch.zeros(2)), r"\.step has shape \(2,\), here \(\)"),
        (named, entry(0, "step", lambda _: math.nan), r"\.step must be finite and not negative, got nan"),
        (named, entry(0, "step", lambda step: -step.whole()), r"must be finite and not negative, got -1\.0"),
        (built, lambda s: s["param_groups"][0]["params"].pop(), ONE_TOO_FEW),
        (compact, lambda s: s["state"][0].pop("master_high"), r"\.master_high is missing"),
        (compact, lambda s: s["state"][0].pop("master_low"), r"\.master_low is missing"),
        (of_two_classes, lambda s: s["param_groups"][1].update(betas=(2.0, 0.9)), "betas"),
        (of_two_classes, of_sgd, r"param_groups\[1\].*\.step is missing"),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(device, make, change, message):
    """Masters of some parameters alone would be trained beside those of another model. Neither optimizer of
    two classes changes.
    """
    parameters, optimizer = make(device)
    take_step(parameters, optimizer, 0)
    state = copy.deepcopy(optimizer.state_dict())
    for entries in state["state"].values():
        entries["master_high" if make is compact else "master"].values.fill_(7)
    for group in state["param_groups"]:
        group["lr"] = 7.0
    change(state)
    inners = [(inner.state, inner.param_groups) for inner in optimizer.inners.all]
    with unchanged(parameters, optimizer), pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    for inner, (before, groups) in zip(optimizer.inners.all, inners, strict=True):
        assert inner.state is before and inner.param_groups is groups
        assert all(group["lr"] != 7 for group in [*optimizer.param_groups, *groups])
    take_step(parameters, optimizer, 1)
    if make is compact:
        assert set(optimizer.state[parameters[0]]) == {"master_high", "master_low", "step", *CODES}


def test_a_file_that_was_written_after_a_weight_has_its_values(device):
    """In the same optimizer: a state dict that went through no file leaves the master as it was."""
    for path in (through_a_file, lambda state_dict: state_dict):
        net, optimizer = build(device)
        train(net, optimizer)
        expected = optimizer.gathered_masters()[0].clone()
        with torch.no_grad():
            net.first.weight.copy_(2 * net.first.weight)
        if path is through_a_file:
            expected = net.first.weight.dequantize(torch.float32)
        optimizer.load_state_dict(path(optimizer.state_dict()))
        assert_bytes_equal(optimizer.gathered_masters()[0], expected, "master")


def test_load_into_parameters_that_were_moved(device):
    """Trainers move a model and have its optimizer load its own state. Without masters in that state, the
    parameters' values would be lost; of parameters that stay, masters follow what was written.
    """
    net, optimizer = build(device)
    train(net, optimizer)
    before, state = [p.detach().float() for p in net.parameters()], copy.deepcopy(optimizer.state_dict())
    for p in (net.norm.weight, net.norm.bias):
        p.data = torch.full_like(p.data, 7)
    for entries in state["state"].values():
        del entries["master"]
    with pytest.raises(ValueError, match=r"no master of .*'norm\.weight' has moved since"):
        optimizer.load_state_dict(state)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_all_equal([p.detach().float() for p in net.parameters()], before, "weight")
    with torch.no_grad():
        net.first.weight.fill_(1)
    optimizer.load_state_dict(state)
    assert (net.first.weight.dequantize() == 1).all()
    train(net, optimizer)


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [(torch.optim.NAdam, {}), (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5})],
)
def test_a_state_from_before_the_first_step(device, optimizer_class, options):
    """It is saved as zeros, with which these classes do not begin."""
    pairs = []
    for _ in range(2):
        parameters = make_parameters(device)
        pairs.append((parameters, ZeroFP4Optimizer(parameters, optimizer_class, lr=0.1, **options)))
    (_, first), (_, second) = pairs
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for parameters, optimizer in pairs:
        take_step(parameters, optimizer, 0)
    assert_all_equal(second.gathered_masters(), first.gathered_masters(), "master")


def test_options_come_as_what_they_are_here(device):
    """An lr as a tensor; initial_lr is for a scheduler that goes on."""
    first = ZeroFP4Optimizer(make_parameters(device), lr=0.125)
    torch.optim.lr_scheduler.ExponentialLR(first, 0.5)
    lr = torch.tensor(0.5, device=device)
    second = ZeroFP4Optimizer(make_parameters(device), FusedAdamW, lr=lr)
    second.load_state_dict(first.state_dict())
    (group,) = second.param_groups
    assert torch.is_tensor(group["lr"]) and group["lr"] == group["initial_lr"] == 0.125


def test_a_python_number_stays_one(device):
    class WithANumber(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for p in self.param_groups[0]["params"]:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1

    parameters = make_parameters(device)
    optimizer = ZeroFP4Optimizer(parameters, WithANumber, lr=0.1)
    for seed in range(2):
        take_step(parameters, optimizer, seed)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    counts = [state["count"] for state in optimizer.inner.state.values()]
    assert counts and all(type(count) is int and count == 2 for count in counts)


def test_hooks_and_the_size_of_a_file(device):
    """torch.save writes masters and moments, and nothing else."""
    net, optimizer = build(device)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre step"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post step"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(f"load {state['extra']}"))
    train(net, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre step", "post step", "load 1"]
    torch.save(optimizer.state_dict(), file := io.BytesIO())
    assert file.tell() < 3 * 4 * sum(p.numel() for p in net.parameters()) + 40000


# What torch saved, and what its schedulers keep in parameter groups


def test_torch_has_no_entries_of_a_parameter_that_never_had_a_gradient(device):
    """Its moments begin anew here, and masters stay."""
    parameters, optimizer = built(device, seed=0)
    theirs = [torch.nn.Parameter(torch.zeros(p.shape, device=device)) for p in parameters]
    plain = torch.optim.AdamW(theirs)
    for p in theirs[1:]:
        p.grad = torch.ones_like(p)
    plain.step()
    optimizer.step()
    masters = optimizer.gathered_masters()
    optimizer.load_state_dict(plain.state_dict())
    assert_all_equal(optimizer.gathered_masters(), masters, "master")
    steps = [optimizer.state[p]["step"].whole().item() for p in parameters if p.numel()]
    assert steps == [0] + [1] * (len(steps) - 1)


def test_two_parameters_of_one_name_in_a_state_dict(device):
    """As torch saves groups of two models. Without names both sides match by position."""
    values = [torch.nn.Parameter(torch.zeros(3, device=device)) for _ in range(2)]
    plain = torch.optim.AdamW([{"params": [("weight", p)]} for p in values])
    for i, p in enumerate(values):
        p.grad = torch.full_like(p, 1.0 + i)
    plain.step()
    state = plain.state_dict()
    one, two = (torch.nn.Parameter(torch.zeros(3, device=device)) for _ in range(2))
    with pytest.raises(ValueError, match="2 parameters are called 'weight'"):
        ZeroFP4Optimizer([("weight", one)]).load_state_dict(state)
    loaded = ZeroFP4Optimizer([{"params": [p]} for p in (one, two)])
    loaded.load_state_dict(state)
    for p, own in zip(values, (one, two), strict=True):
        moment = loaded.state[own]["exp_avg"].whole()
        assert_bytes_equal(moment, plain.state[p]["exp_avg"], "exp_avg")


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, FusedAdamW])
def test_a_scheduler_goes_on_from_loaded_groups(device, optimizer_class):
    """torch's schedulers keep values in the groups: with last_epoch, a new one finds them there."""

    def run(optimizer, scheduler, steps):
        for step in steps:
            take_step(optimizer.param_groups[0]["params"], optimizer, step)
            scheduler.step()
        return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}

    first, second = (ZeroFP4Optimizer(make_parameters(device), optimizer_class, lr=lr) for lr in (0.1, 0.7))
    scheduler = OneCycleLR(first, max_lr=0.5, total_steps=20)
    run(first, scheduler, range(4))
    second.load_state_dict(through_a_file(first.state_dict()))
    resumed = OneCycleLR(second, max_lr=0.5, total_steps=20, last_epoch=scheduler.last_epoch - 1)
    assert run(second, resumed, range(4, 8)) == run(first, scheduler, range(4, 8))
    assert_all_equal(second.gathered_masters(), first.gathered_masters(), "master")


# A step that is left in the middle: of no more use, until the masters are those of one step again


def made(device, between):
    parameters = make_parameters(device)
    beside = {"params": parameters[4:], "optimizer_class": torch.optim.SGD, "lr": 0.1}
    groups = [{"params": parameters[:4]}, beside] if between == "classes" else parameters
    options = {"lr": 0.1, "communication": Communication(bucket_mb=0.003)}
    options["offload"] = float(between == "buckets on the host")
    return parameters, ZeroFP4Optimizer(groups, FusedAdamW, **options)


@pytest.mark.parametrize("between", ["classes", "buckets", "buckets on the host"])
def test_an_interrupt_between_updates(device, monkeypatch, tmp_path, between):
    parameters, optimizer = made(device, between)
    averages = AveragedMasters(optimizer)
    take_step(parameters, optimizer, 0)
    saved, before = copy.deepcopy(optimizer.state_dict()), optimizer.gathered_masters()
    with monkeypatch.context() as patched:
        interrupt = mock.Mock(side_effect=KeyboardInterrupt("ctrl-c"))
        first, *others = optimizer.inners.all
        patched.setattr(*((others[0], "step") if others else (first._parts[1], "run")), interrupt)
        with pytest.raises(KeyboardInterrupt):
            take_step(parameters, optimizer, 1)
    after = optimizer.gathered_masters()
    same = list(map(torch.equal, before, after))
    assert any(same) and not all(same)  # of two steps
    assert isinstance(optimizer.broken, RuntimeError)
    assert "step() was left in the middle (KeyboardInterrupt: ctrl-c)" in str(optimizer.broken)
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0), optimizer.check, optimizer.step):
        with pytest.raises(RuntimeError, match=r"of no more use: step\(\) was left in the middle") as caught:
            call()
        assert caught.value.__cause__ is optimizer.broken
    model = torch.nn.ParameterList(parameters)
    for save in (
        lambda: torch.save(optimizer.state_dict(), io.BytesIO()),
        lambda: dcp.save(dict(optimizer.state[parameters[0]]), checkpoint_id=tmp_path, no_dist=True),
        lambda: dict(zerofp4.master_state_dict(model, optimizer)),
        averages.update,
    ):
        with pytest.raises((RuntimeError, dcp.api.CheckpointException), match="masters may be of two steps"):
            save()
    with pytest.raises(ValueError, match="masters_from cannot hand over its masters: step"):
        ZeroFP4Optimizer(parameters, FusedAdamW, masters_from=optimizer)
    assert_all_equal(optimizer.gathered_masters(), after, "master")
    other, right = made(device, between)
    right.load_state_dict(copy.deepcopy(saved))
    optimizer.load_state_dict(saved)
    assert optimizer.broken is None
    take_step(other, right, 1)
    take_step(parameters, optimizer, 1)
    assert_all_equal(optimizer.gathered_masters(), right.gathered_masters(), "master")
    assert_weights_follow(parameters, optimizer.gathered_masters())


# Pieces: tensors of which a rank holds a flat range


def make_piece(first=3, last=17):
    whole = torch.arange(24, dtype=torch.float32).view(4, 6)
    return Piece(whole.view(-1)[first:last], whole.shape, first), whole


def test_copies_are_pieces_with_values_of_their_own():
    piece, whole = make_piece()
    copies = [copy.deepcopy(piece), piece.clone(), piece.to("cpu", copy=True), piece.detach()]
    for moved in (piece.to("meta"), piece.to(device="meta"), piece.to("meta", torch.float64)):
        assert type(moved) is Piece and moved.device.type == "meta" and moved.shard == (3, 14)
    assert piece.to("cpu").values.data_ptr() == piece.values.data_ptr()
    for one in (*copies, through_a_file(piece)):
        assert isinstance(one, Piece) and one.shape == (4, 6) and one.shard == (3, 14)
        assert torch.equal(one.values, whole.view(-1)[3:17])
    assert piece.new_empty((4, 6), device="cpu").shard == piece.shard


def test_operations_need_the_whole_tensor_and_what_is_copied_in_leaves_the_values_alone():
    piece, whole = make_piece()
    with pytest.raises(RuntimeError, match=r"shape \(4, 6\) this rank holds 14 elements: full_tensor\(\)"):
        piece + 1
    assert torch.equal(make_piece(0, 24)[0] + 1, whole + 1)
    assert repr(piece).endswith("elements 3..16 of it here)")
    piece.copy_(-whole)
    assert whole.view(-1)[3] == 3 and piece.values[0] == -3 and not piece.unread


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_file_has_chunks_of_a_limited_size(tmp_path, monkeypatch):
    monkeypatch.setattr("zerofp4.optim.piece.CHUNK", 4 * 12)  # two rows

    def chunks(path):
        found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata["w"].chunks
        return [(*chunk.offsets, *chunk.sizes) for chunk in found]

    piece, whole = make_piece(0, 24)
    dcp.save({"w": piece}, checkpoint_id=tmp_path, no_dist=True)
    assert chunks(tmp_path) == [(0, 0, 2, 6), (2, 0, 2, 6)]
    part, _ = make_piece(3, 17)
    for one, expected in ((piece, whole.view(-1)), (part, whole.view(-1)[3:17])):
        one.values = torch.zeros(expected.shape)
        dcp.load({"w": one}, checkpoint_id=tmp_path, no_dist=True)
        assert torch.equal(one.values, expected) and not one.unread
    dcp.save({"w": part}, checkpoint_id=tmp_path / "part", no_dist=True)  # asked for otherwise than by a load
    assert chunks(tmp_path / "part") == [(0, 3, 1, 3), (1, 0, 1, 6), (2, 0, 1, 5)]


def test_elements_that_no_file_had_are_noticed():
    """As torch.distributed.checkpoint reads: a box, or a part of it that a file has."""
    piece, _ = make_piece()
    for i, chunk in enumerate(piece.__create_chunk_list__()):
        box = piece.__get_tensor_shard__(type("Index", (), {"offset": chunk.offsets})).detach()
        assert box.shape == chunk.sizes
        box.fill_(9.0)  # is no reading
        width = box.shape[1] - 1
        for part in (box.narrow(1, 0, width), box.narrow(1, width, 1)):
            assert piece.unread
            part.copy_(torch.full(part.shape, float("nan") if i else 0.0))
    assert not piece.unread
    assert piece.values[:3].tolist() == [0, 0, 0] and piece.values[3:].isnan().all()
    box.narrow(1, 0, 1).copy_(torch.zeros(1, 1))
    assert piece.unread  # a file whose boxes overlap has others that it lacks


# The ids of saves


def test_options_know_their_save():
    value = SavedOptions(({"lr": 0.125, "betas": (0.5, 0.25), "t": torch.ones(2)}, {"lr": 1}))
    value.save_id = "token-000000000001"
    for same in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert type(same) is SavedOptions and repr(same) == repr(value) and same.save_id == value.save_id


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_with_checksums_load(tmp_path):
    """Two ranks wrote them after 3 steps: a folder by dcp.save, and what torch.save wrote on each rank."""
    zipfile.ZipFile(Path(__file__).parents[1] / "data" / "sealed_checkpoint.zip").extractall(tmp_path)
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    model = torch.nn.Linear(32, 16, dtype=torch.bfloat16)
    zerofp4.convert_model(model)
    optimizer = ZeroFP4Optimizer(model.named_parameters(), FusedAdamW, lr=1.0)
    dcp.load({"optimizer": optimizer}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    loaded, (group,) = optimizer.state_dict(), optimizer.param_groups
    assert (loaded["steps"], group["lr"], group["betas"]) == (3, 0.125, (0.5, 0.75))
    parts = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    (save_id,) = {part["param_groups"].save_id for part in parts}
    assert save_id == "d0cc9c046a78a674-000000000003"
    for number, entries in loaded["state"].items():
        for name, piece in entries.items():
            assert_bytes_equal(piece.full_tensor(), expected[str(number)][name], f"{number}.{name}")
            whole = torch.zeros(piece.numel())
            for part in (part["state"][number][name] for part in parts):
                whole[part.start : part.shard.end] = part.values
                assert part.saves == {save_id}
            assert_bytes_equal(whole.view(piece.shape), expected[str(number)][name], f"{number}.{name} again")
