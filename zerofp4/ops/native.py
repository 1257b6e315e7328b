"""What the extensions offer besides operators: calls without the dispatcher, readers, build_info()."""

from collections.abc import Callable
from typing import Any

import torch

import zerofp4._autograd as _autograd
import zerofp4._C as _C
from zerofp4.format import BLOCK, SCALE_LAYOUTS
from zerofp4.ops.dequantize import neutral_amax
from zerofp4.ops.device import (
    DTYPE_CODES,
    FP4_CAPABILITY,
    SLOW_ON_CPU,
    architectures,
    check_cuda,
    code_for,
    current_stream,
)
from zerofp4.ops.product import products_by, why_no_cublaslt
from zerofp4.ops.quantize import choice_arguments
from zerofp4.ops.schemas import without_backend
from zerofp4.storage import SIDES, side_and_layout, side_names

native_linear = _autograd.linear
"""native_linear(x, weight, bias or None): F.linear where x or the weight is quantized, after
configure_linear(). None where torch.func or forward AD has to see what it is made of.
"""


def configure_linear(
    weight_type: type,
    values_source: Callable,
    product: Callable,
    gradients: Callable,
    gradient_place: Callable,
) -> None:
    """What native_linear() calls in Python.

    weight_type: the class of weights that C++ multiplies, no subclass, and values_source(record), whose
    result is theirs. product(x, weight, bias) and gradients(node, grad, x, weight, bias_needs): for all
    others. gradient_place(node, dtype): memory for the gradient of a node's weight, or None; of layers, too.
    """
    called = values_source, product, gradients, gradient_place, check_cuda, current_stream
    slow = sum(1 << DTYPE_CODES[dtype] for dtype in SLOW_ON_CPU)
    _autograd.configure(weight_type, *called, slow)


native_layer = _autograd.layer
"""native_layer(x, splits, weight, bias, rows, scheme, recipe, main_grad, is_current): zerofp4::linear without
the dispatcher, or None for what that has to see (csrc/autograd/layer.cpp).
"""


def configure_layer(quantizers_of: Callable, cached_rows: Callable) -> None:
    """Dispatch zerofp4::linear and zerofp4::linear_gradients in C++, which hands what it does not multiply to
    their implementations in Python.

    quantizers_of(recipe, device): of a recipe by its key. cached_rows(quantizers, weight, cache): rows, as
    native_layer takes them, of the weight that a cache keeps, or None.
    """
    python = map(without_backend, ("linear", "linear_gradients"))
    _autograd.configure_layer(neutral_amax, *python, quantizers_of, cached_rows)


def layer_scheme(device: torch.device, recipe: Any) -> object:
    """How the layers of an NVFP4Recipe quantize on a device, for C++."""
    e4m3_max, error = choice_arguments(recipe.four_over_six)
    by_cublaslt = device.type == "cuda" and why_no_cublaslt() is None
    options = recipe.hadamard, recipe.random_signs, recipe.stochastic_rounding, e4m3_max, error == "mse"
    return _autograd.scheme(*options, recipe.weight_block == (BLOCK, BLOCK), by_cublaslt)


# What torch.compile asks a quantized tensor in each call of compiled code, without a frame of Python: guards
# and the unpacking of subclasses read each buffer of each weight.

_AMAXES = {"amax": list(SIDES), "columnwise_amax": ["columnwise"]}


def buffer_reader(name: str) -> Callable:
    """What gives the buffer of tensor.record of this name, one of BUFFERS, for a tensor."""
    if name in _AMAXES:
        return _C.amax_reader(_AMAXES[name])
    return _C.buffer_reader((*side_and_layout(name), name))


def flatten_method(cls: type) -> Callable:
    """A class's __tensor_flatten__: (names of its record's buffers, values of its context_fields)."""
    return _C.flatten_method(cls, [(*side_and_layout(name), name) for name in side_names(SCALE_LAYOUTS)])


def build_info() -> dict[str, dict]:
    """What was compiled in and what this machine can run.

    {"cpu": {"compiled": [instruction sets], "running": the one in use},
     "cuda": {"compiled": bool, "version": of the toolkit, "architectures": [...],
              "products": what multiplies, and why it is not cuBLASLt,
              "devices": [{"name", "capability", "usable", "gemm": the backend that zerofp4.gemm chooses}]}}

    Examples:
        >>> zerofp4.build_info()["cpu"]["running"]
    """
    build = _C.build()
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    devices = [
        {
            "name": torch.cuda.get_device_name(index),
            "capability": capability,
            "usable": code_for(capability, architectures()) is not None,
            "gemm": "native" if capability >= FP4_CAPABILITY else "exact",
        }
        for index, capability in enumerate(capabilities)
    ]
    return {
        "cpu": {"compiled": build["isas"].split(), "running": _C.cpu_isa()},
        "cuda": {
            "compiled": "cuda_version" in build,
            "version": build.get("cuda_version"),
            "architectures": architectures(),
            "products": products_by(),
            "devices": devices,
        },
    }
