"""Layers over the native backend, as far as meta tensors go: which operators a forward and a backward pass
call, with which operands, is checked there; what they compute is not.
"""

import collections

import pytest
import torch
from tensor_helpers import values
from torch.utils._python_dispatch import TorchDispatchMode

from zerofp4 import NVFP4Tensor, ops
from zerofp4.nn import (
    GroupedLinear,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MXFP8Recipe,
    NVFP4Recipe,
    autocast,
)

BF16 = torch.bfloat16
RECIPES = {
    "nvfp4": NVFP4Recipe(backend="native"),
    "nvfp4, no transform": NVFP4Recipe(backend="native", hadamard=False),
    "mxfp8": MXFP8Recipe(backend="native"),
}
# In, out: sizes that scaled_mm takes, and sizes that have to be padded.
SIZES = [(64, 128), (50, 34), (288, 1030)]


class Calls(TorchDispatchMode):
    """How often each operator was called, by its name."""

    def __init__(self):
        super().__init__()
        self.names = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.name().partition(".")[0].partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def step(module, x, recipe, *arguments) -> collections.Counter:
    with Calls() as calls, autocast(recipe):
        y = module(x, *arguments)
        y.backward(torch.empty_like(y))
    assert x.grad.shape == x.shape
    assert all(p.grad.shape == p.shape for p in module.parameters())
    return calls.names


def meta(*shape):
    return torch.empty(shape, dtype=BF16, device="meta", requires_grad=True)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("tokens", [1, 17, 128])
def test_three_products_and_no_swizzle(tokens, sizes, name):
    """Quantization writes scales in the layout that products read."""
    module = Linear(*sizes, dtype=BF16, device="meta")
    for first in (None, True, False):
        calls = step(module, meta(tokens, sizes[0]), RECIPES[name], first)
        assert calls["_scaled_mm_v2"] == 3, calls
        assert calls["pad_scale"] == 0 and calls["dequantize"] == 0 and calls["dequantize_mxfp8"] == 0
        quantized = calls["quantize"] + calls["quantize_mxfp8"]
        assert quantized == (
            2 if first is False else 3
        )  # x, the gradient, and the weight unless it is cached


def test_primary_weights_have_the_scales_that_products_read(monkeypatch):
    """Made where there are FP4 tensor cores, they get swizzled scales, which the cast then writes."""
    monkeypatch.setattr(ops, "has_fp4_tensor_cores", lambda device: True)
    module = Linear(64, 128, dtype=BF16, primary_weights=True)
    assert module.weight.rowwise_scale_swizzled is not None
    assert module.weight.columnwise_scale_swizzled is not None
    record = module.weight.record.map(lambda buffer: buffer.to("meta"))
    module.weight = torch.nn.Parameter(NVFP4Tensor(record))
    module.bias = torch.nn.Parameter(torch.empty(128, dtype=BF16, device="meta"))
    for first in (None, True, False):
        calls = step(module, meta(32, 64), RECIPES["nvfp4"], first)
        assert calls["_scaled_mm_v2"] == 3 and calls["pad_scale"] == 0 and calls["quantize"] == 2
    monkeypatch.undo()
    assert Linear(64, 128, primary_weights=True).weight.rowwise_scale_swizzled is None


@pytest.mark.parametrize("name", RECIPES)
def test_saved_operands_keep_one_layout_of_scales(name):
    module, x = Linear(64, 128, dtype=BF16, device="meta"), meta(256, 64)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        with autocast(RECIPES[name]):
            module(x)
    per_operand = 2 if name == "mxfp8" else 3  # codes, scales, an amax
    assert len(saved) == 2 * per_operand
    codes, scales = saved[:2]
    assert codes.numel() == 256 * 64 // (1 if name == "mxfp8" else 2)
    assert scales.numel() == 128 * (8 if name == "mxfp8" else 16)  # of [64, 256], padded to atoms


@pytest.mark.parametrize("name", RECIPES)
def test_the_other_layers(name):
    recipe, options = RECIPES[name], {"dtype": BF16, "device": "meta"}
    assert step(LayerNormLinear(64, 96, **options), meta(8, 64), recipe)["_scaled_mm_v2"] == 3
    for activation in ("gelu", "relu2", "swiglu", "geglu"):
        module = LayerNormMLP(64, 96, normalization="RMSNorm", activation=activation, **options)
        assert step(module, meta(2, 4, 64), recipe)["_scaled_mm_v2"] == 6
    assert step(GroupedLinear(3, 64, 96, **options), meta(33, 64), recipe, [16, 1, 16])["_scaled_mm_v2"] == 9


def test_accumulation_into_main_grad():
    module = Linear(64, 96, dtype=BF16, device="meta", fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros(96, 64, device="meta")
    x = meta(8, 64)
    with Calls() as calls, autocast(RECIPES["nvfp4"]):
        module(x).backward(torch.empty(8, 96, dtype=BF16, device="meta"))
    assert calls.names["_scaled_mm_v2"] == 3 and module.weight.grad is None


def test_cpu_tensors_are_refused():
    with autocast(RECIPES["nvfp4"]), pytest.raises(RuntimeError, match="backend 'native' cannot run"):
        Linear(64, 96, dtype=BF16)(values(8, 64))
