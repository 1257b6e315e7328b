"""Converted models for what knows ordinary tensors only."""

import copy

import pytest
import torch
from helpers import assert_bytes_equal
from torch import nn

import zerofp4
from zerofp4 import NVFP4Tensor
from zerofp4.optim import ZeroFP4Optimizer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 48, dtype=torch.bfloat16)
        self.body = nn.Sequential(nn.Linear(48, 16, dtype=torch.bfloat16), nn.LayerNorm(16))


NAMES = ["first.weight", "body.0.weight"]
"""Of weights that are converted."""


def make(device, seed=0, convert=True):
    torch.manual_seed(seed)
    net = Net().to(device)
    if convert:
        zerofp4.convert_model(net)
    return net


def test_plain_state_dict_holds_values_and_loads_them(device):
    net = make(device)
    zerofp4.register_plain_state_dict(net)
    zerofp4.register_plain_state_dict(net)
    for state in (net.state_dict(), {f"body.{k}": v for k, v in net.body.state_dict().items()}):
        for name, value in state.items():
            assert type(value) is torch.Tensor and value.dtype == net.get_parameter(name).dtype
    assert_bytes_equal(
        net.state_dict()["first.weight"], net.first.weight.detach().dequantize(), "first.weight"
    )
    other = make(device, 1)
    plain = make(device, 2, convert=False)
    for model in (other, net):
        model.load_state_dict(plain.state_dict())
        assert isinstance(model.first.weight, NVFP4Tensor)
        assert_bytes_equal(
            model.first.weight.get_high_precision_init_val(), plain.first.weight.detach().cpu(), ""
        )
    again = copy.deepcopy(net)
    assert type(again.state_dict()["first.weight"]) is torch.Tensor


@pytest.mark.parametrize("when", ["before", "after"])
def test_values_loaded_before_or_after_the_conversion_are_the_same(device, when):
    plain = make(device, 2, convert=False)
    net = make(device, convert=False)
    if when == "before":
        net.load_state_dict(plain.state_dict())
    zerofp4.convert_model(net)
    if when == "after":
        net.load_state_dict(plain.state_dict())
    optimizer = ZeroFP4Optimizer(net.named_parameters())
    for p, master in zip(plain.parameters(), optimizer.gathered_masters(), strict=True):
        assert_bytes_equal(master, p.detach().float(), "master")


def test_assign_puts_the_given_tensors_into_the_model(device):
    net, plain = make(device), make(device, 2, convert=False)
    with pytest.warns(UserWarning, match=r"assign=True.* by ordinary parameters: first\.weight, body\.0\.we"):
        net.load_state_dict(plain.state_dict(), assign=True)
    assert (
        type(net.first.weight) is nn.Parameter
        and net.first.weight.data_ptr() == plain.first.weight.data_ptr()
    )
    plain.load_state_dict(make(device).state_dict(), assign=True)
    assert isinstance(plain.first.weight, NVFP4Tensor)


@pytest.mark.filterwarnings("error")
def test_a_load_warns_once_of_weights_that_it_does_not_quantize(device):
    """Whoever holds the model, and of these weights alone."""
    net, plain = make(device), make(device, 2, convert=False)
    zerofp4.convert_model(net)
    net.load_state_dict(plain.state_dict())
    net.load_state_dict(make(device).state_dict(), assign=True)
    net.load_state_dict({"first.bias": plain.first.bias}, strict=False, assign=True)
    layer = zerofp4.nn.Linear(16, 16, primary_weights=True, device=device)
    pairs = [(nn.Sequential(copy.deepcopy(net)), nn.Sequential(plain), r"0\.first\.weight")]
    pairs.append((nn.Sequential(layer), nn.Sequential(nn.Linear(16, 16, device=device)), r"0\.weight"))
    for model, source, name in pairs:
        with pytest.warns(UserWarning, match=rf"by ordinary parameters: {name}") as caught:
            model.load_state_dict(source.state_dict(), assign=True)
        assert len(caught) == 1


def test_unconvert_gives_back_what_was_converted(device):
    net, plain = make(device), make(device, convert=False)
    net.first.weight.note = "kept"
    assert zerofp4.unconvert_model(net) == ["first.weight", "body.0.weight"]
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert type(p) is nn.Parameter
        assert_bytes_equal(p.detach(), q.detach(), name)
    assert net.first.weight.note == "kept" and zerofp4.unconvert_model(net) == []
    net = make(device)
    net.first.weight.clear_high_precision_init_val()
    expected = net.first.weight.detach().dequantize()
    zerofp4.unconvert_model(net)
    assert_bytes_equal(net.first.weight.detach(), expected, "first.weight")


def test_unconvert_gives_the_values_of_the_codes(device):
    net = make(device)
    with pytest.raises(ValueError, match=r"values must be .* got 'masters'"):
        zerofp4.unconvert_model(net, values="masters")
    for optimizer in (None, ZeroFP4Optimizer(net.named_parameters())):
        model = copy.deepcopy(net) if optimizer is None else net
        expected = {name: model.get_parameter(name).detach().dequantize() for name in NAMES}
        assert zerofp4.unconvert_model(model, optimizer, values="codes") == NAMES
        for name, value in expected.items():
            assert type(model.get_parameter(name)) is nn.Parameter
            assert_bytes_equal(model.get_parameter(name).detach(), value, name)


def test_safetensors_names_the_quantized_weight(device, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    net = make(device)
    with pytest.raises(
        TypeError, match=r"cannot hold the NVFP4Tensor 'first' of shape \(48, 32\): give it dict"
    ):
        safetensors.save_file(net.state_dict(), tmp_path / "a")
    with pytest.raises(TypeError, match="cannot hold the NVFP4Tensor"):
        safetensors.save_model(net, tmp_path / "a")
    zerofp4.register_plain_state_dict(net)
    safetensors.save_file(net.state_dict(), tmp_path / "a")
    assert_bytes_equal(
        safetensors.load_file(tmp_path / "a")["first.weight"],
        net.first.weight.detach().dequantize().cpu(),
        "",
    )


def test_wrong_arguments_of_exports(device):
    net = make(device)
    with pytest.raises(TypeError, match="optimizer must be a ZeroFP4Optimizer, got AdamW"):
        zerofp4.master_state_dict(net, torch.optim.AdamW(nn.Linear(2, 2).parameters()))
    optimizer = ZeroFP4Optimizer(net.parameters())
    with pytest.raises(TypeError, match="dtype must be a floating one"):
        zerofp4.master_state_dict(net, optimizer, torch.int32)
