"""Linear layers of an NVFP4 recipe in C++, from zerofp4._autograd: their functions, their operators, and how
they quantize.
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


def use_native_layer(
    use: Callable, begin_backward: Callable, gradients: Callable, add_to_main_grads: Callable
) -> None:
    """Call use(layer, groups) where the extension is used, now or once the first use has compiled it: a
    linear layer of an NVFP4 recipe in C++, layer(x, weight, bias or None, data, scale, amax, values,
    block_rows, e4m3_max, scheme, context), and one of groups of rows, groups(x, splits, weights, biases,
    copies or None, values, e4m3_max, scheme, context). They return None for what the Python nodes have to do.

    begin_backward(node, context, dtype, has_weight), gradients(node, context, grad, groups, x, weights,
    e4m3_max, x_dtype, weight_dtype, bias_dtype) and add_to_main_grads(main_grads, gradients, dtype) are what
    their node calls in Python.
    """

    def configure(extension: ModuleType) -> None:
        called = begin_backward, gradients, add_to_main_grads
        extension.configure_layer(neutral_amax, *called, _C.layer_functions)
        use(extension.layer, extension.groups)

    autograd.use_extension(configure)


OPERATORS = ("linear", "linear_gradients", "grouped_linear", "grouped_linear_gradients")


def implement_layer(quantizers_of: Callable, cached_rows: Callable, cached_groups: Callable) -> None:
    """Dispatch the OPERATORS of layers in C++, where the extension is used. What is not plain goes on to
    their implementations in Python.

    quantizers_of(recipe, device): of a recipe by its key; their `scheme` is that of layer_scheme().
    cached_rows(quantizers, weight, cache, is_first, x_dtype): data, scale, amax, values, block_rows and
    e4m3_max, as a layer takes them, of the rows that a cache keeps of a weight, or None.
    cached_groups(quantizers, weights, caches, is_first): copies, values and e4m3_max, as groups take them, of
    the rows that caches keep of all weights, or None.
    """

    def implement(extension: ModuleType) -> None:
        python = map(without_backend, OPERATORS)
        extension.implement_layer(*python, quantizers_of, cached_rows, cached_groups)

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
