"""A linear layer of an NVFP4 recipe in C++, from zerofp4._autograd: its function, and how it quantizes."""

from collections.abc import Callable

import torch

import zerofp4._C as _C
from zerofp4.format import FourOverSix
from zerofp4.ops import autograd
from zerofp4.ops.cublaslt import why_no_cublaslt
from zerofp4.ops.dequantize import neutral_amax
from zerofp4.ops.quantize import choice_arguments


def native_layer(begin_backward: Callable, gradients: Callable) -> Callable[..., torch.Tensor | None] | None:
    """A linear layer of an NVFP4 recipe in C++, None where the extension is not used: layer(x, weight, bias
    or None, data, scale, amax, block_rows, e4m3_max, device, scheme, context), which returns None for what
    the Python node has to do.

    begin_backward(node, context, dtype, has_weight) and gradients(node, context, grad, x, weight, e4m3_max,
    x_dtype, weight_dtype, bias_dtype) are what its node calls in Python.
    """
    extension, _ = autograd._load()
    if extension is None:
        return None
    extension.configure_layer(neutral_amax, begin_backward, gradients, _C.layer_functions)
    return extension.layer


def layer_scheme(
    device: torch.device,
    *,
    hadamard: bool,
    random_signs: bool,
    stochastic_rounding: bool,
    four_over_six: FourOverSix | None,
) -> object | None:
    """How layers of an NVFP4 recipe quantize on a device, for native_layer()'s function; None where the
    extension is not used. four_over_six: of the input.
    """
    extension, _ = autograd._load()
    if extension is None:
        return None
    e4m3_max, error = choice_arguments(four_over_six)
    by_cublaslt = device.type == "cuda" and why_no_cublaslt() is None
    options = hadamard, random_signs, stochastic_rounding, e4m3_max, error == "mse"
    return extension.scheme(*options, by_cublaslt)
