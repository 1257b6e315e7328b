"""F.linear with an NVFP4 weight in C++, from zerofp4._autograd, which is built against torch."""

from collections.abc import Callable

import torch

import zerofp4._autograd as _autograd
import zerofp4._C as _C
from zerofp4.ops.device import DTYPE_CODES, check_cuda, current_stream
from zerofp4.ops.hardware import SLOW_ON_CPU


def native_linear(
    weight_type: type, values_source: Callable, gradient_place: Callable, gradients: Callable
) -> Callable[..., torch.Tensor | None]:
    """linear(x, weight, bias or None): F.linear in C++. It returns None for what the Python node has to do.

    weight_type: the class of weights that it takes, no subclass. values_source(record), gradient_place(node,
    index, dtype) and gradients(node, grad, x, weight, bias_needs) are what it calls in Python.
    """
    called = values_source, gradient_place, gradients, check_cuda, current_stream
    slow = sum(1 << DTYPE_CODES[dtype] for dtype in SLOW_ON_CPU)
    _autograd.configure(weight_type, *called, _C.dequantize_function, slow)
    return _autograd.linear
