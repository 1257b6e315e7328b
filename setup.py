"""Builds zerofp4._C: pybind11 and our sources, no torch. CUDA sources are compiled when there is an nvcc.

Environment: ZEROFP4_CUDA=0 builds the CPU side only; NVCC names the compiler to use in place of the one on
the PATH.
"""

import os
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
CSRC = ROOT / "csrc"

# Bit-exactness: no contraction into fused multiply-adds, on either side.
HOST_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    f"-I{CSRC}",
]
HOST_FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
NVCC_FLAGS = ["-std=c++17", "-O3", "-fmad=false", f"-I{CSRC}", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall"]

ISA_FLAGS = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    ISA_FLAGS["avx2"] = ["-mavx2", "-mbmi2"]
    ISA_FLAGS["avx512"] = ["-mavx2", "-mbmi2", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]

# Machine code for these, and PTX of the last for GPUs that are newer than this list.
ARCHITECTURES = ["80", "90", "100f", "120f"]
PTX_ARCHITECTURE = "90"
OLDEST_NVCC_WITH_FAMILIES = (12, 9)


def find_nvcc():
    """(path, version string) of the CUDA compiler, or None."""
    if os.environ.get("ZEROFP4_CUDA") == "0":
        return None
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc")
    if nvcc is None:
        return None
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return nvcc, re.search(r"release (\d+\.\d+)", text).group(1)


def cuda_architectures(version):
    with_families = tuple(map(int, version.split("."))) >= OLDEST_NVCC_WITH_FAMILIES
    return [arch for arch in ARCHITECTURES if with_families or not arch.endswith("f")]


class Build(build_ext):
    """Compiles each CPU operation once per instruction set and each CUDA operation for every architecture."""

    def build_extension(self, ext):
        cxx = os.environ.get("CXX", "g++")
        cuda = find_nvcc()
        commands = self.host_commands(cxx, cuda) + (self.cuda_commands(*cuda) if cuda else [])
        newest_header = max(
            path.stat().st_mtime for path in [*CSRC.rglob("*.h"), *CSRC.rglob("*.cuh"), ROOT / "setup.py"]
        )
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda job: self.compile(*job, newest_header), commands))
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        link = (
            [cuda[0], "-shared", "-cudart=static", "-Xcompiler=-fopenmp"]
            if cuda
            else [cxx, "-shared", "-fopenmp"]
        )
        self.run_command_line([*link, *map(str, objects), "-o", str(target)])

    def host_commands(self, cxx, cuda):
        from sysconfig import get_path

        import pybind11

        defines = [f'-DZEROFP4_ISAS="{" ".join(ISA_FLAGS)}"']
        if cuda:
            architectures = [f"sm_{arch}" for arch in cuda_architectures(cuda[1])] + [
                f"compute_{PTX_ARCHITECTURE}"
            ]
            defines += [
                f'-DZEROFP4_CUDA_VERSION="{cuda[1]}"',
                f'-DZEROFP4_CUDA_ARCHITECTURES="{" ".join(architectures)}"',
            ]
        includes = [f"-I{pybind11.get_include()}", f"-I{get_path('include')}"]
        jobs = [
            (cxx, source, "host", [*HOST_FLAGS, *defines, *includes])
            for source in sorted((CSRC / "bindings").glob("*.cpp"))
        ]
        jobs += [
            (cxx, source, "host", [*HOST_FLAGS, *defines])
            for source in [*sorted((CSRC / "dispatch").glob("*.cpp")), CSRC / "cuda" / "table.cpp"]
        ]
        for source in sorted((CSRC / "cpu").rglob("*.cpp")):
            if source.name == "select.cpp":
                jobs.append((cxx, source, "host", HOST_FLAGS))
                continue
            for isa, flags in ISA_FLAGS.items():
                jobs.append((cxx, source, isa, [*HOST_FLAGS, *flags, f"-DZEROFP4_ISA={isa}"]))
        return jobs

    def cuda_commands(self, nvcc, version):
        flags = list(NVCC_FLAGS)
        for arch in cuda_architectures(version):
            flags += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
        flags += ["-gencode", f"arch=compute_{PTX_ARCHITECTURE},code=compute_{PTX_ARCHITECTURE}"]
        return [(nvcc, source, "cuda", flags) for source in sorted((CSRC / "cuda").rglob("*.cu"))]

    def compile(self, compiler, source, kind, flags, newest_header):
        """The object file of one source, compiled unless it is newer than the source and every header."""
        kind = f"{kind}-cuda" if any("ZEROFP4_CUDA_VERSION" in flag for flag in flags) else kind
        target = Path(self.build_temp) / kind / source.relative_to(CSRC).with_suffix(".o")
        if target.exists() and target.stat().st_mtime > max(newest_header, source.stat().st_mtime):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        self.run_command_line([compiler, *flags, "-c", str(source), "-o", str(target)])
        return target

    def run_command_line(self, command):
        print(" ".join(map(str, command)), flush=True)
        subprocess.run(command, check=True)


setup(ext_modules=[Extension("zerofp4._C", sources=[])], cmdclass={"build_ext": Build})
