"""What prepare and attach refuse, and masters before they are sharded, in a world of one."""

from __future__ import annotations

import copy
import inspect
import io
import types
import weakref

import pytest
import torch
from cases.fsdp2 import Model, check_gathered, shard, take_experts
from helpers import assert_bytes_equal, collect_garbage
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerofp4
from zerofp4.integrations import fsdp2
from zerofp4.integrations.fsdp2 import master


def prepared(dtype=None) -> Model:
    torch.manual_seed(0)
    model = Model(dtype)
    fsdp2.prepare(model, take_experts)
    return model


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


# prepare


def test_the_report_is_that_of_convert_model():
    torch.manual_seed(0)
    model, converted = Model(), Model()
    model.odd = nn.Linear(3, 5)
    converted.odd = nn.Linear(3, 5)
    report = fsdp2.prepare(model, take_experts)
    expected = zerofp4.convert_model(converted, take_experts)
    assert (report.converted, report.skipped) == (expected.converted, expected.skipped)
    assert (report.share, report.shares) == (expected.share, expected.shares)
    assert report.converted == ["first", "second", "small", "third", "experts.stack"]


def test_a_master_keeps_what_its_parameter_had():
    model = Model(torch.bfloat16)
    model.first.weight.requires_grad_(False)
    model.first.weight.tag = "a tag"
    before = model.first.weight.detach().clone()
    fsdp2.prepare(model, take_experts)
    master = model.first.weight
    assert isinstance(master, nn.Parameter) and master.dtype == torch.float32
    assert master.tag == "a tag" and not master.requires_grad and model.second.weight.requires_grad
    assert_bytes_equal(model.state_dict()["first.weight"], before.float(), "the master")
    assert type(model.state_dict()["first.weight"]) is torch.Tensor
    assert "MasterShard('first.weight'" in repr(master)


def test_a_printed_model_shows_how_weights_are_gathered(mesh):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(5, 3))
    fsdp2.prepare(model, block=(1, 16))
    expected = "bias=True, weight=FP32, gathered as NVFP4(1x16))"
    assert repr(model[0]).endswith(expected)
    fully_shard(model, mesh=mesh)
    assert repr(model[0]).endswith(expected)
    assert repr(model[1]) == "Linear(in_features=5, out_features=3, bias=True)"


def test_an_nvfp4_model_cannot_be_prepared():
    model = nn.Sequential(nn.Linear(16, 16))
    zerofp4.convert_model(model)
    with pytest.raises(ValueError, match="weight of module '0' was converted to NVFP4 already"):
        fsdp2.prepare(model)


def test_prepare_comes_once_and_before_fully_shard(mesh):
    model = prepared()
    with pytest.raises(ValueError, match="weight of module 'first' was prepared already"):
        fsdp2.prepare(model)
    plain = shard(Model(), mesh)
    with pytest.raises(RuntimeError, match="the model is sharded already: call prepare before fully_shard"):
        fsdp2.prepare(plain)


def test_wrappers_of_ddp_are_refused(mesh):
    with pytest.raises(RuntimeError, match=r"the model is a DistributedDataParallel, .* use fully_shard"):
        fsdp2.prepare(DistributedDataParallel(Model()))
    with pytest.raises(RuntimeError, match=r"was prepared for FSDP2.*DistributedDataParallel"):
        DistributedDataParallel(prepared())(torch.ones(2, 48))


def test_amax_groups_are_of_weights_to_convert():
    """By the rule of convert_model, and before anything is prepared."""
    model = Model()
    with pytest.raises(ValueError, match=r"amax_groups\[0\] has a member that is not one of the"):
        fsdp2.prepare(model, take_experts, amax_groups=[[model.norm.weight]])
    assert all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"four_over_six": zerofp4.FourOverSix()}, r"four_over_six needs block \(1, 16\) here, got"),
        ({"block": (1, 16), "columnwise": True}, r"columnwise=True needs block \(16, 16\)"),
        ({"block": (1, 32)}, r"block must be \(16, 16\) or \(1, 16\)"),
    ],
)
def test_kinds_of_weights_that_are_not_gathered(kind, message):
    model = nn.Linear(16, 16)
    with pytest.raises(ValueError, match=message):
        fsdp2.prepare(model, **kind)
    assert type(model.weight) is nn.Parameter


# Masters that are not sharded


@pytest.mark.parametrize("rows", [(2, 48), (2, 3, 48)])
def test_a_master_is_not_to_compute_with(rows):
    with pytest.raises(RuntimeError, match=r"'first.weight' was prepared for FSDP2.*call fully_shard"):
        prepared()(torch.ones(rows))


def test_what_fsdp2_asks_before_each_gather_has_its_signature():
    signatures = [inspect.signature(prepared().first.weight.fsdp_pre_all_gather) for _ in range(2)]
    assert list(signatures[0].parameters) == ["mesh"]
    assert signatures[0] is signatures[1]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: nn.ModuleDict({"gate_weight": nn.Linear(32, 32)}), "gate_weight.weight"),
        (lambda: nn.Linear(32, 32), "weight"),
    ],
)
def test_names_are_those_of_the_parameters(make, name):
    model = make()
    fsdp2.prepare(model)
    assert [weight.name for *_, weight in fsdp2.prepared_weights(model)] == [name]


def test_copies_of_a_model_are_prepared_on_their_own():
    model = prepared()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.first.weight.zero_()
    assert model.first.weight.weight is not other.first.weight.weight
    assert model.first.weight.abs().sum() > 0 == other.first.weight.abs().sum()
    mine, others = (list(fsdp2.prepared_weights(each)) for each in (model, other))
    assert [weight.name for *_, weight in others] == [weight.name for *_, weight in mine]
    assert all(module._parameters[name].weight is weight for module, name, weight in others)


def test_masters_are_not_pickled_and_state_dicts_are():
    model = prepared()
    with pytest.raises(TypeError, match=r"the master of 'first.weight' cannot be pickled: save model.state"):
        torch.save(model.first.weight, io.BytesIO())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = Model()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert_bytes_equal(loaded.first.weight.detach(), model.state_dict()["first.weight"], "a master")


def test_masters_that_are_assigned_are_float32():
    model = prepared()
    state = {name: value.bfloat16() for name, value in model.state_dict().items()}
    with pytest.raises(TypeError, match=r"first.weight is a master and must be float32"):
        model.load_state_dict(state, assign=True)


def test_initializers_join_pieces_of_a_master(mesh):
    """As torchtitan's do with the matrix of q, k and v."""
    model = shard(prepared(), mesh)
    for one in (prepared().second.weight, model.second.weight):
        with torch.no_grad():
            pieces = [one.new_empty(rows, 22).fill_(rows) for rows in (100, 30)]
            one.copy_(torch.cat(pieces))
    expected = torch.cat([torch.full((rows, 22), float(rows)) for rows in (100, 30)])
    assert_bytes_equal(model.state_dict()["second.weight"].to_local(), expected, "the master")


# attach


def test_attach_needs_prepare_fully_shard_and_the_optimizer(mesh):
    with pytest.raises(RuntimeError, match=r"model has no prepared weight: call prepare\(model\)"):
        fsdp2.attach(shard(Model(), mesh), sgd(Model()))
    model = prepared()
    with pytest.raises(RuntimeError, match=r"'first.weight' was prepared, but is not sharded"):
        fsdp2.attach(model, sgd(model))
    before = sgd(model)
    shard(model, mesh)
    with pytest.raises(RuntimeError, match=r"'first.weight' is not a parameter of the optimizer: build"):
        fsdp2.attach(model, before)
    for given in (model, nn.Sequential(model), [model]):
        with pytest.raises(TypeError, match="optimizer must be an optimizer or a list of them, got "):
            fsdp2.attach(sgd(model), given)
    attachment = fsdp2.attach(model, sgd(model))
    with pytest.raises(RuntimeError, match=r"'first.weight' is attached already: call detach\(\)"):
        fsdp2.attach(model, sgd(model))
    attachment.detach()
    with pytest.raises(RuntimeError, match=r"'first.weight' has no codes yet"):
        model(torch.ones(2, 48))
    model._get_fsdp_state()._training_state = type(model._get_fsdp_state()._training_state).IDLE


@pytest.mark.parametrize("reshards", [True, False])
def test_a_model_is_attached_again(mesh, reshards):
    """FSDP2 goes on with the tensors that it has."""
    model = shard(prepared(), mesh, reshard_after_forward=reshards)
    optimizer = sgd(model)
    for _ in range(2):
        attachment = fsdp2.attach(model, optimizer)
        check_gathered(model, as_values=reshards)
        model(torch.ones(2, 48)).sum().backward()
        optimizer.step()
        check_gathered(model, as_values=reshards)
        attachment.detach()
        with torch.no_grad():
            model.first.weight.mul_(2)


def test_one_dtype_for_all_parameters_of_a_group(mesh):
    model = shard(prepared(torch.bfloat16), mesh)
    with pytest.raises(ValueError, match=r"bias of a FSDPLinear is torch.bfloat16.*call model.float\(\)"):
        fsdp2.attach(model, sgd(model))
    message = "must be a torch.float32 .*, got torch.bfloat16: .* with FSDP2 call model.float"
    with pytest.raises(TypeError, match=message):
        zerofp4.optim.FusedAdamW(model.parameters())


def test_a_model_gets_its_dtype_before(mesh):
    model = prepared()
    with pytest.raises(TypeError, match=r"got torch.bfloat16 of Tensor: give a model"):
        model.to(torch.bfloat16)
    model.first.weight = nn.Parameter(model.first.weight.bfloat16())
    shard(model, mesh)
    with pytest.raises(RuntimeError, match=r"'first.weight' was prepared, but its parameter was replaced"):
        fsdp2.attach(model, sgd(model))


def test_a_dtype_that_nvfp4_has_not(mesh):
    model = shard(prepared(), mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64))
    with pytest.raises(ValueError, match=r"'first.weight' is to be gathered in torch.float64, which is"):
        fsdp2.attach(model, sgd(model))


def test_an_amax_group_is_cast_at_once(mesh):
    model = Model()
    model.first.weight.requires_grad_(False)
    fsdp2.prepare(model, take_experts, amax_groups=[[model.first.weight, model.second.weight]])
    shard(model, mesh)
    with pytest.raises(ValueError, match=r"'second.weight' and 'first.weight' are not cast together"):
        fsdp2.attach(model, sgd(model))


def test_masters_of_nan_keep_their_codes_and_say_so(mesh):
    model = shard(prepared(), mesh, reshard_after_forward=False)
    optimizer = sgd(model)
    attachment = fsdp2.attach(model, optimizer)
    model.unshard()
    model.second.unshard()
    before = model.second.weight.rowwise_data.clone()
    model.second.reshard()
    assert [found.item() for found in attachment.found_inf.values()] == [0.0]
    with torch.no_grad():
        model.second.weight.fill_(float("nan"))
    optimizer.step()
    assert [found.item() for found in attachment.found_inf.values()] == [1.0]
    attachment.check()
    model.second.unshard()
    assert_bytes_equal(model.second.weight.rowwise_data, before, "codes")


def test_a_master_that_was_cast_may_be_pinned(mesh, monkeypatch):
    """As FSDP2 does with one that it padded, between the cast and the first forward pass."""
    monkeypatch.setattr(master, "_pin", lambda tensor, device: tensor.clone())  # no GPU, no pinned memory
    model = shard(prepared(), mesh)
    fsdp2.attach(model, sgd(model))
    local = model.second.weight._local_tensor
    pinned = torch.ops.aten._pin_memory.default(local)
    assert pinned.local.data_ptr() != local.local.data_ptr()
    assert pinned.weight.is_current(pinned.local)
    pinned.fill_(1.0)
    assert not torch.ops.aten._pin_memory.default(pinned).weight.is_current(pinned.local)


def test_scales_of_masters_on_the_cpu_are_copied_after_each_cast(mesh, monkeypatch):
    """Where one rank has a whole weight. FSDP2 copies its codes, and nothing more."""
    model = nn.Sequential(nn.Linear(48, 22))
    fsdp2.prepare(model, block=(1, 16))
    fully_shard(model[0], mesh=mesh)
    optimizer = sgd(fully_shard(model, mesh=mesh))
    fsdp2.attach(model, optimizer)
    to = torch.Tensor.to
    with monkeypatch.context() as patch:  # in place of a second device
        patch.setattr(torch.Tensor, "to", lambda tensor, *args: to(tensor, *args).clone())
        model[0].unshard()
        model[0].reshard()
    for _ in range(2):
        check_gathered(model, names=["0.weight"])
        model(torch.ones(2, 48)).sum().backward()
        optimizer.step()


def test_ignored_parameters_are_not_prepared_ones(mesh):
    model = prepared()
    fully_shard(model, mesh=mesh, ignored_params={model.first.weight})
    with pytest.raises(RuntimeError, match=r"'first.weight' was prepared, but is not sharded"):
        fsdp2.attach(model, sgd(model))


def test_a_model_that_is_let_go_frees_its_masters(mesh):
    """The collector of cycles sees none that passes through views of tensors."""
    model = shard(prepared(), mesh)
    optimizer = sgd(model)
    fsdp2.attach(model, optimizer)
    model(torch.ones(2, 48)).sum().backward()
    optimizer.step()
    left = [weakref.ref(weight) for *_, weight in fsdp2.prepared_weights(model)]
    del model, optimizer
    collect_garbage()
    assert [weight() for weight in left] == [None] * 5


def test_a_cast_waits_for_what_reads_the_codes(mesh):
    """With CPUOffloadPolicy a GPU copies them while the host goes on."""
    model = shard(prepared(), mesh)
    optimizer = sgd(model)
    fsdp2.attach(model, optimizer)
    weight = next(weight for *_, weight in fsdp2.prepared_weights(model))
    with torch.no_grad():
        model.first.weight.fill_(1.0)
    seen = []
    event = types.SimpleNamespace(synchronize=lambda: seen.append(weight.codes.clone()))
    before, weight._copied = weight.codes.clone(), event
    optimizer.step()
    assert_bytes_equal(seen[0], before, "codes")
    assert not weight.codes.equal(before) and weight._copied is None and len(seen) == 1
