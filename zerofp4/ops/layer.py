"""A linear layer of an NVFP4 recipe in C++, from zerofp4._autograd: its function, its operators, and how it
quantizes.
"""

from collections.abc import Callable
from types import ModuleType

import torch

import zerofp4._C as _C
from zerofp4.format import BLOCK, FourOverSix
from zerofp4.ops import autograd
from zerofp4.ops.cublaslt import why_no_cublaslt
from zerofp4.ops.dequantize import neutral_amax
from zerofp4.ops.operator import without_backend
from zerofp4.ops.quantize import choice_arguments


def use_native_layer(use: Callable, begin_backward: Callable, gradients: Callable) -> None:
    """Call use(layer) where the extension is used, now or once the first use has compiled it: a linear layer
    of an NVFP4 recipe in C++, layer(x, weight, bias or None, data, scale, amax, values, block_rows, e4m3_max,
    scheme, context), which returns None for what the Python node has to do.

    begin_backward(node, context, dtype, has_weight) and gradients(node, context, grad, x, weight, e4m3_max,
    x_dtype, weight_dtype, bias_dtype) are what its node calls in Python.
    """

    def configure(extension: ModuleType) -> None:
        extension.configure_layer(neutral_amax, begin_backward, gradients, _C.layer_functions)
        use(extension.layer)

    autograd.use_extension(configure)


def implement_layer(quantizers_of: Callable, cached_rows: Callable) -> None:
    """Dispatch zerofp4::linear and zerofp4::linear_gradients in C++, where the extension is used. What is not
    plain goes on to their implementations in Python.

    quantizers_of(recipe, device): of a recipe by its key; their `scheme` is that of layer_scheme().
    cached_rows(quantizers, weight, cache, is_first, x_dtype): data, scale, amax, values, block_rows and
    e4m3_max, as a layer takes them, of the rows that a cache keeps of a weight, or None.
    """

    def implement(extension: ModuleType) -> None:
        python = without_backend("linear"), without_backend("linear_gradients")
        extension.implement_layer(*python, quantizers_of, cached_rows)

    autograd.use_extension(implement)


def layer_scheme(
    device: torch.device,
    *,
    hadamard: bool,
    random_signs: bool,
    stochastic_rounding: bool,
    four_over_six: FourOverSix | None,
    weight_block: tuple[int, int],
) -> object | None:
    """How layers of an NVFP4 recipe quantize on a device, for the layer in C++; None where the extension is
    not used. The first use compiles it. The options are those of the recipe.
    """
    autograd.compile_on_first_use()
    extension = autograd.native_extension()
    if extension is None:
        return None
    e4m3_max, error = choice_arguments(four_over_six)
    by_cublaslt = device.type == "cuda" and why_no_cublaslt() is None
    has_tiles = weight_block == (BLOCK, BLOCK)
    options = hadamard, random_signs, stochastic_rounding, e4m3_max, error == "mse", has_tiles
    return extension.scheme(*options, by_cublaslt)
