"""convert_model: what is converted, what is not and why, and what the new parameters keep."""

import copy

import pytest
import torch
from helpers import assert_bytes_equal
from torch import nn
from torch.nn import functional as F

import zerofp4
from zerofp4 import reference


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Named(nn.Linear):
    """A subclass that computes what nn.Linear computes."""


class Model(nn.Module):
    def __init__(self, dtype=torch.bfloat16, device=None):
        super().__init__()
        options = {"dtype": dtype, "device": device}
        self.tokens = nn.Embedding(64, 32, **options)
        self.norm = nn.LayerNorm(32, **options)
        self.up = nn.Linear(32, 48, **options)
        self.down = Named(48, 32, bias=False, **options)
        self.layers = nn.ModuleList([nn.Linear(32, 32, **options), Scaled(32, 32, **options)])
        self.odd = nn.Linear(32, 33, **options)
        self.tied = nn.Linear(32, 64, bias=False, **options)
        self.tied.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.norm(self.tokens(tokens))
        x = x + self.down(F.gelu(self.up(x)))
        for layer in self.layers:
            x = x + layer(x)
        return self.tied(x) + self.odd(x).sum()


def test_report_and_bytes(device):
    torch.manual_seed(0)
    model = Model(device=device)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = zerofp4.convert_model(model)
    assert report.converted == ["up", "down", "layers.0"]
    assert report.skipped == {
        "tokens": "Embedding is not an nn.Linear",
        "layers.1": "Scaled has a forward of its own",
        "odd": "a weight of shape (33, 32) does not have two even sizes",
        "tied": "its weight is tied to tokens.weight",
    }
    assert list(before) == [name for name, _ in model.named_parameters()]
    for name, p in model.named_parameters():
        if name.removesuffix(".weight") not in report.converted:
            assert type(p) is nn.Parameter and torch.equal(p, before[name])
            continue
        assert isinstance(p, nn.Parameter) and isinstance(p, zerofp4.NVFP4Tensor) and p.requires_grad
        assert (p.shape, p.dtype, p.device, p.block) == (*_of(before[name]), (16, 16))
        assert p.record.name == name.removesuffix(".weight")
        expected = reference.quantize(before[name])
        for side in ("rowwise", "columnwise"):
            for buffer in (f"{side}_data", f"{side}_scale"):
                assert_bytes_equal(getattr(p, buffer), getattr(expected, buffer), f"{name} {buffer}")


def _of(tensor):
    return tensor.shape, tensor.dtype, tensor.device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logical_dtype_and_initial_value(device, dtype):
    model = nn.Sequential(nn.Linear(32, 48, dtype=dtype, device=device))
    original = model[0].weight.detach().clone()
    zerofp4.convert_model(model)
    p = model[0].weight
    value = p.get_high_precision_init_val()
    assert p.dtype == value.dtype == dtype and value.device.type == "cpu" and not value.requires_grad
    assert_bytes_equal(value, original.cpu(), "initial value")
    new = copy.deepcopy(model)[0].weight
    assert new.get_high_precision_init_val() is not value
    assert_bytes_equal(new.get_high_precision_init_val(), value, "initial value of the deepcopy")
    assert_bytes_equal(p.detach().get_high_precision_init_val(), value, "through detach")
    p.clear_high_precision_init_val()
    p.clear_high_precision_init_val()
    assert p.get_high_precision_init_val() is None and p.clone().get_high_precision_init_val() is None
    assert new.get_high_precision_init_val() is not None


def test_initial_value_survives_a_move(device):
    model = nn.Linear(32, 48)
    original = model.weight.detach().clone()
    zerofp4.convert_model(model)
    model.to(device).to(torch.float32)
    assert isinstance(model.weight, zerofp4.NVFP4Tensor) and model.weight.device.type == device.type
    assert_bytes_equal(model.weight.get_high_precision_init_val(), original, "initial value")


def test_parameters_keep_what_was_set_on_them():
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))
    model[0].weight.requires_grad_(False)
    model[1].weight.partition_dim = 1
    model[1].weight.grad = torch.ones(32, 48)
    zerofp4.convert_model(model)
    assert not model[0].weight.requires_grad and model[1].weight.requires_grad
    assert model[1].weight.partition_dim == 1 and torch.equal(model[1].weight.grad, torch.ones(32, 48))


def test_filter_sees_only_what_could_be_converted():
    model, seen = Model(), []

    def keep(module, name):
        seen.append((module, name))
        return name.startswith("layers")

    report = zerofp4.convert_model(model, keep)
    assert seen == [(model.up, "up"), (model.down, "down"), (model.layers[0], "layers.0")]
    assert report.converted == ["layers.0"]
    assert report.skipped["up"] == report.skipped["down"] == "filter_fn is false for it"


def test_converting_twice_changes_nothing():
    model = Model()
    zerofp4.convert_model(model)
    parameters = dict(model.named_parameters())
    report = zerofp4.convert_model(model)
    assert report.converted == []
    assert report.skipped["up"] == "its weight is an NVFP4Tensor already"
    assert all(p is parameters[name] for name, p in model.named_parameters())


def test_ties_and_shared_modules():
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(32, 32), "d": nn.Linear(32, 32)})
    model["d"].weight = nn.Parameter(model["c"].weight.detach())  # another Parameter of the same memory
    report = zerofp4.convert_model(model)
    assert report.converted == ["a"] and model["a"].weight is model["b"].weight
    assert report.skipped == {
        "c": "its weight is tied to d.weight",
        "d": "its weight is tied to c.weight",
    }


def test_weights_that_are_not_ordinary():
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
    model = nn.ModuleDict(
        {"norm": parametrized, "lazy": nn.LazyLinear(32), "wide": nn.Linear(32, 32).double()}
    )
    report = zerofp4.convert_model(model)
    assert report.converted == []
    assert report.skipped["norm"] == "its weight is not an ordinary parameter"
    assert report.skipped["lazy"] == "its weight is not an ordinary parameter"
    assert report.skipped["wide"].startswith("dtype torch.float64 is not one of")


def test_a_root_that_is_a_linear_layer():
    model = nn.Linear(32, 32)
    assert zerofp4.convert_model(model).converted == [""]
    assert isinstance(model.weight, zerofp4.NVFP4Tensor)


def test_meta_model_raises_before_anything_changes():
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32, device="meta")})
    with pytest.raises(RuntimeError, match="model: the weight of 'b' is on the meta device"):
        zerofp4.convert_model(model)
    assert type(model["a"].weight) is nn.Parameter


def test_a_converted_model_trains_like_one_with_dequantized_weights(device):
    torch.manual_seed(0)
    model = Model(torch.float32, device)
    zerofp4.convert_model(model)
    plain = Model(torch.float32, device)
    plain.load_state_dict(model.state_dict())
    tokens = torch.arange(20, device=device).view(2, 10)
    outputs = [m(tokens) for m in (model, plain)]
    assert_bytes_equal(outputs[0].detach(), outputs[1].detach(), "logits")
    for output in outputs:
        output.square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert type(p.grad) is torch.Tensor
        # The sums of a gradient run in another order.
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-5), name


def test_state_dict_of_a_converted_model_fits_a_converted_model(device):
    torch.manual_seed(0)
    source, target = Model(device=device), Model(device=device)
    for model in (source, target):
        zerofp4.convert_model(model)
    target.load_state_dict(source.state_dict())
    for (name, p), q in zip(target.named_parameters(), source.parameters(), strict=True):
        if isinstance(p, zerofp4.NVFP4Tensor):
            for (buffer_name, mine), (_, other) in zip(p.record.buffers(), q.record.buffers(), strict=True):
                assert_bytes_equal(mine, other, f"{name}.{buffer_name}")
        else:
            assert_bytes_equal(p.detach(), q.detach(), name)
