"""Builds zerofp4._C and zerofp4._autograd by CMake and ninja, for this Python and the torch that it has:

    pip install torch 'setuptools>=77' pybind11 cmake ninja
    pip install --no-build-isolation .

Environment:
    ZEROFP4_CUDA=0      the CPU side only, as where there is no nvcc
    ZEROFP4_CUDA_ARCHS  GPU architectures: "90", "80;90;100f", "native", "all", or "branches", the least that
                        has every branch of the sources. If not given, native where there is a GPU, else all.
                        PTX of compute_90 is always added, for newer GPUs. Or "compute_80": its PTX alone, to
                        try the code for an older GPU on a newer one.
    ZEROFP4_CUDA_OPTIMIZE=0
                        GPU code that is hardly optimized, in a fifth of the time: to see that it compiles.
                        nvcc before 12.9 optimizes all the same.
    ZEROFP4_SANITIZE=1  zerofp4._C with AddressSanitizer and UndefinedBehaviorSanitizer. Needs ZEROFP4_CUDA=0,
                        and that Python runs under them, as scripts/test.sh --sanitize starts it.
    CXX, CUDACXX        the compilers to use in place of those on the PATH

What is built stays in build/cmake-*: the next build compiles what has changed.
"""

import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError

ROOT = Path(__file__).resolve().parent
HOW = "pip install torch 'setuptools>=77' pybind11 cmake ninja, then pip install --no-build-isolation ."
SWITCHES = {"ZEROFP4_CUDA": "1", "ZEROFP4_CUDA_OPTIMIZE": "1", "ZEROFP4_SANITIZE": "0"}
COMPILERS = ("CXX", "CUDACXX", "CUDAHOSTCXX", "NVCC_CCBIN", "CXXFLAGS", "CUDAFLAGS", "LDFLAGS")
# This Python's programs come first: its environment may not be activated.
PATH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])


def check_tools():
    found = {name: importlib.util.find_spec(name) for name in ("torch", "pybind11")}
    found |= {name: shutil.which(name, path=PATH) for name in ("cmake", "ninja")}
    found["setuptools>=77"] = int(setuptools.__version__.split(".")[0]) >= 77
    missing = ", ".join(name for name in found if not found[name])
    if missing:
        sys.exit(f"the build does not find {missing}: {HOW}")


def definitions():
    """What CMakeLists.txt is told."""
    import pybind11

    torch = Path(importlib.util.find_spec("torch").origin).parent  # importing it would take seconds
    switches = {name: os.environ.get(name, default) for name, default in SWITCHES.items()}
    for name, value in switches.items():
        if value not in ("0", "1"):
            raise BaseError(f"{name}={value!r}: it is 0 or 1")
    return switches | {
        "ZEROFP4_CUDA_ARCHS": os.environ.get("ZEROFP4_CUDA_ARCHS", ""),
        "PYTHON_INCLUDE": sysconfig.get_path("include"),
        "PYTHON_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
        "PYBIND11_INCLUDE": pybind11.get_include(),
        "TORCH": torch,
        "TORCH_VERSION": runpy.run_path(str(torch / "version.py"))["__version__"],
    }


def run_cmake(*arguments):
    command = [shutil.which("cmake", path=PATH), *map(str, arguments)]
    if subprocess.run(command, env=os.environ | {"PATH": PATH}).returncode:
        raise BaseError("zerofp4 was not built: see above")


def configure(folder, defined):
    """Each time, because there may be other GPUs: it takes a fraction of a second."""
    record = folder / "compilers"
    found = [shutil.which("nvcc", path=PATH), *(os.environ.get(name) for name in COMPILERS)]
    if not record.exists() or record.read_text() != repr(found):  # CMake looks for compilers once
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        record.write_text(repr(found))
    run_cmake("-G", "Ninja", "-S", ROOT, "-B", folder, *(f"-D{name}={defined[name]}" for name in defined))


class Build(build_ext):
    def build_extensions(self):
        defined = definitions()
        kind = "-sanitized" if defined["ZEROFP4_SANITIZE"] == "1" else ""
        folder = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}{kind}"
        configure(folder, defined)
        run_cmake("--build", folder)
        for extension in self.extensions:
            target = Path(self.get_ext_fullpath(extension.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # a process that has loaded it keeps the old one
            shutil.copy2(folder / target.name, target)


if "bdist_wheel" in sys.argv or not {"sdist", "egg_info"} & set(sys.argv):
    check_tools()
names = "zerofp4._C", "zerofp4._autograd"
setup(ext_modules=[Extension(name, sources=[]) for name in names], cmdclass={"build_ext": Build})
