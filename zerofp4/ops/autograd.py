"""zerofp4._autograd, the optional extension that is built against torch: loaded, or why it is not used."""

import functools
import importlib
import os
from collections.abc import Callable
from types import ModuleType

import torch

import zerofp4._C as _C
from zerofp4.ops.device import check_cuda, current_stream
from zerofp4.ops.operator import without_backend

VARIABLE = "ZEROFP4_AUTOGRAD"
_NAME = "zerofp4._autograd"


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    """The extension, or None and the reason. Raises ValueError for a wrong value of the variable."""
    given = os.environ.get(VARIABLE, "1")
    if given not in ("0", "1"):
        raise ValueError(f"{VARIABLE}={given!r}: it is 0 or 1")
    if given == "0":
        return None, f"{VARIABLE} is 0"
    try:
        extension = importlib.import_module(_NAME)
    except ModuleNotFoundError:
        return None, f"{_NAME} was not built: it needs a torch that the build can see, --no-build-isolation"
    except ImportError as error:  # most torches have not all symbols of another one
        return None, f"{_NAME} cannot be loaded, rebuild it for torch {torch.__version__}: {error}"
    if extension.TORCH_VERSION != torch.__version__:
        return None, f"{_NAME} was built for torch {extension.TORCH_VERSION}, this is {torch.__version__}"
    functions = _C.dequantize_function, getattr(_C, "layer_functions", None)
    if not all(map(extension.fits, functions)):
        return None, f"{_NAME} and zerofp4._C are of different builds: build both"
    return extension, ""


def why_python_autograd() -> str | None:
    """Why F.linear of a quantized weight is a node in Python; None where it is one of zerofp4._autograd."""
    extension, reason = _load()
    return reason if extension is None else None


def native_lists() -> ModuleType | None:
    """The extension with its functions over lists of tensors (csrc/autograd/lists.cpp); None where it is not
    used.
    """
    return _load()[0]


def native_linear(
    weight_type: type, values_source: Callable, gradient_place: Callable, gradients: Callable
) -> Callable[..., torch.Tensor | None] | None:
    """F.linear(x, weight, bias or None) in C++, None where the extension is not used. It returns None for
    what the Python node has to do.

    weight_type: the class of weights that it takes, no subclass. values_source(record), gradient_place(node,
    index, dtype) and gradients(node, grad, x, weight, bias_needs) are what it calls in Python.
    """
    extension, _ = _load()
    if extension is None:
        return None
    called = values_source, gradient_place, gradients, check_cuda, current_stream
    extension.configure(weight_type, *called, _C.dequantize_function)
    return extension.linear


def implement_operators() -> None:
    """Dispatch the operators that compiled code calls in C++, where the extension is used. Arguments that are
    not plain go on to the implementation in Python.
    """
    extension, _ = _load()
    if extension is not None:
        python = without_backend("dequantize")
        extension.implement(python, _C.dequantize_function)
