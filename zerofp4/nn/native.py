"""The node of layers in C++ (csrc/autograd/layer.cpp), and the operators that compiled code calls
(layer_operators.cpp): what they ask of Python, and when the node is used.

They quantize, multiply and save what LinearFunction and GroupedFunction do, byte for byte, in one call each
way.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from zerofp4 import ops
from zerofp4.format import BLOCK
from zerofp4.gemm import keeps_values
from zerofp4.nn.function import Kept, MainGrad, check_current, gradients
from zerofp4.nn.grouped_function import (
    GroupedWeights,
    each_of,
    given_gradients,
    gradients_of_groups,
    sums_of_groups,
)
from zerofp4.nn.grouped_operators import cached_records, kept_groups
from zerofp4.nn.operators import record_of_buffers
from zerofp4.nn.quantizers import Quantizers, WeightCache, quantizers_of
from zerofp4.nn.recipe import recipe_of_key
from zerofp4.storage import BUFFERS, NVFP4Storage
from zerofp4.tensors import gradient_place

Context = tuple[Quantizers, MainGrad | list[MainGrad | None] | None, Callable[[], bool] | None]
"""quantizers, main_grad and is_current of a LinearCall: what a node keeps of Python's. Of groups there are a
main_grad of each weight, or None where no weight has one, and one is_current of all. A weight that is NVFP4
itself has no is_current here: the node compares its versions.
"""
Buffers = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""data, compact scales and amax of a copy."""
Groups = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, bool]
"""splits, offsets and error of x in groups, its columns, and whether one parameter is the weight of all."""


def _begin_backward(
    node: Any, context: Context, dtype: torch.dtype | None, has_weight: bool
) -> tuple[torch.Tensor, torch.Tensor | None, MainGrad | None]:
    """(neutral amax, memory for the weight's gradient or None, the MainGrad whose memory that is or None).

    dtype: of the weight, where it needs a gradient; None of groups. has_weight: whether the gradient of x is
    made from it.
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
    groups: Groups | None,
    x: Buffers | None,
    weights: list[Buffers],
    e4m3_max: int,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> Sequence[torch.Tensor | None]:
    """Of x, weights and biases, by Python from what the node has saved: where a graph of them is asked for,
    or something is not plain. weights: none where x needs no gradient.
    """
    if groups is not None:
        return _gradients_of_groups(
            node, context, grad, groups, x, weights, e4m3_max, weight_dtype, bias_dtype
        )
    out = None if x is None or context[1] is not None else gradient_place(node, 1, weight_dtype)
    weight = weights[0] if weights else None
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
        kept_weight = _record(weight, weight_dtype, e4m3_max)
    dtypes = (x_dtype, weight_dtype)
    grad_x, grad_weight = gradients(quantizers, rows, kept_x, kept_weight, dtypes, main_grad, out)
    grad_x = None if grad_x is None else grad_x.view(*grad.shape[:-1], grad_x.shape[-1])
    grad_bias = None if bias_dtype is None else rows.sum(0).to(bias_dtype)
    return grad_x, grad_weight, grad_bias


@once_differentiable
def _gradients_of_groups(node, context, grad, groups, x, weights, e4m3_max, weight_dtype, bias_dtype):
    quantizers, main_grads, is_current = context
    splits, offsets, error, cols, is_stack = groups
    if weights:
        check_current(is_current)
    records = [_record(weight, weight_dtype, e4m3_max) for weight in weights]
    kept_weights = GroupedWeights(records) if records else None
    kept_x = None if x is None else kept_groups(quantizers.recipe, grad, splits, offsets, error, x, cols)
    grad_x, stack = gradients_of_groups(grad, splits, quantizers.recipe, kept_weights, kept_x)
    grad_weights = [None] * (1 if is_stack else len(splits))
    if stack is not None:
        each = each_of(stack, is_stack)
        grad_weights = _add_to_main_grads(main_grads or grad_weights, each, weight_dtype)
    if bias_dtype is None:
        return grad_x, *grad_weights
    return grad_x, *grad_weights, *each_of(sums_of_groups(grad, offsets[0]).to(bias_dtype), is_stack)


def _add_to_main_grads(
    main_grads: Sequence[MainGrad | None], gradients: Sequence[torch.Tensor], dtype: torch.dtype
) -> list[torch.Tensor | None]:
    """What autograd gets of the gradients of weights of this dtype."""
    return given_gradients(gradients, main_grads, [dtype] * len(gradients))


def _record(weight: Buffers, dtype: torch.dtype, e4m3_max: int) -> NVFP4Storage:
    """Of the rows of a weight, or of a stack of them."""
    named = dict(zip(("rowwise_data", "rowwise_scale", "amax"), weight, strict=True))
    return record_of_buffers([named.get(name) for name in BUFFERS], dtype, e4m3_max)


_layer: Callable[..., torch.Tensor | None] | None = None
_groups: Callable[..., torch.Tensor | None] | None = None
"""None where zerofp4._autograd is not used."""


def _use(layer: Callable[..., torch.Tensor | None], groups: Callable[..., torch.Tensor | None]) -> None:
    global _layer, _groups
    _layer, _groups = layer, groups


ops.use_native_layer(_use, _begin_backward, _gradients, _add_to_main_grads)


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


def native_groups(
    x: torch.Tensor,
    splits: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    quantizers: Quantizers,
    operands: GroupedWeights | None,
    main_grads: list[MainGrad | None] | None = None,
    is_current: Callable[[], bool] | None = None,
) -> torch.Tensor | None:
    """y [tokens, N] of x [tokens, K] in groups of splits, a tensor on x's device, with a node in C++ if
    anything needs a gradient; None for what GroupedFunction has to do.

    weights, biases: of each group, or a stack of all; no biases where there are none. operands: of the
    weights, None of high-precision ones that are quantized for this call. main_grads: of each weight.
    is_current: of all, but None of weights that are NVFP4 themselves.
    """
    if _groups is None or quantizers.scheme is None:
        return None
    rows = (None, None, 0) if operands is None else _rows_of_groups(quantizers, operands)
    if rows is None:
        return None
    context = quantizers, main_grads, is_current
    return _groups(x, splits, weights, biases, *rows, quantizers.scheme, context)


def _rows_of_groups(quantizers: Quantizers, operands: GroupedWeights) -> tuple | None:
    """(copies, values or None, e4m3_max): what groups in C++ multiply. None for weights whose columns are
    multiplied, too.
    """
    copies, records, e4m3_max = [], operands.records, operands.records[0].e4m3_max
    for record in records:
        rows = record.rowwise
        if rows is None or record.block != (BLOCK, BLOCK) or record.e4m3_max != e4m3_max:
            return None
        copies.append((rows.data, rows.scales["compact"], rows.amax))
    if quantizers.recipe.weight_block != (BLOCK, BLOCK):
        return None
    kept = quantizers.keeps_values and all(map(keeps_values, records))
    return copies, operands.rowwise().values() if kept else None, e4m3_max


# What the operators ask for.


@functools.cache
def _quantizers_of(recipe: str, device: torch.device) -> Quantizers:
    """Those of a recipe by its key. What was asked before takes no frame of Python."""
    return quantizers_of(recipe_of_key(recipe), device)


def _cached_rows(quantizers: Quantizers, weight, cache: int, is_first: bool, x_dtype) -> tuple | None:
    """native_rows() of the weight that the cache of a layer keeps."""
    record = WeightCache.of_handle(cache).get(weight, quantizers, is_first).record
    return quantizers.native_rows(record, x_dtype)


def _cached_groups(quantizers: Quantizers, weights, caches: list[int], is_first: bool) -> tuple | None:
    """The same of the weights of groups."""
    return _rows_of_groups(quantizers, GroupedWeights(cached_records(weights, quantizers, caches, is_first)))


ops.implement_layer(_quantizers_of, _cached_rows, _cached_groups)
