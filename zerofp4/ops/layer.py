"""Layers of a recipe in C++, from zerofp4._autograd: their operators, a call without the dispatcher, and how
they quantize.
"""

from collections.abc import Callable

import torch

import zerofp4._autograd as _autograd
import zerofp4._C as _C
from zerofp4.format import BLOCK, FourOverSix
from zerofp4.ops.cublaslt import why_no_cublaslt
from zerofp4.ops.dequantize import neutral_amax
from zerofp4.ops.operator import without_backend
from zerofp4.ops.quantize import choice_arguments

native_layer = _autograd.layer
"""native_layer(x, splits, weight, bias, rows, scheme, recipe, main_grad, is_current): zerofp4::linear without
the dispatcher, or None for what that has to see (csrc/autograd/layer.cpp).
"""


def configure_layer(quantizers_of: Callable, cached_rows: Callable, gradient_place: Callable) -> None:
    """Dispatch zerofp4::linear and zerofp4::linear_gradients in C++, which hands what it does not multiply to
    their implementations in Python.

    quantizers_of(recipe, device): of a recipe by its key; their `scheme` is that of layer_scheme().
    cached_rows(quantizers, weight, cache): rows, as native_layer takes them, of the weight that a cache
    keeps, or None. gradient_place(node, index, dtype): memory for the gradient of a node's input, or None.
    """
    python = map(without_backend, ("linear", "linear_gradients"))
    called = quantizers_of, cached_rows, gradient_place
    _autograd.configure_layer(_C.layer_functions, neutral_amax, *python, *called)


def layer_scheme(
    device: torch.device,
    *,
    hadamard: bool,
    random_signs: bool,
    stochastic_rounding: bool,
    four_over_six: FourOverSix | None,
    weight_block: tuple[int, int],
) -> object:
    """How layers of an NVFP4 recipe quantize on a device, for C++. The options are those of the recipe."""
    e4m3_max, error = choice_arguments(four_over_six)
    by_cublaslt = device.type == "cuda" and why_no_cublaslt() is None
    has_tiles = weight_block == (BLOCK, BLOCK)
    options = hadamard, random_signs, stochastic_rounding, e4m3_max, error == "mse", has_tiles
    return _autograd.scheme(*options, by_cublaslt)
