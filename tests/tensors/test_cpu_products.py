"""Products with quantized weights on a CPU without instructions for their dtype: in float32, rounded once.
Where this CPU has them, the tests run again with a torch that was told it had not.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import nodes
from cases.gradient_places import memory_of
from early import waits_for
from helpers import assert_bytes_equal
from tensor_helpers import values
from torch import nn
from torch.nn import functional as F

import zerofp4
from zerofp4 import ops

AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
SLOW = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(
            dtype, marks=pytest.mark.skipif(dtype not in ops.SLOW_ON_CPU, reason="this CPU multiplies it")
        )
        for dtype in (torch.bfloat16, torch.float16)
    ],
)

# So many sums that in another order some would be rounded to another value.
TOKENS, OUT, IN = 64, 256, 512


@pytest.fixture(params=["native", "python"])
def node(request):
    """Where F.linear multiplies."""
    with nodes.Mode() if request.param == "python" else contextlib.nullcontext():
        yield


class Product:
    """A weight, what is multiplied with it, and the same as float32."""

    def __init__(self, dtype: torch.dtype, shape=(OUT, IN), quantize=zerofp4.quantize):
        self.weight = nn.Parameter(quantize(values(*shape, dtype=dtype), columnwise=True))
        self.x, self.bias = values(TOKENS, IN, dtype=dtype, seed=1), values(OUT, dtype=dtype, seed=2)
        self.grad = values(TOKENS, OUT, dtype=dtype, seed=3)

    def check(self, run, factors: torch.dtype | None = None) -> None:
        """run(x, weight, bias), and the gradients of x and weight. factors: what autocast rounds to."""
        dtype = self.x.dtype
        x, own = self.x.clone().requires_grad_(), self.weight.detach().dequantize()
        y = run(x, self.weight, self.bias)
        y.backward(self.grad.to(y.dtype))
        with torch.autocast("cpu", enabled=False):
            wide = [each.to(factors or dtype).float().requires_grad_() for each in (x.detach(), own)]
            expected = run(*wide, self.bias.to(factors or dtype).float())
            expected.backward(self.grad.to(y.dtype).float())
        assert_bytes_equal(y.detach(), expected.detach().to(y.dtype), "y")
        assert_bytes_equal(x.grad, wide[0].grad.to(y.dtype).to(dtype), "x's gradient")
        assert_bytes_equal(self.weight.grad, wide[1].grad.to(y.dtype).to(dtype), "the weight's gradient")


@SLOW
@pytest.mark.parametrize("quantize", [zerofp4.quantize, zerofp4.quantize_mxfp8])
def test_linear(node, quantize, dtype):
    Product(dtype, quantize=quantize).check(F.linear)


@SLOW
def test_matmul(dtype):
    Product(dtype, (IN, OUT)).check(lambda x, weight, _: x @ weight)


@SLOW
def test_matmul_of_a_stack(dtype):
    product = Product(dtype, (2, IN, OUT))
    product.x = values(2, TOKENS, IN, dtype=dtype, seed=1)
    product.grad = values(2, TOKENS, OUT, dtype=dtype, seed=3)
    product.check(lambda x, weight, _: torch.matmul(x, weight))


@SLOW
def test_addmm(dtype):
    Product(dtype, (IN, OUT)).check(lambda x, weight, bias: torch.addmm(bias, x, weight))


@SLOW
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(node, mode, dtype):
    product = Product(dtype)
    with mode():
        y = F.linear(product.x, product.weight, product.bias)
        wide = [each.float() for each in (product.x, product.weight.dequantize(), product.bias)]
        assert_bytes_equal(y.clone(), F.linear(*wide).to(dtype), "y")


@SLOW
@pytest.mark.parametrize("given", ["float32", "its own"])
def test_autocast(node, given, dtype):
    """Its dtype counts, not that of what it casts."""

    def run(x, weight, bias):
        with torch.autocast("cpu", dtype, enabled=isinstance(weight, zerofp4.NVFP4Tensor)):
            return F.linear(x, weight, bias)

    Product(torch.float32 if given == "float32" else dtype).check(run, factors=dtype)


@SLOW
def test_the_gradient_has_its_place(node, dtype):
    product = Product(dtype)
    memory = memory_of([product.weight], dtype)
    product.check(F.linear)
    assert product.weight.grad.data_ptr() == memory.views[0].data_ptr()


@SLOW
def test_a_layer_with_a_dequantized_backward_pass(dtype):
    layer = zerofp4.nn.Linear(IN, OUT, dtype=dtype)
    x, grad = values(TOKENS, IN, dtype=dtype).requires_grad_(), values(TOKENS, OUT, dtype=dtype, seed=1)
    with zerofp4.nn.autocast(zerofp4.nn.NVFP4Recipe(backward="dequantized")):
        layer(x).backward(grad)
    weight = zerofp4.quantize(layer.weight.detach()).dequantize()
    multiplied = zerofp4.quantize(x.detach(), block=(1, 16)).dequantize()
    assert_bytes_equal(x.grad, (grad.float() @ weight.float()).to(dtype), "x's gradient")
    of_weight = (grad.float().t() @ multiplied.float()).to(dtype)
    assert_bytes_equal(layer.weight.grad, of_weight, "the weight's gradient")


@SLOW
@pytest.mark.heavy
def test_compiled(fresh_compiler, dtype):
    Product(dtype).check(torch.compile(F.linear, backend="aot_eager", fullgraph=True))


@SLOW
def test_a_gradient_of_gradients(node, dtype):
    product = Product(dtype)
    x = product.x.requires_grad_()
    y = F.linear(x, product.weight)
    (grad,) = torch.autograd.grad(y, x, product.grad.requires_grad_(), create_graph=True)
    grad.backward(values(TOKENS, IN, dtype=dtype, seed=4))
    expected = (product.grad.detach().float().t() @ values(TOKENS, IN, dtype=dtype, seed=4).float()).to(dtype)
    assert_bytes_equal(product.weight.grad, expected, "the weight's gradient")


def test_different_dtypes_are_refused():
    weight = Product(torch.bfloat16).weight
    with pytest.raises(RuntimeError, match="dtype"):
        F.linear(values(2, IN, dtype=torch.float16), weight)


def without_instructions(_: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", __file__]
    return subprocess.run(command, env=os.environ | AVX2, capture_output=True, text=True)


@pytest.mark.heavy
@pytest.mark.skipif(torch.bfloat16 in ops.SLOW_ON_CPU, reason="this CPU is such a one")
@waits_for(without_instructions)
def test_where_the_cpu_has_none(early):
    run = early(without_instructions)
    assert run.returncode == 0 and "no tests ran" not in run.stdout, run.stdout + run.stderr
