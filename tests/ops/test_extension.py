"""import zerofp4 needs both extensions, of one build and for this torch, or says how to build them."""

from __future__ import annotations

import importlib
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch

from zerofp4.ops import extension

DO = "run pip install --no-build-isolation . in the folder of its sources$"


def load(monkeypatch, found: object) -> None:
    """The page again, where importing zerofp4._autograd gives this, or raises it."""

    def import_module(name, original=importlib.import_module):
        if name != "zerofp4._autograd":
            return original(name)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(importlib, "import_module", import_module)
    runpy.run_path(extension.__file__)


def other(version: str = torch.__version__, fits: bool = True) -> SimpleNamespace:
    return SimpleNamespace(TORCH_VERSION=version, connect=lambda calls: fits)


def test_an_extension_that_fits(monkeypatch):
    load(monkeypatch, other())


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (ImportError("undefined symbol: x"), r"cannot be loaded with torch \S+: undefined symbol: x: "),
        (other(version="2.0.0"), r"was built for torch 2\.0\.0, this is \S+: "),
        (other(fits=False), "and zerofp4._C are of different builds: "),
    ],
    ids=["not to be loaded", "of another torch", "of another build"],
)
def test_an_extension_that_cannot_be_used(monkeypatch, found, message):
    with pytest.raises(ImportError, match=f"^zerofp4._autograd {message}{DO}"):
        load(monkeypatch, found)


def test_an_extension_that_is_missing(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    error = ModuleNotFoundError("no file", name="zerofp4._autograd")
    with pytest.raises(ModuleNotFoundError, match=rf"^zerofp4._autograd, a compiled .* not in \S+: {DO}"):
        load(monkeypatch, error)


def test_another_module_that_is_missing(monkeypatch):
    with pytest.raises(ModuleNotFoundError, match=r"^no file$"):
        load(monkeypatch, ModuleNotFoundError("no file", name="another"))
