"""zerofp4._autograd, the optional extension that is built against torch: loaded, or why it is not used."""

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

import zerofp4._C as _C
from zerofp4.ops.autograd_build import NAME, VARIABLE, FirstUse, Torch, say_once_a_host
from zerofp4.ops.device import DTYPE_CODES, check_cuda, current_stream
from zerofp4.ops.hardware import SLOW_ON_CPU
from zerofp4.ops.operator import without_backend


class _Found(NamedTuple):
    """The extension, or None and the reason. is_coming: the first use compiles it. is_unsaid: nobody asked
    for Python's nodes, and the first use says why they are used.
    """

    extension: ModuleType | None
    reason: str = ""
    is_coming: bool = False
    is_unsaid: bool = False


_found: _Found | None = None


def _look() -> _Found:
    """What there is, found once. Raises ValueError for a wrong value of the variable."""
    global _found
    if _found is None:
        given = os.environ.get(VARIABLE, "1")
        if given not in ("0", "1", "build"):
            raise ValueError(f"{VARIABLE}={given!r}: it is 0, 1 or build")
        _found = _Found(None, f"{VARIABLE} is 0") if given == "0" else _search(given == "build")
        if given == "build":
            _found = _said(_found)
    return _found


def _said(found: _Found) -> _Found:
    """The same, after its reason was said on stderr."""
    if found.is_unsaid:
        say_once_a_host(f"{NAME} is not used, Python does its work: {found.reason}")
    return found._replace(is_unsaid=False)


def _search(at_once: bool) -> _Found:
    """The extension of the installation, else that of the cache. at_once: compiled now, if there is none."""
    installed = _checked(lambda: importlib.import_module(NAME))
    if installed.extension is not None:
        return installed
    first_use = _first_use()
    why_not = first_use.make(retry=True) if at_once else first_use.why_not()
    if why_not is None and first_use.library.exists():
        found = _checked(lambda: _import_from(first_use.library))
        return found._replace(is_unsaid=found.extension is None)
    if why_not is None:
        coming = f"the first product with an NVFP4 weight compiles it, or {VARIABLE}=build at once"
        return _Found(None, f"{installed.reason}; {coming}", is_coming=True)
    reason = f"{installed.reason}; it was not compiled on first use: {why_not}"
    return _Found(None, reason, is_unsaid=True)


def compile_on_first_use() -> None:
    """Compile the extension where the installation has none for this torch. It takes a minute and says so.
    Where that fails or cannot be tried, one line on stderr says why, once.
    """
    global _found
    found = _look()
    if not (found.is_coming or found.is_unsaid):
        return
    with _compiling:
        if _look().is_coming:
            why_not = _first_use().make()
            reason = f"{NAME} was not compiled on first use: {why_not}"
            _found = _search(at_once=False) if why_not is None else _Found(None, reason, is_unsaid=True)
            users, _users[:] = list(_users), []
            for user in users:
                use_extension(user)
        _found = _said(_look())


_compiling = threading.Lock()


def _first_use() -> FirstUse:
    built = f"{torch.version.git_version} {torch.version.cuda}"
    return FirstUse(Torch(Path(torch.__file__).parent, torch.__version__, built))


def _import_from(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module
    return module


def _checked(load: Callable[[], ModuleType]) -> _Found:
    """What it loads, if that is for this torch and this zerofp4._C."""
    try:
        extension = load()
    except ModuleNotFoundError:
        return _Found(None, f"{NAME} was not built: the build saw no torch")
    except ImportError as error:  # most torches have not all symbols of another one
        return _Found(None, f"{NAME} cannot be loaded with torch {torch.__version__}: {error}")
    if extension.TORCH_VERSION != torch.__version__:
        return _Found(
            None, f"{NAME} was built for torch {extension.TORCH_VERSION}, this is {torch.__version__}"
        )
    functions = _C.dequantize_function, getattr(_C, "layer_functions", None)
    if not all(map(extension.fits, functions)):
        return _Found(None, f"{NAME} and zerofp4._C are of different builds")
    return _Found(extension)


_users: list[Callable[[ModuleType], None]] = []
"""Of an extension that the first use compiles."""


def use_extension(user: Callable[[ModuleType], None]) -> None:
    """Call user(extension): now, or once the first use has compiled it; never where it is not used."""
    found = _look()
    if found.extension is not None:
        user(found.extension)
    elif found.is_coming:
        _users.append(user)


def why_python_autograd() -> str | None:
    """Why F.linear of a quantized weight is a node in Python; None where it is one of zerofp4._autograd."""
    found = _look()
    return found.reason if found.extension is None else None


def extension_file() -> str | None:
    """Of the zerofp4._autograd that is used."""
    extension = native_extension()
    return None if extension is None else extension.__file__


def native_extension() -> ModuleType | None:
    """The extension; None where it is not used, or the first use has not compiled it."""
    return _look().extension


def use_native_linear(
    use: Callable, weight_type: type, values_source: Callable, gradient_place: Callable, gradients: Callable
) -> None:
    """Call use(linear) where the extension is used: linear(x, weight, bias or None) is F.linear in C++. It
    returns None for what the Python node has to do.

    weight_type: the class of weights that it takes, no subclass. values_source(record), gradient_place(node,
    index, dtype) and gradients(node, grad, x, weight, bias_needs) are what it calls in Python.
    """
    called = values_source, gradient_place, gradients, check_cuda, current_stream
    slow = sum(1 << DTYPE_CODES[dtype] for dtype in SLOW_ON_CPU)

    def configure(extension: ModuleType) -> None:
        extension.configure(weight_type, *called, _C.dequantize_function, slow)
        use(extension.linear)

    use_extension(configure)


def implement_operators() -> None:
    """Dispatch the operators that compiled code calls in C++, where the extension is used. Arguments that are
    not plain go on to the implementation in Python.
    """

    def implement(extension: ModuleType) -> None:
        python = without_backend("dequantize")
        extension.implement(python, _C.dequantize_function)

    use_extension(implement)
