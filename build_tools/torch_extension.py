"""The optional second extension, zerofp4._autograd: compiled against the torch that is installed, if one is.

Its path and version are read from its files: to import it takes seconds.
"""

import importlib.util
import runpy
from dataclasses import dataclass
from pathlib import Path
from sysconfig import get_path

from build_tools.commands import HOST_FLAGS, Job, sources, switch

NAME = "zerofp4._autograd"


@dataclass(frozen=True)
class Torch:
    folder: Path
    version: str


def find_torch():
    """None where there is none, as in an isolated build, and where the extension is not wanted."""
    wanted = switch("ZEROFP4_AUTOGRAD", "1") and not switch("ZEROFP4_SANITIZE", "0")
    found = importlib.util.find_spec("torch") if wanted else None
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent
    version = folder / "version.py"
    if not version.is_file() or not (folder / "include" / "torch" / "csrc").is_dir():
        return None
    return Torch(folder, runpy.run_path(str(version))["__version__"])


def jobs(cxx, torch):
    of_torch = torch.folder / "include"
    includes = [of_torch, of_torch / "torch/csrc/api/include", get_path("include")]
    flags = [*HOST_FLAGS, "-std=c++20", f'-DZEROFP4_TORCH_VERSION="{torch.version}"']
    flags += [f"-isystem{path}" for path in includes]  # their warnings are not ours
    return [Job(source, cxx, tuple(flags)) for source in sources("autograd", "*.cpp")]


def link(cxx, torch):
    """Without a path to torch's libraries: whoever imports the extension has loaded them."""
    libraries = ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
    return [*cxx.command, "-shared", "-s", f"-L{torch.folder / 'lib'}", "-Wl,--no-as-needed", *libraries]
