"""Quantization as autograd's identity: the gradient of the values goes to what they were quantized from."""

from collections.abc import Callable

import torch


class StraightThrough(torch.autograd.Function):
    """(x, quantize: x to a quantized tensor) to that tensor; its gradient becomes x's, in x's dtype."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, quantize: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return quantize(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, None
