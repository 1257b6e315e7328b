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


class _Transformed(torch.autograd.Function):
    """(x, function) to function(x) under the transforms of torch.func, which do not know torch.library's
    gradients: gradients, tangents and batches of x pass through.
    """

    @staticmethod
    def forward(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return under_transforms(function, x)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, None

    @staticmethod
    def jvp(ctx, tangent: torch.Tensor, _) -> torch.Tensor:
        return tangent.clone()

    @staticmethod
    def vmap(info, in_dims, x: torch.Tensor, function):
        """One tensor after the other: each has an amax of its own."""
        return torch.stack([under_transforms(function, part) for part in x.unbind(in_dims[0])]), 0


def under_transforms(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """function(x), straight through also where transforms of torch.func are at work."""
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is None:
        return function(x)
    return _Transformed.apply(x, function)


def with_tangent(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """function(x), whose tangent, where forward-mode differentiation is on, is that of x: torch.library's
    operators have none, and drop one without a word.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return under_transforms(function, x)
    primal, tangent = forward_ad.unpack_dual(x)
    values = under_transforms(function, primal)
    return values if tangent is None else forward_ad.make_dual(values, tangent)
