"""torch.autograd.backward and grad, given quantized tensors.

A backward pass calls other code (recomputation of checkpoints, hooks, autograd functions), and products of
quantized weights must be ours there too: a checkpoint identifies saved tensors by number and shape. Subclass
overrides are disabled inside __torch_function__, so we enable them again, and pass GradientEdges instead of
tensors, so that torch.autograd does not call __torch_function__ again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from zerofp4.tensors.products import is_quantized


@torch.compiler.disable
def _edges(tensors: Sequence[Any]) -> tuple:
    """Edges for quantized tensors. One that requires no gradient has none, and stays."""
    return tuple(_edge(t) if is_quantized(t) and t.requires_grad else t for t in tensors)


def _edge(tensor: torch.Tensor) -> GradientEdge:
    """Like get_gradient_edge, which would make a view of the tensor, and so dequantize it."""
    with torch.enable_grad():
        reader = torch.ops.aten.alias(tensor).grad_fn
    node, number = reader.next_functions[0]
    return GradientEdge(node, number, ownership_token=reader)


def _run(function: Callable, outputs: tuple, inputs: tuple | None, options: dict) -> Any:
    """Call a function of torch.autograd with edges."""
    if any(map(is_quantized, (*outputs, *(inputs or ())))):
        return function(outputs, inputs=inputs, **options)  # raises before it runs anything
    with torch._C._EnableTorchFunction():
        return function(outputs, inputs=inputs, **options)


def _grad(outputs, inputs, *, materialize_grads=False, **options) -> tuple[torch.Tensor | None, ...]:
    gradients = _run(torch.autograd.grad, _edges(outputs), _edges(inputs), options)
    if not materialize_grads:
        return gradients
    has_graph = options.get("create_graph", False)
    pairs = zip(gradients, inputs, strict=True)
    return tuple(torch.zeros_like(t, requires_grad=has_graph) if g is None else g for g, t in pairs)


def _backward(tensors, *, inputs=None, **options) -> None:
    if isinstance(inputs, torch.Tensor | GradientEdge):  # torch 2.11
        inputs = (inputs,)
    for tensor in inputs or ():
        if is_quantized(tensor) and tensor.requires_grad:
            tensor.retain_grad()  # as torch does for a non-leaf tensor, but not for its edge
    _run(torch.autograd.backward, _edges(tensors), _edges(inputs) if inputs else None, options)


def _backward_from(tensor, gradient=None, retain_graph=None, create_graph=False, inputs=None) -> None:
    with torch._C._EnableTorchFunction():
        torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


FUNCTIONS = {
    torch.autograd.backward: _backward,
    torch.autograd.grad: _grad,
    torch.Tensor.backward: _backward_from,
}
"""By function of torch."""
