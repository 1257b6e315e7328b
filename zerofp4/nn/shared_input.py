"""quantize_input: one quantized input for several layers."""

import torch

from zerofp4.nn.linear import Linear, by_autocast
from zerofp4.nn.quantizers import quantizers_of
from zerofp4.nn.recipe import current_recipe
from zerofp4.tensors import QuantizedTensor, StraightThrough


def quantize_input(x: torch.Tensor, layer: Linear | None = None) -> torch.Tensor:
    """x [..., in_features] quantized as the layers of zerofp4.nn do it, for several of them to take: the
    projections of an attention, for instance. They compute the bytes that they compute from x, whose gradient
    is the sum of theirs; x is quantized once, and what is saved for the backward pass is there once.

        x = zerofp4.nn.quantize_input(self.norm(x))
        q, k, v = self.q(x), self.k(x), self.v(x)

    layer: one of those that take it, where the recipe names others for some modules; they must all have the
    same. Outside of autocast, for a layer that follows no recipe, and where torch.compile traces the call,
    the result is x itself.

    Raises TypeError and ValueError as a layer does for an x that cannot be quantized; a layer of another
    recipe, or of none, raises ValueError for the result.
    """
    recipe = current_recipe(layer)
    if recipe is None or torch.compiler.is_compiling() or isinstance(x, QuantizedTensor):
        return x
    x = by_autocast(x)
    quantizers = quantizers_of(recipe.key, x.device)
    columnwise = torch.is_grad_enabled() and quantizers.quantized_backward

    def quantize(values: torch.Tensor) -> QuantizedTensor:
        return quantizers("input", values, rowwise=True, columnwise=columnwise)

    return StraightThrough.apply(x, quantize)
