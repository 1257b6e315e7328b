"""convert_model(layers=True) with a filter that takes norms: what they become with the layers behind them."""

import copy
import pickle

import pytest
import torch
from cases.layers import RECIPES, step
from cases.nodes import assert_named_equal
from helpers import assert_all_equal, assert_bytes_equal
from tensor_helpers import values
from torch import nn

import zerofp4
from zerofp4 import NVFP4Tensor
from zerofp4.nn import LayerNormLinear, LayerNormMLP, Linear, autocast

NORMS = {
    "LayerNorm": nn.LayerNorm,
    "RMSNorm": nn.RMSNorm,
    "LayerNorm without bias": lambda *args, **options: nn.LayerNorm(*args, bias=False, **options),
    "LayerNorm without weight": lambda *args, **options: nn.LayerNorm(
        *args, elementwise_affine=False, **options
    ),
    "RMSNorm without weight": lambda *args, **options: nn.RMSNorm(*args, elementwise_affine=False, **options),
}


class ReLUSquaredActivation(nn.Module):
    def forward(self, x):
        return torch.square(nn.functional.relu(x))


ReLUSquaredActivation.__module__ = "transformers.activations"  # which are known by their names
ACTIVATIONS = {"gelu": nn.GELU, "relu2": ReLUSquaredActivation}


def model(device="cpu", norm="LayerNorm", activation="gelu"):
    """A LayerNormMLP, a LayerNormLinear, and a linear layer with no norm before it."""
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16, "device": device}
    module = nn.Sequential(
        nn.Sequential(
            NORMS[norm](64, eps=1e-3, **options),
            nn.Linear(64, 96, **options),
            ACTIVATIONS[activation](),
            nn.Linear(96, 64, bias=False, **options),
        ),
        NORMS[norm](64, **options),
        nn.Linear(64, 32, **options),
        nn.Linear(32, 64, **options),
    )
    for each in module.modules():
        if isinstance(each, nn.LayerNorm | nn.RMSNorm):
            for parameter in each.parameters():
                nn.init.normal_(parameter, 1, 0.2)
    return module


NEW = {
    "0.0": "0.0.norm",
    "0.1": "0.0.fc1",
    "0.3": "0.0.fc2",
    "1": "1.norm",
    "2": "1.linear",
    "3": "3",
}
"""Where a fused model has the modules of that model."""


def everything(module, name):
    return True


def linears(module, name):
    return isinstance(module, nn.Linear)


def both(device="cpu", **options):
    """The same model, converted and not fused, and fused."""
    found = []
    for filter_fn in (linears, everything):
        module = model(device, **options)
        report = zerofp4.convert_model(module, filter_fn, layers=True)
        found.append(module)
    return *found, report


def renamed(key):
    name, _, leaf = key.rpartition(".")
    return f"{NEW[name]}.{leaf}"


def trained(module, recipe, x, rename=lambda key: key):
    """y of a step, and gradients by name."""
    names = map(rename, dict(module.named_parameters()))
    return dict(zip(("y", "x", *names), step(module, module, recipe, x), strict=True))


@pytest.mark.parametrize("norm", NORMS)
def test_what_is_fused_has_the_values_and_the_report_the_names(norm):
    module = model(norm=norm)
    before = {renamed(name): p.detach().clone() for name, p in module.named_parameters()}
    norms, last = (module[0][0], module[1]), module[3]
    report = zerofp4.convert_model(module, everything, layers=True)
    assert report.converted == report.layers == ["0.0.fc1", "0.0.fc2", "1.linear", "3"]
    assert report.fused == {"0.0": ["0.0", "0.1", "0.2", "0.3"], "1": ["1", "2"]} and report.unfused == {}
    assert set(report.shares) == {f"{name}.weight" for name in report.converted}
    assert report.share == sum(report.shares.values()) > 0.9
    mlp, linear = module[0][0], module[1]
    assert (type(mlp), type(linear)) == (LayerNormMLP, LayerNormLinear) and mlp.activation == "gelu"
    assert [type(each) for each in (*module[0][1:], module[2])] == [nn.Identity] * 4
    assert (mlp.norm, linear.norm, module[3]) == (*norms, last)
    assert all(type(module.get_submodule(name)) is Linear for name in report.layers)
    assert set(dict(module.named_parameters())) == set(before)
    for name, p in module.named_parameters():
        if isinstance(p, NVFP4Tensor):
            assert p.record.name == name.removesuffix(".weight")
            p = p.get_high_precision_init_val()
        assert_bytes_equal(p.detach(), before[name], name)
    assert_bytes_equal(
        mlp.fc1.weight.rowwise_data, zerofp4.quantize(before["0.0.fc1.weight"]).rowwise_data, ""
    )


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4, dequantized", None])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm", NORMS)
def test_outputs_and_gradients_have_the_bytes_of_the_modules(device, norm, activation, name):
    plain, fused, _ = both(device, norm=norm, activation=activation)
    given = RECIPES[name] if name else None, values(32, 64, device=device)
    assert_named_equal(trained(fused, *given), trained(plain, *given, renamed))


def test_state_dicts_have_the_names_of_the_layers():
    plain, fused, _ = both()
    other = both()[1]
    for p in other.parameters():
        p.data.zero_()
    other.load_state_dict(fused.state_dict())
    x = values(16, 64)
    assert_bytes_equal(other(x), fused(x), "y")
    with pytest.raises(
        RuntimeError, match=r'(?s)Missing key.*"0.0.norm.weight".*Unexpected key.*"0.0.weight"'
    ):
        fused.load_state_dict(plain.state_dict())
    zerofp4.register_plain_state_dict(fused)
    assert all(type(value) is torch.Tensor for value in fused.state_dict().values())
    other.load_state_dict(fused.state_dict())


def test_unconverted_they_are_layers_of_ordinary_parameters():
    plain, fused, _ = both()
    names = zerofp4.unconvert_model(fused)
    assert names == ["0.0.fc1.weight", "0.0.fc2.weight", "1.linear.weight", "3.weight"]
    zerofp4.unconvert_model(plain)
    assert type(fused[0][0]) is LayerNormMLP and not isinstance(fused[0][0].fc1.weight, NVFP4Tensor)
    for name, p in plain.named_parameters():
        assert_bytes_equal(fused.get_parameter(renamed(name)).detach(), p.detach(), name)
    given = RECIPES["nvfp4"], values(16, 64)
    assert_named_equal(trained(fused, *given), trained(plain, *given, renamed))
    report = zerofp4.convert_model(fused, everything, layers=True)
    assert report.converted == ["0.0.fc1", "0.0.fc2", "1.linear", "3"]
    assert (report.fused, report.unfused) == ({}, {})


def test_copies_and_modes(device):
    _, fused, _ = both(device)
    fused.eval()
    x = values(16, 64, device=device)
    with autocast(RECIPES["nvfp4"]), torch.no_grad():
        y = fused(x)
        for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
            assert_bytes_equal(other(x), y, "y")
    module = model(device).eval()
    zerofp4.convert_model(module, everything, layers=True)
    assert not any(each.training for each in module.modules())


def test_without_layers_or_without_a_filter_nothing_is_fused():
    for options in ({"layers": True}, {"filter_fn": everything}, {"filter_fn": linears, "layers": True}):
        module = model()
        keys = list(module.state_dict())
        report = zerofp4.convert_model(module, **options)
        assert report.fused == {} and list(module.state_dict()) == keys
        asked = "filter_fn" in options and "layers" in options
        assert report.unfused == ({"0.0": REFUSED, "1": REFUSED} if asked else {})


REFUSED = "filter_fn is false for it"


@pytest.mark.parametrize(
    ("refused", "fused", "unfused"),
    [
        ("0.0", {"1": ["1", "2"]}, {"0.0": REFUSED}),
        ("0.1", {"1": ["1", "2"]}, {"0.0": "no nn.Linear that is converted follows it"}),
        ("0.2", {"0.0": ["0.0", "0.1"], "1": ["1", "2"]}, {}),
        ("0.3", {"0.0": ["0.0", "0.1"], "1": ["1", "2"]}, {}),
        ("2", {"0.0": ["0.0", "0.1", "0.2", "0.3"]}, {"1": "no nn.Linear that is converted follows it"}),
    ],
)
def test_a_filter_that_refuses_one_of_them(refused, fused, unfused):
    results = []
    for chosen in (lambda module, name: linears(module, name) and name != refused, lambda _, n: n != refused):
        module = model()
        report = zerofp4.convert_model(module, chosen, layers=True)
        results.append(step(module, module, RECIPES["nvfp4"], values(32, 64))[:2])
    assert (report.fused, report.unfused) == (fused, unfused)
    assert_all_equal(*results)


def hook(*arguments):
    return None


@pytest.mark.parametrize("name", ["0.0", "0.1", "0.2", "0.3"])
@pytest.mark.parametrize(
    "register",
    [
        nn.Module.register_forward_hook,
        nn.Module.register_forward_pre_hook,
        nn.Module.register_full_backward_hook,
        nn.Module.register_state_dict_post_hook,
    ],
)
def test_modules_with_hooks_stay(register, name):
    module = model()
    register(module.get_submodule(name), hook)
    report = zerofp4.convert_model(module, everything, layers=True)
    if name in ("0.0", "0.1"):
        assert report.unfused == {"0.0": f"{name!r} has hooks"} and type(module[0][0]) is nn.LayerNorm
    else:
        assert report.fused["0.0"] == ["0.0", "0.1"]
    assert report.fused["1"] == ["1", "2"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)
        self.rest = nn.Sequential(nn.LayerNorm((2, 32)), nn.Flatten(-2), nn.Linear(64, 64))

    def forward(self, x):
        return self.rest(self.linear(self.norm(x)).unflatten(-1, (2, 32)))


class Subclass(nn.LayerNorm):
    pass


def test_what_cannot_be_fused_is_reported():
    module = Block()
    report = zerofp4.convert_model(module, everything, layers=True)
    assert report.converted == ["linear", "rest.2"] and report.fused == {}
    assert report.unfused == {
        "norm": "Block has a forward of its own, which would have to call another layer",
        "rest.0": "no nn.Linear that is converted follows it",
    }
    shared = nn.LayerNorm(64)
    watched = nn.Linear(64, 64)
    watched.forward = lambda x: x
    module = nn.Sequential(
        *(nn.LayerNorm((2, 64)), nn.Linear(64, 64)),
        *(shared, nn.Linear(64, 64), shared, nn.Linear(64, 64)),
        *(Subclass(64), nn.Linear(64, 64)),
        *(nn.LayerNorm(64), watched),
        *(nn.LayerNorm(64), nn.Linear(64, 33)),
        nn.LayerNorm(33),
    )
    report = zerofp4.convert_model(module, everything, layers=True)
    assert report.fused == {}
    assert report.unfused == {
        "0": "it normalizes (2, 64), and '1' takes 64",
        "2": "'2' is used in several places",
        "4": "'4' is used in several places",
        "8": "'9' has a forward of its own",
        "10": "no nn.Linear that is converted follows it",
        "12": "no nn.Linear that is converted follows it",
    }


@pytest.mark.parametrize("make", [lambda: nn.GELU(approximate="tanh"), nn.ReLU, nn.SiLU, nn.Identity])
def test_other_activations_and_sizes_end_the_layer_before(make):
    sizes = (64, 96, 96, 64)
    for activation, (size, wide, narrow, out) in ((make(), sizes), (nn.GELU(), (64, 96, 96, 32))):
        module = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, wide), activation, nn.Linear(narrow, out))
        plain = copy.deepcopy(module)
        report = zerofp4.convert_model(module, everything, layers=True)
        assert report.fused == {"0": ["0", "1"]} and module[2] is activation
        zerofp4.convert_model(plain, linears, layers=True)
        x = values(16, 64, dtype=torch.float32)
        assert_bytes_equal(module(x), plain(x), "y")
