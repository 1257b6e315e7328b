"""convert_model: what is converted, what is not and why, and what the new parameters keep."""

import collections
import copy

import pytest
import torch
from cases.layers import Conv1D
from cases.ops import assert_record_equals
from helpers import assert_bytes_equal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

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
    report = zerofp4.convert_model(model, columnwise=True)
    assert report.converted == ["up", "down", "layers.0"]
    assert report.skipped == {
        "tokens.weight": "Embedding is not an nn.Linear",
        "layers.1.weight": "Scaled has a forward of its own",
        "odd.weight": "a weight of shape (33, 32) does not have two even sizes",
        "tied.weight": "it is tied to tokens.weight",
    }
    matrices = {name for name, p in model.named_parameters(remove_duplicate=False) if p.dim() >= 2}
    assert set(report.shares) == matrices
    total = sum(p.numel() for p in model.parameters())
    for name in matrices:
        names = 2 if name in ("tokens.weight", "tied.weight") else 1
        assert report.shares[name] == model.get_parameter(name).numel() / total / names
    assert report.share == (2 * 32 * 48 + 32 * 32) / total
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
    assert report.skipped["up.weight"] == report.skipped["down.weight"] == "filter_fn is false for it"


def test_converting_twice_changes_nothing():
    model = Model()
    share = zerofp4.convert_model(model).share
    parameters = dict(model.named_parameters())
    report = zerofp4.convert_model(model)
    assert report.converted == []
    assert report.skipped["up.weight"] == "it is an NVFP4Tensor already"
    assert all(p is parameters[name] for name, p in model.named_parameters())
    first, *left_out = str(report).splitlines()
    assert first.startswith("3 of 7 matrices are in NVFP4") and first.endswith("; 3 were before this call")
    assert report.share == share > 0 and not any("already" in line for line in left_out)


def test_ties_and_shared_modules():
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(32, 32), "d": nn.Linear(32, 32)})
    model["d"].weight = nn.Parameter(model["c"].weight.detach())  # another Parameter of the same memory
    report = zerofp4.convert_model(model)
    assert report.converted == ["a"] and model["a"].weight is model["b"].weight
    assert report.skipped == {
        "c.weight": "it is tied to d.weight",
        "d.weight": "it is tied to c.weight",
    }


def test_weights_that_are_not_ordinary():
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
    model = nn.ModuleDict(
        {"norm": parametrized, "lazy": nn.LazyLinear(32), "wide": nn.Linear(32, 32).double()}
    )
    report = zerofp4.convert_model(model)
    assert report.converted == []
    for original in ("original0", "original1"):
        reason = report.skipped[f"norm.parametrizations.weight.{original}"]
        assert reason == "ParametrizationList is not an nn.Linear"
    assert report.skipped["lazy.weight"] == "it is not an ordinary parameter, but of UninitializedParameter"
    assert report.skipped["wide.weight"].startswith("dtype torch.float64 is not one of")
    assert report.shares["lazy.weight"] == 0 and report.share == 0


class OwnConv1D(Conv1D):
    def forward(self, x):
        return -super().forward(x)


def test_conv1d_of_transformers(device):
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(64, 32), nn.GELU(), Conv1D(32, 64), OwnConv1D(32, 32)).to(device)
    plain = copy.deepcopy(model)
    report = zerofp4.convert_model(model)
    assert report.converted == ["0", "2"]
    assert report.skipped == {"3.weight": "OwnConv1D has a forward of its own"}
    assert model[0].weight.shape == (32, 64) and isinstance(model[0].weight, zerofp4.NVFP4Tensor)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(3, 5, 32, device=device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = model(x.requires_grad_())
    assert sum(isinstance(t, zerofp4.NVFP4Tensor) for t in kept) == 2, "products save the codes"
    assert_bytes_equal(y.detach(), plain(x).detach(), "outputs")
    y.square().sum().backward()
    gradient, x.grad = x.grad, None
    plain(x).square().sum().backward()
    # The sums of a gradient run in another order.
    torch.testing.assert_close(gradient, x.grad, rtol=1e-4, atol=1e-5)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 32, 64))


class WithHead(nn.Module):
    """Knows its own head, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.body, self.logits, self.lm_head = (nn.Linear(32, 32) for _ in range(3))

    def get_output_embeddings(self):
        return self.logits


def test_every_parameter_with_a_matrix_is_listed():
    model = nn.ModuleDict(
        {"experts": Experts(), "attention": nn.MultiheadAttention(32, 2), "conv": nn.Conv2d(2, 4, 3)}
    )
    report = zerofp4.convert_model(model)
    assert report.converted == ["attention.out_proj"]
    assert report.skipped == {
        "experts.gate_up_proj": "Experts is not an nn.Linear, and a stack of shape (4, 32, 64) "
        "is converted only where filter_fn is true for it",
        "attention.in_proj_weight": "MultiheadAttention is not an nn.Linear",
        "conv.weight": "Conv2d is not an nn.Linear, and shape (4, 2, 3, 3) is no matrix",
    }
    total = sum(p.numel() for p in model.parameters())
    assert report.shares["experts.gate_up_proj"] == 4 * 32 * 64 / total
    assert report.share == 32 * 32 / total
    extra = nn.Linear(32, 32)
    extra.lora = nn.Parameter(torch.zeros(32, 4))
    assert zerofp4.convert_model(extra).skipped == {"lora": "it is not the weight of Linear"}


class Copies(collections.UserDict):
    """Parameters of a module, of which an assigned one is copied into the old one, as compressed-tensors does
    when it offloads.
    """

    def __setitem__(self, name, parameter):
        if name in self.data:
            self.data[name].data.copy_(parameter)
        else:
            super().__setitem__(name, parameter)


def test_a_module_that_would_not_hold_the_new_parameter():
    """Its weight stays as it is, and is not said to be converted."""
    model = nn.ModuleDict({"held": nn.Linear(32, 32), "copied": nn.Linear(32, 32)})
    before = model["copied"].weight.detach().clone()
    model["copied"]._parameters = Copies(model["copied"]._parameters)
    report = zerofp4.convert_model(model)
    assert report.converted == ["held"] and report.share < 0.5
    reason = "Linear has its parameters in a Copies, which may not hold another: load it without offloading"
    assert report.skipped == {"copied.weight": reason}
    assert_bytes_equal(model["copied"].weight.detach(), before, "weight")


def test_a_module_that_holds_another_parameter():
    class Restores(nn.Linear):
        forward = nn.Linear.forward

        def __setattr__(self, name, value):
            super().__setattr__(name, getattr(self, name, value) if name == "weight" else value)

    with pytest.raises(RuntimeError, match="layer was given an NVFP4 weight and keeps another"):
        zerofp4.convert_model(nn.ModuleDict({"layer": Restores(32, 32)}))


def test_the_report_as_a_table():
    model = nn.ModuleDict({name: nn.Linear(32, 32, bias=False) for name in "abcdef"})
    report = zerofp4.convert_model(model, lambda module, name: name in "ef", layers=True)
    assert str(report).splitlines() == [
        "2 of 6 matrices are in NVFP4, 33.3% of the model's parameters; 2 layers of zerofp4.nn",
        "  left out  66.7%  a.weight, b.weight, c.weight and 1 more: filter_fn is false for it",
    ]
    norm = nn.LayerNorm(32)
    assert str(zerofp4.convert_model(norm)) == "0 of 0 matrices are in NVFP4, 0.0% of the model's parameters"


def test_the_output_head_is_converted_only_where_the_filter_says_so():
    named = nn.ModuleDict({"body": nn.Linear(32, 32), "lm_head": nn.Linear(32, 32)})
    head = "it is the output head, which is converted only where filter_fn is true for it"
    report = zerofp4.convert_model(nn.ModuleDict({"model": named}))
    assert report.converted == ["model.body"] and report.skipped == {"model.lm_head.weight": head}
    report = zerofp4.convert_model(WithHead())
    assert report.converted == ["body", "lm_head"] and report.skipped == {"logits.weight": head}
    report = zerofp4.convert_model(nn.ModuleDict({"wrapped": WithHead()}), lambda m, name: "body" not in name)
    assert report.converted == ["wrapped.logits", "wrapped.lm_head"]
    report = zerofp4.convert_model(WithHead(), lambda m, name: name == "body")
    assert report.skipped == {"logits.weight": head, "lm_head.weight": "filter_fn is false for it"}


@pytest.mark.parametrize(
    ("name", "is_named"), [("head", True), ("blocks.1.up", False), ("lm_head", False), ("frozen.2", True)]
)
def test_a_last_layer_that_may_be_the_output_head_is_named(name, is_named):
    """Not one of blocks that are alike, nor beside a head that the model names."""
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(32, 32)}) for _ in range(2))
    if name == "frozen.2":
        model.frozen = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    elif name != "blocks.1.up":
        model.add_module(name, nn.Linear(32, 32))
    filtered = zerofp4.convert_model(copy.deepcopy(model), lambda module, name: True)
    report = zerofp4.convert_model(model)
    assert (f"  converted  {name}: it may be the output head" in str(report)) == is_named
    assert report.possible_head == (name if is_named else None) and filtered.possible_head is None


def test_a_model_that_was_sharded_first_is_reported_and_warned_of(world_of_one):
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.warns(UserWarning, match=r"nothing was converted: '0.weight' was sharded before .*fsdp2"):
        report = zerofp4.convert_model(model)
    assert report.converted == [] and list(report.skipped) == ["0.weight", "1.weight"]
    assert all("it is a DTensor, sharded before" in reason for reason in report.skipped.values())


def test_a_model_inside_ddp_is_refused(world_of_one):
    model = DistributedDataParallel(nn.Linear(32, 32))
    with pytest.raises(ValueError, match="convert the model first, and then wrap it"):
        zerofp4.convert_model(model)
    assert type(model.module.weight) is nn.Parameter


def test_a_compiled_model_has_no_truth_value():
    """torch.compile gives it a __len__ that raises. Optimizers look for what they update in all models."""
    model = torch.compile(nn.Linear(32, 32))
    zerofp4.convert_model(model)
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    torch.optim.AdamW([other]).step()
    model.weight.requires_grad_(False)
    zerofp4.ZeroFP4Optimizer([model.bias], torch.optim.AdamW)
    assert model.weight.get_high_precision_init_val() is None


def test_a_root_that_is_a_linear_layer():
    model = nn.Linear(32, 32)
    assert zerofp4.convert_model(model).converted == [""]
    assert isinstance(model.weight, zerofp4.NVFP4Tensor)


def test_a_meta_model_gets_memory_after_it_is_converted():
    model = nn.ModuleDict({"a": nn.Linear(32, 48), "b": nn.Linear(48, 32)}).to("meta")
    groups = [[model["a"].weight, model["b"].weight]]
    assert zerofp4.convert_model(model, amax_groups=groups).converted == ["a", "b"]
    model.to_empty(device="cpu")
    for layer in model.values():
        assert isinstance(layer.weight, zerofp4.NVFP4Tensor) and not layer.weight.is_meta
        assert layer.weight.get_high_precision_init_val() is None
        layer.weight.detach().fill_(1.0)
        assert (layer.weight.dequantize() == 1).all()


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


# Experts in one parameter [E, N, K]


class Stacks(nn.Module):
    """As model libraries write them: one parameter for all experts, indexed or multiplied in one batch."""

    def __init__(self, device="cpu", dtype=torch.bfloat16):
        super().__init__()
        options = {"device": device, "dtype": dtype}
        self.up = nn.Parameter(
            0.1 * torch.randn(3, 48, 32, **options) * torch.tensor([1.0, 5.0, 0.2], **options).view(3, 1, 1)
        )
        self.down = nn.Parameter(0.1 * torch.randn(3, 32, 48, **options))
        self.odd = nn.Parameter(torch.randn(3, 5, 32, **options))
        self.deep = nn.Parameter(torch.randn(1, 3, 4, 32, **options))
        self.mixing = nn.Conv1d(32, 32, 2, **options)


def is_expert(module, name):
    return name.endswith(("up", "down", "odd", "deep", "mixing"))


def test_only_a_filter_takes_stacks():
    model = nn.ModuleDict({"mlp": Stacks()})
    report = zerofp4.convert_model(model)
    assert report.converted == [] and "only where filter_fn is true for it" in report.skipped["mlp.up"]
    seen = []

    def choose(module, name):
        seen.append(name)
        return is_expert(module, name) and name != "mlp.down"

    report = zerofp4.convert_model(model, choose)
    assert seen == ["mlp.up", "mlp.down"] and report.converted == ["mlp.up"]
    assert report.skipped["mlp.down"] == "filter_fn is false for it"
    assert report.skipped["mlp.odd"] == "a weight of shape (3, 5, 32) does not have two even sizes"
    for name in ("mlp.deep", "mlp.mixing.weight"):
        assert "is no matrix" in report.skipped[name]
    total = sum(p.numel() for p in model.parameters())
    assert report.share == 3 * 48 * 32 / total


def test_converted_stacks(device):
    model = Stacks(device)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert zerofp4.convert_model(model, is_expert, block=(16, 16)).converted == ["up", "down"]
    for name in ("up", "down"):
        weight = model.get_parameter(name)
        assert isinstance(weight, nn.Parameter) and weight.record.name == name and weight.amax.shape == (3,)
        assert_record_equals(weight.record, reference.quantize_experts(before[name]), name)
        assert_bytes_equal(weight.get_high_precision_init_val(), before[name].cpu(), "initial value")
