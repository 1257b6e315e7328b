"""Quantization as autograd's identity: the gradient of the values goes to what they were quantized from."""

from collections.abc import Callable

import torch
from torch.autograd import forward_ad


class StraightThrough(torch.autograd.Function):
    """(x, quantize: x to a quantized tensor) to that tensor; its gradient becomes x's, in x's dtype."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, quantize: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return quantize(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, None


def with_tangent(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """function(x), whose tangent, where forward-mode differentiation is on, is that of x: torch.library's
    operators have none, and drop one without a word.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return function(x)
    primal, tangent = forward_ad.unpack_dual(x)
    values = function(primal)
    return values if tangent is None else forward_ad.make_dual(values, tangent)
