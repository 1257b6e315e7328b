"""Products of quantized tensors, and dequantize, for autograd: replacements in __torch_function__.

The products save the quantized tensor itself, so that a dequantized weight lives no longer than one GEMM.
They take values from the record, because __torch_dispatch__ costs the host more than most kernels.

The node of F.linear is in C++ (csrc/autograd/linear.cpp). It multiplies a plain x with an NVFP4 weight, and
calls linear_product() and linear_gradients() for all else: modes, subclasses, MXFP8 weights, and double
backward. A trace sees the parts of F.linear, and differentiates those.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch._prims  # torch.ops.prims
from torch.nn import functional as F

from zerofp4 import ops
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.tensors.gradient_places import gradient_place


def is_quantized(tensor: torch.Tensor) -> bool:
    return hasattr(type(tensor), "_values_of")


def plain(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A product's operand. With dtype (backward passes), of that dtype and differentiable. Without (forward
    passes), in the tensor's own dtype and detached, since autocast caches casts of leaves.
    """
    if not is_quantized(tensor):
        return tensor.detach() if dtype is None else tensor.to(dtype)
    if torch.compiler.is_compiling():
        return torch.ops.prims.convert_element_type(tensor, dtype or tensor.dtype)
    if dtype is not None and torch.is_grad_enabled():
        return Dequantize.apply(tensor, dtype)
    return tensor._values_of(tensor.record, dtype or tensor.dtype)


class Dequantize(torch.autograd.Function):
    """A quantized tensor to its values, rounded once to dtype; the gradient passes through."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return plain(tensor, dtype)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, None


def multiply(
    product: Callable, *operands: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """product(*operands). A CPU without instructions for their dtype multiplies in float32 and rounds once:
    float32 holds the values, and torch accumulates in it anyway. out: for torch.mm.
    """
    if operands[0].is_cpu:
        if out is None and torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            with torch.autocast("cpu", enabled=False):  # it would round float32 operands again
                return multiply(product, *(_in_dtype(each, dtype) for each in operands))
        # torch refuses operands of different dtypes.
        dtype = operands[0].dtype
        if dtype in ops.SLOW_ON_CPU and all(each is None or each.dtype == dtype for each in operands):
            result = product(*(_in_dtype(each, torch.float32) for each in operands))
            return result.to(dtype) if out is None else out.copy_(result)
    return product(*operands) if out is None else product(*operands, out=out)


def _in_dtype(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return tensor if tensor is None or tensor.dtype not in WEIGHT_DTYPES else tensor.to(dtype)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def linear_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """F.linear(x [..., K], weight [N, K], bias [N] or None) without history."""
    return multiply(F.linear, plain(x), plain(weight), bias)


def linear_gradients(
    node: Any, grad: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor | None, bias_needs: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Of x, weight and bias, by what the node of F.linear saved: x for the weight's, weight for x's."""
    grad_x = grad_weight = grad_bias = None
    with torch._C.DisableTorchFunctionSubclass():
        if weight is not None:
            grad_x = multiply(torch.matmul, grad, plain(weight, grad.dtype))
        rows = _rows(grad)
        if x is not None:
            out = gradient_place(node, grad.dtype)
            grad_weight = multiply(torch.mm, rows.t(), _rows(plain(x, grad.dtype)), out=out)
        if bias_needs:
            grad_bias = rows.sum(0)
    return grad_x, grad_weight, grad_bias


class MatMul(torch.autograd.Function):
    """torch.matmul(a, b), or torch.addmm(bias, a, b) of matrices, with a or b quantized."""

    @staticmethod
    def forward(ctx, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        a_needs, b_needs, _ = ctx.needs_input_grad
        ctx.save_for_backward(a if b_needs else None, b if a_needs else None)
        ctx.a, ctx.b = (a.shape, a.dtype), (b.shape, b.dtype)
        if bias is None:
            return multiply(torch.matmul, plain(a), plain(b))
        ctx.bias = bias.shape, bias.dtype
        return multiply(torch.addmm, bias, plain(a), plain(b))

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        a, b = ctx.saved_tensors
        (a_shape, a_dtype), (b_shape, b_dtype) = ctx.a, ctx.b
        grad_a = grad_b = grad_bias = None
        # A vector on the left is a matrix of one row, on the right one of one column.
        left = (1, *a_shape) if len(a_shape) == 1 else a_shape
        right = (*b_shape, 1) if len(b_shape) == 1 else b_shape
        with torch._C.DisableTorchFunctionSubclass():
            if ctx.needs_input_grad[2]:
                shape, dtype = ctx.bias
                grad_bias = grad.sum_to_size(shape).to(dtype)
            grad = grad.unsqueeze(-2) if len(a_shape) == 1 else grad
            grad = grad.unsqueeze(-1) if len(b_shape) == 1 else grad
            if b is not None:
                grad_a = multiply(torch.matmul, grad, plain(b, grad.dtype).reshape(right).mT)
                grad_a = grad_a.sum_to_size(left).reshape(a_shape).to(a_dtype)
            if a is not None:
                a = plain(a, grad.dtype).reshape(left)
                if len(right) == 2:  # one matrix for all batches: one product over all their rows
                    a, grad = a.reshape(-1, left[-1]), grad.reshape(-1, right[-1])
                grad_b = multiply(torch.matmul, a.mT, grad)
                grad_b = grad_b.sum_to_size(right).reshape(b_shape).to(b_dtype)
        return grad_a, grad_b, grad_bias


_native_linear = ops.native_linear


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        out = _native_linear(input, weight, bias)
        if out is not None:
            return out
    return multiply(F.linear, _values(input), _values(weight), bias)


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return Dequantize.apply(tensor, tensor.dtype) if is_quantized(tensor) else tensor


def _matmul(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return MatMul.apply(input, other, None)


def _mm(input: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    if input.dim() != 2 or mat2.dim() != 2:
        return torch.mm(input, mat2)  # raises
    return MatMul.apply(input, mat2, None)


def _addmm(input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta=1, alpha=1) -> torch.Tensor:
    if beta != 1 or alpha != 1 or is_quantized(input) or mat1.dim() != 2 or mat2.dim() != 2:
        return torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha)
    return MatMul.apply(mat1, mat2, input)


FUNCTIONS = {
    torch.dequantize: lambda tensor: Dequantize.apply(tensor, tensor.dtype),
    F.linear: _linear,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.Tensor.__rmatmul__: lambda other, input: _matmul(input, other),
    torch.mm: _mm,
    torch.Tensor.mm: _mm,
}
"""Functions that autograd cannot differentiate, or would save a dequantized weight for."""
