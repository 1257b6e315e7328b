"""The node of F.linear in zerofp4._autograd: what it multiplies itself, an NVFP4 weight with what is plain,
has the bytes of what it leaves to Python, as under a dispatch mode.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases.nodes import Mode, assert_named_equal
from tensor_helpers import DTYPES, VIEWS, make, values
from torch import nn
from torch.nn import functional as F

import zerofp4

FORMATS = {
    "16x16": {},
    "1x16": {"block": (1, 16)},
    "columnwise only": {"rowwise": False},
    "four over six": {"four_over_six": zerofp4.FourOverSix()},
    "hadamard": {"block": (1, 16), "hadamard": True},
}
SHAPES = {"2D": (6, 80), "3D": (2, 3, 80), "1D": (80,), "no rows": (0, 80)}


def by_both(run: Callable) -> tuple:
    """What run() returns with products in C++ and in Python."""
    native = run()
    with Mode():
        return native, run()


def assert_same(run: Callable) -> None:
    """run() gives tensors by name, None among them: of the same bytes by both."""
    assert_named_equal(*by_both(run))


class Product:
    """F.linear of leaves that are made anew for each run, since both runs leave gradients in them."""

    def __init__(self, device, x=(6, 80), bias=True, dtype=torch.bfloat16, **options):
        self.x = values(*x, device=device, dtype=dtype)
        self.quantized = zerofp4.quantize(
            values(48, 80, device=device, dtype=dtype, seed=1), **{"columnwise": True, **options}
        )
        self.bias = values(48, device=device, dtype=dtype, seed=2) if bias else None
        self.grad = values(*x[:-1], 48, device=device, dtype=dtype, seed=3)

    def leaves(self) -> dict[str, torch.Tensor | None]:
        made = {"x": self.x.clone(), "weight": nn.Parameter(self.quantized)}
        made["bias"] = None if self.bias is None else self.bias.clone()
        for leaf in made.values():
            if leaf is not None:
                leaf.requires_grad_()
        return made

    def run(self) -> dict[str, torch.Tensor | None]:
        leaves = self.leaves()
        y = F.linear(*leaves.values())
        y.backward(self.grad)
        return {"y": y, **gradients_of(leaves)}


def gradients_of(leaves) -> dict[str, torch.Tensor | None]:
    return {name: None if leaf is None else leaf.grad for name, leaf in leaves.items()}


# Bytes


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes(device, dtype, bias, shape, format):
    assert_same(Product(device, SHAPES[shape], bias, dtype, **FORMATS[format]).run)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("bias", [True, False])
def test_memory_out_of_order(device, view, bias):
    product = Product(device, (34, 80), bias)

    def run():
        leaves = product.leaves()
        y = F.linear(VIEWS[view](leaves["x"]), leaves["weight"], leaves["bias"])
        y.sum().backward()  # a gradient of one element
        return {"y": y, **gradients_of(leaves)}

    assert_same(run)


def test_python_dequantizes_nothing(device, monkeypatch):
    """Nor does the thread of a GPU that goes back through the graph."""
    found, original = [], zerofp4.NVFP4Tensor._values_of

    def counting(record, dtype):
        found.append(dtype)
        return original(record, dtype)

    monkeypatch.setattr(zerofp4.NVFP4Tensor, "_values_of", staticmethod(counting))
    native, python = by_both(lambda: (Product(device).run(), len(found))[1])
    assert (native, python) == (0, 2)


def test_arguments_by_name(device):
    x, weight, bias = Product(device).leaves().values()
    assert torch.equal(F.linear(x, bias=bias, weight=weight), F.linear(x, weight, bias))
    assert torch.equal(F.linear(input=x, weight=weight), F.linear(x, weight))


def test_no_gradient_at_all(device):
    """Autograd functions in Python get zeros for it."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    product = Product(device)

    def run():
        leaves = product.leaves()
        Nothing.apply(F.linear(*leaves.values())).backward(product.grad)
        return gradients_of(leaves)

    assert_same(run)


def test_a_wrong_shape_is_the_same_error(device):
    weight = nn.Parameter(make(device))

    def run():
        with pytest.raises(RuntimeError) as error:
            F.linear(values(4, 32, device=device), weight)
        return str(error.value)

    native, python = by_both(run)
    assert native == python and "mat1 and mat2 shapes cannot be multiplied" in native


# Autocast


@pytest.mark.parametrize("shape", ["2D", "3D"])
@pytest.mark.parametrize("where", ["forward", "backward", "both"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast(device, dtype, where, shape):
    product = Product(device, SHAPES[shape], dtype=dtype)

    def run():
        leaves = product.leaves()
        with torch.autocast(device.type, torch.bfloat16, enabled=where != "backward"):
            y = F.linear(*leaves.values())
        with torch.autocast(device.type, torch.bfloat16, enabled=where != "forward"):
            y.backward(product.grad.to(y.dtype))
        return {"y": y, **gradients_of(leaves)}

    assert_same(run)


def test_autocast_keeps_no_copy_without_history(device):
    """Of leaves, whose copies in its dtype it keeps for other operations."""
    product = Product(device, dtype=torch.float32)

    def run():
        leaves, plain = product.leaves(), product.quantized.dequantize()
        with torch.autocast(device.type, torch.bfloat16):
            y = F.linear(*leaves.values()) + F.linear(leaves["x"], plain, leaves["bias"])
        y.backward(product.grad.to(y.dtype))
        return gradients_of(leaves)

    assert_same(run)


# What is not plain


class Subclass(torch.Tensor):
    """With nothing of its own."""


def test_operands_of_other_classes(device):
    """They have the node, too, which keeps what is quantized, and the bytes of the values of those."""
    leaves = Product(device, bias=False).leaves()
    x, weight = leaves["x"], leaves["weight"]
    mxfp8 = nn.Parameter(zerofp4.quantize_mxfp8(values(48, 80, device=device)))
    for pair in ((x.as_subclass(Subclass), weight), (x, mxfp8), (weight, mxfp8)):
        found = []
        for operands in (
            pair,
            [each.detach().dequantize() if hasattr(each, "record") else each for each in pair],
        ):
            own = [each.detach().requires_grad_() for each in operands]
            y = F.linear(*own)
            y.backward(torch.ones_like(y))
            found.append({"y": y, "x": own[0].grad, "weight": own[1].grad})
        assert type(F.linear(*pair).grad_fn).__name__ == "LinearBackward"
        assert_named_equal(*found)


def test_forward_differentiation_by_a_weight_is_refused(device):
    weight = zerofp4.quantize(torch.ones(32, 32, device=device))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(weight, torch.ones(32, 32, device=device))
        with pytest.raises(NotImplementedError):
            F.linear(torch.ones(1, 32, device=device), dual)
