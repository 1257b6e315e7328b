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
"""native_linear(x, weight, bias or None): F.linear with x or the weight quantized, after configure_linear().
None if torch.func or forward AD has to see its parts.
"""


def configure_linear(
    weight_type: type,
    values_source: Callable,
    product: Callable,
    gradients: Callable,
    gradient_place: Callable,
) -> None:
    """Tell native_linear() what to call in Python.

    weight_type: the class of weights that C++ multiplies, no subclass; values_source(record) gives their
        codes.
    product(x, weight, bias), gradients(node, grad, x, weight, bias_needs): for all others.
    gradient_place(node, dtype): memory for the gradient of a node's weight, or None; also for layers.
    """
    called = values_source, product, gradients, gradient_place, check_cuda, current_stream
    slow = sum(1 << DTYPE_CODES[dtype] for dtype in SLOW_ON_CPU)
    _autograd.configure(weight_type, *called, slow)


native_layer = _autograd.layer
"""native_layer(x, splits, weight, bias, rows, scheme, recipe, main_grad, is_current): zerofp4::linear without
the dispatcher, or None for what that has to see (csrc/autograd/layer.cpp).
"""


def configure_layer(quantizers_of: Callable, cached_rows: Callable) -> None:
    """Dispatch zerofp4::linear and zerofp4::linear_gradients in C++, which leaves to their Python
    implementations what it does not multiply.

    quantizers_of(recipe, device): by the recipe's key. cached_rows(quantizers, weight, cache): the rows of a
    cached weight as native_layer takes them, or None.
    """
    python = map(without_backend, ("linear", "linear_gradients"))
    _autograd.configure_layer(neutral_amax, *python, quantizers_of, cached_rows)


def layer_scheme(device: torch.device, recipe: Any) -> object:
    """How the layers of an NVFP4Recipe quantize on a device, for C++."""
    e4m3_max, error = choice_arguments(recipe.four_over_six)
    by_cublaslt = device.type == "cuda" and why_no_cublaslt() is None
    options = recipe.hadamard, recipe.random_signs, recipe.stochastic_rounding, e4m3_max, error == "mse"
    return _autograd.scheme(*options, recipe.weight_block == (BLOCK, BLOCK), by_cublaslt)


# Without a Python frame: in each call of compiled code, guards and the unpacking of subclasses read
# every buffer of every weight.

_AMAXES = {"amax": list(SIDES), "columnwise_amax": ["columnwise"]}


def buffer_reader(name: str) -> Callable:
    """A function that gives the buffer of tensor.record with this name in BUFFERS."""
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
