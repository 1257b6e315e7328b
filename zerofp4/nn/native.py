"""The node of a layer in C++ (csrc/autograd/layer.cpp), and the operators that compiled code calls
(layer_operators.cpp): what they ask of Python, and when the node is used.

They quantize, multiply and save what LinearFunction does, byte for byte, in one call each way.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from zerofp4 import ops
from zerofp4.nn.function import Kept, MainGrad, check_current, gradients
from zerofp4.nn.operators import record_of_buffers
from zerofp4.nn.quantizers import Quantizers, WeightCache, quantizers_of
from zerofp4.nn.recipe import recipe_of_key
from zerofp4.storage import BUFFERS, NVFP4Storage
from zerofp4.tensors import gradient_place

Context = tuple[Quantizers, MainGrad | None, Callable[[], bool] | None]
"""quantizers, main_grad and is_current of a LinearCall: what a node keeps of Python's. A weight that is NVFP4
itself has no is_current here: the node compares its versions.
"""
Buffers = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""data, compact scales and amax of a copy."""


def _begin_backward(
    node: Any, context: Context, dtype: torch.dtype | None, has_weight: bool
) -> tuple[torch.Tensor, torch.Tensor | None, MainGrad | None]:
    """(neutral amax, memory for the weight's gradient or None, the MainGrad whose memory that is or None).

    dtype: of the weight, where it needs a gradient. has_weight: whether the gradient of x is made from it.
    """
    quantizers, main_grad, is_current = context
    if has_weight:
        check_current(is_current)
    neutral = ops.neutral_amax(quantizers.device)
    if dtype is None:
        return neutral, None, None
    if main_grad is None:
        return neutral, gradient_place(node, 1, dtype), None
    return neutral, main_grad.buffer(), main_grad


def _gradients(
    node: Any,
    context: Context,
    grad: torch.Tensor,
    x: Buffers | None,
    weight: Buffers | None,
    e4m3_max: int,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Of x, weight and bias, by Python from what the node has saved: where a graph of them is asked for, or
    something is not plain.
    """
    out = None if x is None or context[1] is not None else gradient_place(node, 1, weight_dtype)
    return _plain_gradients(node, context, grad, x, weight, e4m3_max, x_dtype, weight_dtype, bias_dtype, out)


@once_differentiable
def _plain_gradients(node, context, grad, x, weight, e4m3_max, x_dtype, weight_dtype, bias_dtype, out):
    quantizers, main_grad, is_current = context
    rows = grad.reshape(-1, grad.shape[-1])
    kept_x = kept_weight = None
    if x is not None:
        shape = torch.Size((rows.shape[0], x[0].shape[0]))
        blank = quantizers.blank("input", shape, x_dtype, columnwise=True)
        kept_x = Kept(NVFP4Storage, shape, blank.context(), "columnwise", "compact", len(x)).record(x)
    if weight is not None:
        check_current(is_current)
        named = dict(zip(("rowwise_data", "rowwise_scale", "amax"), weight, strict=True))
        kept_weight = record_of_buffers([named.get(name) for name in BUFFERS], weight_dtype, e4m3_max)
    dtypes = (x_dtype, weight_dtype)
    grad_x, grad_weight = gradients(quantizers, rows, kept_x, kept_weight, dtypes, main_grad, out)
    grad_x = None if grad_x is None else grad_x.view(*grad.shape[:-1], grad_x.shape[-1])
    grad_bias = None if bias_dtype is None else rows.sum(0).to(bias_dtype)
    return grad_x, grad_weight, grad_bias


_layer: Callable[..., torch.Tensor | None] | None = None
"""None where zerofp4._autograd is not used."""


def _use(layer: Callable[..., torch.Tensor | None]) -> None:
    global _layer
    _layer = layer


ops.use_native_layer(_use, _begin_backward, _gradients)


def native_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantizers: Quantizers,
    record: NVFP4Storage | None,
    main_grad: MainGrad | None = None,
    is_current: Callable[[], bool] | None = None,
) -> torch.Tensor | None:
    """y [..., N] of x [..., K], with a node in C++ if anything needs a gradient; None for what LinearFunction
    has to do. Nothing is asked of an NVFP4 weight, only of its record: each question that torch answers for a
    subclass takes the host as long as a launch.

    quantizers, record, main_grad, is_current: as in a LinearCall, but no record of a high-precision weight
    that is quantized for this call, and no is_current of a weight that is NVFP4 itself.
    """
    if _layer is None or quantizers.scheme is None:
        return None
    context = quantizers, main_grad, is_current
    if record is None:
        return _layer(x, weight, bias, None, None, None, None, 0, 0, quantizers.scheme, context)
    rows = quantizers.native_rows(record, x.dtype)
    return None if rows is None else _layer(x, weight, bias, *rows, quantizers.scheme, context)


# What the operators ask for.


@functools.cache
def _quantizers_of(recipe: str, device: torch.device) -> Quantizers:
    """Those of a recipe by its key. What was asked before takes no frame of Python."""
    return quantizers_of(recipe_of_key(recipe), device)


def _cached_rows(quantizers: Quantizers, weight, cache: int, is_first: bool, x_dtype) -> tuple | None:
    """native_rows() of the weight that the cache of a layer keeps."""
    record = WeightCache.of_handle(cache).get(weight, quantizers, is_first).record
    return quantizers.native_rows(record, x_dtype)


ops.implement_layer(_quantizers_of, _cached_rows)
