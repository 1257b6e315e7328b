"""LayerNormLinear and LayerNormMLP: torch's normalization and activations around reference products."""

import copy

import pytest
import torch
from cases.layers import RECIPES, linear, step
from cases.nodes import assert_named_equal
from tensor_helpers import values
from torch import nn
from torch.nn import functional as F

import zerofp4
from zerofp4 import ops
from zerofp4.nn import LayerNormLinear, LayerNormMLP, autocast

BF16 = torch.bfloat16
NORMS = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}
ACTIVATIONS = {
    "gelu": F.gelu,
    "relu2": lambda x: F.relu(x) * F.relu(x),
    "swiglu": lambda x: F.silu(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :],
    "geglu": lambda x: F.gelu(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :],
}
SOME = ["nvfp4", "nvfp4, no transform", "nvfp4, dequantized", "mxfp8"]


def randomized(module):
    """The parameters of the normalization too."""
    torch.manual_seed(3)
    for parameter in module.norm.parameters():
        nn.init.normal_(parameter, 1, 0.2)
    return module


def train(module, x, grad, recipe, first=None):
    names = "y", "x", *dict(module.named_parameters())
    return dict(zip(names, step(module, module, recipe, x, first, grad=grad), strict=True))


def states(count):
    torch.manual_seed(7)
    return [ops.draw_rng_state(torch.device("cpu"), None) for _ in range(count)]


def through(function, x, recipe, layer, state):
    """(y, a function of y's gradient and results that goes back) of layer(function(x)), by the reference."""
    inner = x.detach().clone().requires_grad_()
    hidden = function(inner)
    weight, bias = layer.weight.detach(), layer.bias.detach()

    def forward_and_back(grad):
        y, dh, dw, db = linear(recipe, hidden.detach(), weight, bias, grad, state)
        hidden.backward(dh)
        return y, inner.grad, dw, db

    y = linear(recipe, hidden.detach(), weight, bias, torch.zeros(len(x), len(weight), dtype=x.dtype), state)[
        0
    ]
    return y, forward_and_back


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("normalization", NORMS)
def test_linear_is_the_composition(name, normalization):
    recipe = RECIPES[name]
    module = randomized(LayerNormLinear(50, 34, dtype=BF16, normalization=normalization, eps=1e-3))
    assert isinstance(module.norm, NORMS[normalization]) and module.norm.eps == 1e-3
    x, grad = values(18, 50, seed=1), values(18, 34, seed=2)
    norm = copy.deepcopy(module.norm)
    norm.zero_grad()
    _, back = through(norm, x, recipe, module.linear, states(1)[0])
    y, dx, dw, db = back(grad)
    expected = {"y": y, "x": dx, "linear.weight": dw, "linear.bias": db}
    expected |= {f"norm.{key}": p.grad for key, p in norm.named_parameters()}
    for first in (None, True, False):
        assert_named_equal(train(module, x, grad, recipe, first), expected)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp_is_the_composition(name, activation):
    recipe = RECIPES[name]
    module = randomized(LayerNormMLP(34, 50, dtype=BF16, normalization="RMSNorm", activation=activation))
    x, grad = values(18, 34, seed=1), values(18, 34, seed=2)
    norm = copy.deepcopy(module.norm)
    second, first = states(2)  # the backward pass begins with fc2
    wide, back1 = through(norm, x, recipe, module.fc1, first)
    _, back2 = through(ACTIVATIONS[activation], wide, recipe, module.fc2, second)
    y, d_wide, dw2, db2 = back2(grad)
    _, dx, dw1, db1 = back1(d_wide)
    expected = {"y": y, "x": dx, "fc1.weight": dw1, "fc1.bias": db1, "fc2.weight": dw2, "fc2.bias": db2}
    expected["norm.weight"] = norm.weight.grad
    for cached in (None, True, False):
        assert_named_equal(train(module, x, grad, recipe, cached), expected)


def test_outside_they_are_ordinary_layers():
    module = LayerNormMLP(32, 64, activation="swiglu")
    x = values(4, 32, dtype=torch.float32)
    hidden = F.linear(
        F.layer_norm(x, (32,), module.norm.weight, module.norm.bias), module.fc1.weight, module.fc1.bias
    )
    expected = F.linear(F.silu(hidden[:, :64]) * hidden[:, 64:], module.fc2.weight, module.fc2.bias)
    torch.testing.assert_close(module(x), expected)
    assert "activation='swiglu'" in repr(module)


def test_primary_weights_and_converted_ones():
    torch.manual_seed(0)
    module = LayerNormMLP(32, 64, dtype=BF16, primary_weights=True)
    torch.manual_seed(0)
    other = LayerNormMLP(32, 64, dtype=BF16)
    x, grad = values(16, 32), values(16, 32, seed=1)
    expected = train(other, x, grad, RECIPES["nvfp4"])
    assert_named_equal(train(module, x, grad, RECIPES["nvfp4"]), expected)
    assert zerofp4.convert_model(other).converted == ["fc1", "fc2"]
    assert_named_equal(train(other, x, grad, RECIPES["nvfp4"]), expected)


def test_saved_activations_have_no_copy_of_the_normalized_input():
    module, x = LayerNormLinear(256, 256, dtype=BF16), values(256, 256).requires_grad_()
    shapes = []
    with (
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: shapes.append((t.dtype, tuple(t.shape), t.data_ptr())) or t, lambda t: t
        ),
        autocast(RECIPES["nvfp4"]),
    ):
        module(x)
    wide = {address for dtype, shape, address in shapes if dtype == BF16 and shape == (256, 256)}
    assert wide == {x.data_ptr()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LayerNormLinear(4, 4, normalization="BatchNorm"),
            "normalization must be one of .* got 'B",
        ),
        (lambda: LayerNormMLP(4, 4, normalization="layernorm"), "normalization must be one of"),
        (lambda: LayerNormMLP(4, 4, activation="relu"), r"activation must be one of \('gelu', .* got 'relu'"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()
