"""Builds by setup.py and CMake in a folder of a test."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import setuptools

ROOT = Path(__file__).parents[2]
CONFIGURE = """
import pathlib, runpy, setuptools, sys
setuptools.setup = lambda **options: None
page = runpy.run_path("setup.py")
try:
    page["configure"](pathlib.Path(sys.argv[1]), page["definitions"]())
except page["BaseError"] as error:
    sys.exit(f"error: {error}")
"""


def setup_page() -> SimpleNamespace:
    """What setup.py defines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **options: None)
        return SimpleNamespace(**runpy.run_path(str(ROOT / "setup.py")))


def try_to_configure(folder: Path, root: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """As setup.py does, with these of its variables alone; stderr is part of stdout."""
    flags = ("LDFLAGS", "CXXFLAGS", "CUDAFLAGS")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ZEROFP4_") and k not in flags}
    command = [sys.executable, "-c", CONFIGURE, str(folder)]
    said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, cwd=root, env=kept | environment, **said)


def configure(folder: Path, root: Path = ROOT, **environment: str) -> dict[str, str]:
    """The commands that compile, by their object, relative to the folder."""
    done = try_to_configure(folder, root, **environment)
    assert done.returncode == 0, done.stdout
    listed = json.loads((folder / "compile_commands.json").read_text())
    commands = [entry["command"] for entry in listed]
    return {re.search(r" -o (\S+)", command)[1]: command for command in commands}


def ninja(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["ninja", *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
