"""Backward passes that torch's functions run when they are given quantized tensors.

A pass calls code of others: what a checkpoint computes once more, hooks, backward of their own autograd
functions. There, as in the forward pass, a product of a quantized weight must be ours. One that is torch's
saves other tensors, and a checkpoint, which knows them by number and shape, takes one for another.

__torch_function__ runs a function with those of subclasses off, which would hold for all of the pass, on
each of its threads; with them on, torch.autograd would come back to __torch_function__. So it gets, with them
on, the edges of the graph that the tensors stand for: they mean the same, and are no tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from zerofp4.tensors.products import is_quantized


@torch.compiler.disable
def _edges(tensors: Sequence[Any]) -> tuple:
    """The same with edges for quantized tensors, but for those that require no gradient and have none."""
    return tuple(_edge(t) if is_quantized(t) and t.requires_grad else t for t in tensors)


def _edge(tensor: torch.Tensor) -> GradientEdge:
    """As get_gradient_edge, which makes a view of the tensor for it and so dequantizes it."""
    with torch.enable_grad():
        reader = torch.ops.aten.alias(tensor).grad_fn
    node, number = reader.next_functions[0]
    return GradientEdge(node, number, ownership_token=reader)


def _run(function: Callable, outputs: tuple, inputs: tuple | None, options: dict) -> Any:
    """function(outputs, inputs=inputs) of torch.autograd, given edges."""
    if any(map(is_quantized, (*outputs, *(inputs or ())))):
        return function(outputs, inputs=inputs, **options)  # raises before it runs anything
    with torch._C._EnableTorchFunction():
        return function(outputs, inputs=inputs, **options)


def _grad(outputs, inputs, *, materialize_grads=False, **options) -> tuple[torch.Tensor | None, ...]:
    gradients = _run(torch.autograd.grad, _edges(outputs), _edges(inputs), options)
    if not materialize_grads:
        return gradients
    pairs = list(zip(gradients, inputs, strict=True))
    if any(gradient is None and isinstance(given, GradientEdge) for gradient, given in pairs):
        raise RuntimeError("materialize_grads cannot be used when the given input is a GradientEdge")
    has_graph = options.get("create_graph", False)
    return tuple(torch.zeros_like(t, requires_grad=has_graph) if g is None else g for g, t in pairs)


def _backward(tensors, *, inputs=None, **options) -> None:
    if isinstance(inputs, torch.Tensor | GradientEdge):  # torch 2.11
        inputs = (inputs,)
    for tensor in inputs or ():
        if is_quantized(tensor) and tensor.requires_grad:
            tensor.retain_grad()  # as torch does for a tensor that is no leaf, and not for its edge
    _run(torch.autograd.backward, _edges(tensors), _edges(inputs) if inputs else None, options)


def _backward_from(tensor, gradient=None, retain_graph=None, create_graph=False, inputs=None) -> None:
    with torch._C._EnableTorchFunction():
        torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


FUNCTIONS = {
    torch.autograd.backward: _backward,
    torch.autograd.grad: _grad,
    torch.Tensor.backward: _backward_from,
}
"""By function of torch: as it is called, or as those of torch.autograd hand their arguments on."""
