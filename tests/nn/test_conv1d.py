"""Conv1D, which convert_model makes of the layer of that name in transformers: the bytes of a Linear of its
transpose.
"""

import copy
import pickle

import pytest
import torch
from cases.layers import RECIPES, Conv1D, step
from helpers import assert_all_equal, assert_bytes_equal
from tensor_helpers import values
from torch import nn

import zerofp4
from zerofp4.nn import Linear, MXFP8Recipe, NVFP4Recipe, autocast, quantize_input

NAMES = ["nvfp4", "nvfp4, no transform", "nvfp4, dequantized"]


def made(nf, nx, device):
    layer = Conv1D(nf, nx).to(device, torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(values(nx, nf))
        layer.bias.copy_(values(nf, seed=1))
    return layer


def pair(device, columnwise=True):
    """A converted Conv1D, and a converted Linear of the transpose."""
    turned, linear = made(48, 64, device), nn.Linear(64, 48, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.copy_(turned.weight.t())
        linear.bias.copy_(turned.bias)
    models = nn.Sequential(turned), nn.Sequential(linear)
    for model in models:
        report = zerofp4.convert_model(model, layers=True, columnwise=columnwise)
        assert report.layers == report.converted == ["0"]
    assert type(turned) is zerofp4.nn.Conv1D and type(linear) is Linear
    return turned, linear


def test_its_columns_are_kept(device):
    """Its forward pass reads them, also in exact products."""
    turned, linear = pair(device, columnwise=None)
    assert turned.weight.columnwise_data is not None
    reads = zerofp4.ops.has_fp4_tensor_cores(torch.device(device))
    assert (linear.weight.columnwise_data is not None) == reads


@pytest.mark.parametrize("columnwise", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_a_linear_layer(device, name, columnwise):
    turned, linear = pair(device, columnwise)
    for shape in ((32, 64), (2, 18, 64), (17, 64)):
        x = values(*shape, device=device)
        found, expected = (step(layer, layer, RECIPES[name], x) for layer in (turned, linear))
        found[2] = found[2].t().contiguous()
        assert_all_equal(found, expected)


def test_outside_of_autocast_and_back(device):
    turned, _ = pair(device)
    plain, x = made(48, 64, device), values(4, 5, 64, device=device)
    plain.load_state_dict({"weight": turned.weight.dequantize(), "bias": turned.bias})
    assert_bytes_equal(turned(x).detach(), plain(x).detach(), "y")
    again = pickle.loads(pickle.dumps(copy.deepcopy(turned)))
    assert type(again) is zerofp4.nn.Conv1D
    with autocast(RECIPES["nvfp4"]):
        assert_bytes_equal(again(x).detach(), turned(x).detach(), "a copy")
    model = nn.Sequential(turned)
    zerofp4.unconvert_model(model)
    with autocast(RECIPES["nvfp4"]):
        plain.load_state_dict(turned.state_dict())
        assert_bytes_equal(model(x).detach(), plain(x).detach(), "unconverted")


def test_one_input_for_several_layers(device):
    turned, linear = pair(device)
    x = values(32, 64, device=device).requires_grad_()
    with autocast(NVFP4Recipe(stochastic_rounding=False)):
        expected = turned(x) + linear(x)
        shared = quantize_input(x)
        assert_bytes_equal((turned(shared) + linear(shared)).detach(), expected.detach(), "y")


def test_errors(device):
    turned, _ = pair(device)
    with autocast(RECIPES["nvfp4"]):
        with pytest.raises(ValueError, match="x must have 64 values in its last dimension, got shape"):
            turned(values(4, 48, device=device))
        y = turned(values(32, 64, device=device).requires_grad_())
    with torch.no_grad():
        turned.weight.copy_(torch.ones(64, 48))
    with pytest.raises(RuntimeError, match="was written to between its forward and its backward pass"):
        y.sum().backward()
    with autocast(MXFP8Recipe()), pytest.raises(ValueError, match="which MXFP8Recipe cannot multiply"):
        turned(values(32, 64, device=device))


def test_a_filter_and_subclasses(device):
    class Own(Conv1D):
        """May have more than what it computes."""

    model = nn.Sequential(made(64, 32, device), Own(32, 64).to(device, torch.bfloat16))
    report = zerofp4.convert_model(model, lambda module, name: name != "0", layers=True)
    assert report.converted == ["1"] and report.layers == []
    assert report.skipped["0.weight"] == "filter_fn is false for it"
    assert zerofp4.convert_model(model, layers=True).layers == ["0"]
