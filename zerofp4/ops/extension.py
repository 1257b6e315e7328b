"""Loads both compiled extensions, or raises an ImportError that says how to build them."""

import importlib
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import torch  # loads the libraries of zerofp4._autograd

_BUILD = "run pip install --no-build-isolation . in the folder of its sources"


def _load(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModuleNotFoundError(_why_missing(name), name=name) from None
    except ImportError as error:  # built for another torch, for example
        reason = f"{name} cannot be loaded with torch {torch.__version__}: {error}: {_BUILD}"
        raise ImportError(reason, name=name) from None


def _why_missing(name: str) -> str:
    missing = f"{name}, a compiled extension, is not in {Path(__file__).parents[1]}"
    stems = [Path(entry, *name.split(".")) for entry in sys.path]
    found = [stem.parent for stem in stems for end in EXTENSION_SUFFIXES if Path(f"{stem}{end}").exists()]
    if not found:
        return f"{missing}: {_BUILD}"
    return (
        f"{missing}, and this source folder shadows the installation in {found[0]}: install with -e, or run "
        "Python in another folder (and zerofp4 instead of python -m zerofp4)"
    )


_C, _autograd = _load("zerofp4._C"), _load("zerofp4._autograd")
if _autograd.TORCH_VERSION != torch.__version__:
    _built = f"zerofp4._autograd was built for torch {_autograd.TORCH_VERSION}"
    raise ImportError(f"{_built}, this is {torch.__version__}: {_BUILD}")
if not _autograd.connect(_C.kernel_calls):
    raise ImportError(f"zerofp4._autograd and zerofp4._C are of different builds: {_BUILD}")
