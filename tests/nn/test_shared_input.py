"""quantize_input: several layers take one quantized input, and compute what they compute without."""

import pytest
import torch
from cases.layers import RECIPES, step
from helpers import assert_all_equal, assert_bytes_equal
from tensor_helpers import values
from torch import nn

import zerofp4
from zerofp4.nn import Linear, MXFP8Recipe, NVFP4Recipe, autocast, quantize_input
from zerofp4.nn.quantizers import Quantizers


class Projections(nn.Module):
    def __init__(self, device="cpu", **options):
        super().__init__()
        torch.manual_seed(0)
        options |= {"dtype": torch.bfloat16, "device": device}
        self.q, self.k = Linear(64, 48, **options), Linear(64, 16, bias=False, **options)
        self.v = Linear(64, 16, **options)

    def forward(self, x, shared=True):
        x = quantize_input(x) if shared else x
        return torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(32, 64), (2, 10, 64), (3, 7, 64)], ids=str)
def test_bytes_are_those_of_three_inputs(device, name, shape):
    module, x = Projections(device), values(*shape, device=device)
    alone = step(module, module, RECIPES[name], x, False)
    assert_all_equal(step(module, module, RECIPES[name], x, True), alone)


@pytest.mark.parametrize("primary", [False, True])
def test_it_is_quantized_and_saved_once(monkeypatch, primary):
    module, x = Projections(primary_weights=primary), values(256, 64).requires_grad_()
    record, roles, saved = Quantizers.record, [], {}
    monkeypatch.setattr(
        Quantizers, "record", lambda self, role, *a, **kw: roles.append(role) or record(self, role, *a, **kw)
    )

    def pack(tensor):
        saved[tensor.data_ptr()] = tensor.shape
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast(RECIPES["nvfp4"]):
        module(x).sum().backward()
    assert roles.count("input") == 1  # C++ quantizes the gradients
    assert list(saved.values()).count((64, 128)) == 1  # codes of the columnwise copy


def test_without_gradients():
    module, x = Projections(), values(17, 64)
    with torch.no_grad(), autocast(NVFP4Recipe(hadamard=False)):
        assert quantize_input(x).columnwise_data is None
        assert_bytes_equal(module(x), module(x, False), "y")


def test_outside_of_autocast_it_is_x():
    module, x = Projections(), values(16, 64)
    assert quantize_input(x) is x
    assert torch.equal(module(x), module(x, False))
    with autocast(RECIPES["nvfp4"]):
        once = quantize_input(x)
        assert quantize_input(once) is once


def test_torch_autocast_gives_the_dtype():
    module, x = Projections(), values(16, 64, dtype=torch.float32)
    with autocast(RECIPES["nvfp4"]), torch.autocast("cpu", torch.bfloat16):
        assert_bytes_equal(module(x), module(x, False), "y")


@pytest.mark.heavy
def test_a_compiled_model_gives_the_same_bytes(device):
    module, x = Projections(device), values(32, 64, device=device)
    expected = step(module, module, RECIPES["nvfp4"], x, True)
    run = torch.compile(module, fullgraph=True, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    with autocast(RECIPES["nvfp4"]):
        y = run(leaf)
    assert_bytes_equal(y.detach(), expected[0], "y")


def test_recipes_of_modules_are_those_of_the_layer():
    module, x = Projections(), values(16, 64)
    with autocast(NVFP4Recipe(modules=[("[qkv]", MXFP8Recipe())]), module):
        assert isinstance(quantize_input(x, module.q), zerofp4.MXFP8Tensor)
        with pytest.raises(ValueError, match="x is quantized, but not as the recipe does it"):
            module.q(quantize_input(x))


def test_what_a_layer_refuses():
    layer = Projections().q
    x = values(16, 64).requires_grad_()
    with autocast(RECIPES["nvfp4"]):
        for options in ({}, {"block": (1, 16)}, {"block": (1, 16), "four_over_six": zerofp4.FourOverSix()}):
            with pytest.raises(ValueError, match="x is quantized, but not as the recipe does it"):
                layer(zerofp4.quantize(x, columnwise=True, **options))
        with torch.no_grad():
            rows = quantize_input(x)
        with pytest.raises(ValueError, match="x is quantized, but not as the recipe does it"):
            layer(rows)
        with pytest.raises(ValueError, match="x must have 64 values in its last dimension"):
            layer(zerofp4.quantize(values(16, 32), block=(1, 16)))
    with (
        autocast(NVFP4Recipe(hadamard=False)),
        pytest.raises(ValueError, match="must have a columnwise copy"),
    ):
        layer(rows)
