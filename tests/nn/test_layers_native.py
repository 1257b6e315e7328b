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
from zerofp4.nn.operators import _linear, _linear_gradients
from zerofp4.nn.quantizers import quantizers_of
from zerofp4.storage import BUFFERS

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


def step(module, x, recipe, first=None, main_grad=None) -> collections.Counter:
    """What the implementations of zerofp4::linear and its gradients call, with all that they are given."""
    weight, handle = module.weight, None
    is_primary = isinstance(weight, NVFP4Tensor)
    with Calls() as calls, autocast(recipe), torch.no_grad():
        if first is not None and not is_primary:
            handle = module._weight_cache.handle
            module._weight_cache.get(weight, quantizers_of(recipe.key, x.device), first)
        primary = [weight.record.buffer(name) for name in BUFFERS] if is_primary else []
        given = (None if is_primary else weight, primary, BF16, 448, recipe.key, handle)
        y, *kept = _linear(x, [], None, module.bias, *given, None, True, True)
        count = len(kept) if is_primary or handle is not None else len(kept) // 2
        x_kept, own = kept[:count], kept[count:]
        sums = main_grad, main_grad is not None
        grads = _linear_gradients(y, [], x_kept, x.shape[-1], own, *given, *sums, BF16, True, True)
    of_weight = torch.Size([0]) if main_grad is not None else weight.shape
    assert [each.shape for each in grads] == [x.shape, of_weight, module.bias.shape]
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
        assert calls["scaled_product"] == 3, calls
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
        assert calls["scaled_product"] == 3 and calls["pad_scale"] == 0 and calls["quantize"] == 2
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
    """Their shapes: what they compute are the products of Linear."""
    recipe, options = RECIPES[name], {"dtype": BF16, "device": "meta"}
    modules = [(LayerNormLinear(64, 96, **options), (8, 64), ())]
    for activation in ("gelu", "relu2", "swiglu", "geglu"):
        module = LayerNormMLP(64, 96, normalization="RMSNorm", activation=activation, **options)
        modules.append((module, (2, 4, 64), ()))
    modules.append((GroupedLinear(3, 64, 96, **options), (33, 64), ([16, 1, 16],)))
    for module, shape, arguments in modules:
        x = meta(*shape)
        with autocast(recipe):
            y = module(x, *arguments)
            y.backward(torch.empty_like(y))
        assert x.grad.shape == x.shape
        assert all(p.grad.shape == p.shape for p in module.parameters())


def test_accumulation_into_main_grad():
    module = Linear(64, 96, dtype=BF16, device="meta", fuse_wgrad_accumulation=True)
    main_grad = module.weight.main_grad = torch.zeros(96, 64, device="meta")
    calls = step(module, meta(8, 64), RECIPES["nvfp4"], main_grad=main_grad)
    assert (calls["scaled_product"], calls["add_scaled_product"]) == (2, 1)
    with autocast(RECIPES["nvfp4"]):
        module(meta(8, 64)).backward(torch.empty(8, 96, dtype=BF16, device="meta"))
    assert module.weight.grad is None


def test_cpu_tensors_are_refused():
    with autocast(RECIPES["nvfp4"]), pytest.raises(RuntimeError, match="backend 'native' cannot run"):
        Linear(64, 96, dtype=BF16)(values(8, 64))
