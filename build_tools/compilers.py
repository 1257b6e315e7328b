"""The compilers of this machine, and what to install where one is missing or broken."""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from sysconfig import get_path, get_python_version

from build_tools import BuildError

OLDEST_NVCC = (11, 8)
# Its files cannot be loaded by drivers older than 550, which a CUDA this new has no use for.
OLDEST_NVCC_WITH_COMPRESS_MODE = (12, 8)
OLDEST_NVCC_WITH_FAST_COMPILE = (12, 9)

CXX_PACKAGES = "apt-get install g++, or conda install -c conda-forge cxx-compiler"
OPENMP_PACKAGES = "apt-get install g++ (libomp-dev for clang), or conda install -c conda-forge llvm-openmp"
NVCC_PACKAGES = (
    "apt-get install cuda-toolkit (NVIDIA's repository) or nvidia-cuda-toolkit, or conda install -c "
    "conda-forge cuda-nvcc cuda-cudart-dev cuda-cudart-static; ZEROFP4_CUDA=0 builds without CUDA"
)


@dataclass(frozen=True)
class Compiler:
    """A command and what it says of its version."""

    command: tuple[str, ...]
    identity: str


@dataclass(frozen=True)
class Toolkit(Compiler):
    """nvcc: its version as (major, minor), and the architectures it knows, without suffixes."""

    version: tuple[int, int]
    bases: frozenset[str]


def output(command, advice):
    """What a compiler says when it is asked about itself."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run ({error.strerror}): {advice}") from None
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{shlex.join(command)} failed: {error.stderr.strip()}\n{advice}") from None


def find_cxx():
    """$CXX, else the first of g++, c++ and clang++."""
    given = os.environ.get("CXX")
    found = [name for name in ("g++", "c++", "clang++") if shutil.which(name)]
    command = shlex.split(given) if given else found[:1]
    if not command:
        raise BuildError(f"there is no C++ compiler on the PATH: {CXX_PACKAGES}")
    if shutil.which(command[0]) is None:
        raise BuildError(f"CXX={given!r}: there is no such program: {CXX_PACKAGES}")
    return Compiler(tuple(command), output([*command, "--version"], CXX_PACKAGES))


def find_nvcc(cxx):
    """The CUDA compiler: $NVCC, else nvcc on the PATH. None where there is none, and with ZEROFP4_CUDA=0."""
    if os.environ.get("ZEROFP4_CUDA") == "0":
        return None
    given = os.environ.get("NVCC")
    nvcc = shutil.which(given or "nvcc")
    if nvcc is None and given:
        raise BuildError(f"NVCC={given!r}: there is no such program: {NVCC_PACKAGES}")
    return nvcc and toolkit(nvcc, cxx)


def toolkit(nvcc, cxx):
    said = output([nvcc, "--version"], NVCC_PACKAGES)
    release = re.search(r"release (\d+)\.(\d+)", said)
    if release is None:
        raise BuildError(f"{nvcc} --version names no release: {said.strip()!r}\n{NVCC_PACKAGES}")
    version = int(release[1]), int(release[2])
    if version < OLDEST_NVCC:
        oldest = ".".join(map(str, OLDEST_NVCC))
        raise BuildError(f"{nvcc} is release {release[1]}.{release[2]}, {oldest} is needed: {NVCC_PACKAGES}")
    bases = re.findall(r"compute_(\d+)", output([nvcc, "--list-gpu-arch"], NVCC_PACKAGES))
    # These change what nvcc does and are not on its command line.
    environment = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith("NVCC_")]
    command = [nvcc]
    if cxx.command != ("g++",) and len(cxx.command) == 1 and "NVCC_CCBIN" not in os.environ:
        command.append(f"-ccbin={cxx.command[0]}")
    identity = "\n".join([said, cxx.identity, *environment])
    return Toolkit(tuple(command), identity, version, frozenset(bases))


def try_out(cxx, nvcc):
    """Compiles a few lines with each, so that what is missing is named before pages of errors hide it."""
    if not (Path(get_path("include")) / "Python.h").exists():
        version = get_python_version()
        raise BuildError(f"there is no Python.h for Python {version}: apt-get install python{version}-dev")
    with tempfile.TemporaryDirectory() as folder:
        main = "int main() { return 0; }\n"
        try_one(cxx, ["-std=c++17"], "#include <cstdint>\n" + main, "x.cpp", folder, CXX_PACKAGES)
        openmp = f"{cxx.command[0]} has no OpenMP: {OPENMP_PACKAGES}"
        try_one(cxx, ["-fopenmp"], "#include <omp.h>\n" + main, "x.cpp", folder, openmp)
        if nvcc:
            flags = ["-std=c++17", "-cudart=static"]
            try_one(nvcc, flags, "#include <cuda_runtime.h>\n" + main, "x.cu", folder, NVCC_PACKAGES)


def try_one(compiler, flags, text, name, folder, advice):
    source = Path(folder, name)
    source.write_text(text)
    command = [*compiler.command, *flags, str(source), "-o", str(source.with_suffix(""))]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        said = (run.stderr + run.stdout).strip()
        raise BuildError(f"{compiler.command[0]} cannot build a program of two lines:\n{said}\n{advice}")
