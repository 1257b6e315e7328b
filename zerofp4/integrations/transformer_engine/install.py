"""Our functions in the place of TransformerEngine's, and back."""

import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable
from typing import Any

from zerofp4.integrations.transformer_engine import functions
from zerofp4.integrations.transformer_engine.records import KNOWN, NEWEST, OLDEST

_REPLACEMENTS = {
    f.__name__: f for f in (functions.quantize_master_weights, functions.post_all_gather_processing)
}


def install() -> None:
    """Put our cast behind TransformerEngine's quantize_master_weights and post_all_gather_processing, until
    uninstall(). A second call changes nothing.

    Modules that have imported these functions by name get ours too.

    Raises ImportError where TransformerEngine cannot be imported, RuntimeError for a version that is not
    known, or whose functions take other arguments. Nothing has changed when it raises.
    """
    if functions.originals:
        return
    utils = _find_utils()
    found = {name: getattr(utils, name, None) for name in _REPLACEMENTS}
    for name, ours in _REPLACEMENTS.items():
        _check_signature(name, found[name], ours)
    for name, ours in _REPLACEMENTS.items():
        _exchange(found[name], ours)
    functions.originals.update(found)


def uninstall() -> None:
    """Take back what install() did, in every module that has our functions. Changes nothing without it."""
    for name, original in functions.originals.items():
        _exchange(_REPLACEMENTS[name], original)
    functions.originals.clear()


def _find_utils() -> types.ModuleType:
    try:
        package = importlib.import_module("transformer_engine")
        version = str(getattr(package, "__version__", "without a version"))
        match = re.match(r"(\d+)\.(\d+)", version)
        if match is None or not OLDEST <= (int(match[1]), int(match[2])) <= NEWEST:
            raise RuntimeError(f"TransformerEngine {version} is not known to zerofp4, which knows {KNOWN}")
        return importlib.import_module("transformer_engine.pytorch.tensor.utils")
    except ImportError as error:
        raise ImportError(f"install() needs TransformerEngine, which cannot be imported: {error}") from error


def _check_signature(name: str, found: Any, ours: Callable) -> None:
    taken = list(inspect.signature(found).parameters) if callable(found) else None
    expected = list(inspect.signature(ours).parameters)
    if taken != expected:
        raise RuntimeError(
            f"TransformerEngine's {name} must be a function of ({', '.join(expected)}), got "
            f"{found if taken is None else '(' + ', '.join(taken) + ')'}"
        )


def _exchange(old: Callable, new: Callable) -> None:
    """In every module that has `old` under any name, but for where ours are from."""
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType) and module is not functions:
            for name, value in list(vars(module).items()):
                if value is old:
                    setattr(module, name, new)
