"""The optional second extension, zerofp4._autograd: compiled against the torch that is installed, if one is.

Its path and version are read from its files: to import it takes seconds. How to compile is read from the file
that does so on first use, where there was no torch to build against.
"""

import importlib.util
import os
import runpy
from pathlib import Path

from build_tools import ROOT
from build_tools.commands import CSRC, Job, switch, together

_on_first_use = runpy.run_path(str(ROOT / "zerofp4" / "ops" / "autograd_build.py"))
NAME = _on_first_use["NAME"]
TOGETHER = _on_first_use["TOGETHER"]
source_files = _on_first_use["source_files"]
Torch = _on_first_use["Torch"]


def find_torch():
    """None where there is none, as in an isolated build, and where the extension is not wanted."""
    asked = os.environ.get("ZEROFP4_AUTOGRAD") == "build" or switch("ZEROFP4_AUTOGRAD", "1")
    wanted = asked and not switch("ZEROFP4_SANITIZE", "0")
    found = importlib.util.find_spec("torch") if wanted else None
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent
    version = folder / "version.py"
    if not version.is_file() or not (folder / "include" / "torch" / "csrc").is_dir():
        return None
    return Torch(folder, runpy.run_path(str(version))["__version__"])


def jobs(cxx, torch):
    flags = tuple(_on_first_use["compile_flags"](CSRC, torch))
    merged = {name: [CSRC / "autograd" / part for part in parts] for name, parts in TOGETHER.items()}
    return [Job(together(name, paths), cxx, flags) for name, paths in merged.items()]


def link(cxx, torch):
    return [*cxx.command, *_on_first_use["link_flags"](torch)]
