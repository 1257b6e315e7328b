"""How each source is compiled: CUDA by nvcc, the CPU's operations per instruction set, the rest once."""

import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from sysconfig import get_path

from build_tools import ROOT, BuildError, architectures, compilers

CSRC = Path("csrc")
OBJECTS = Path("build", "objects")

# Bit-exactness: no contraction into fused multiply-adds, on either side.
HOST_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", f"-I{CSRC}"]
HOST_FLAGS += ["-Wall", "-Wextra", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# 1675: pragmas that are meant for the C++ compiler.
NVCC_FLAGS = ["-std=c++17", "-O3", "-fmad=false", f"-I{CSRC}", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall"]
NVCC_FLAGS += ["-diag-suppress=1675"]

# A finding ends the process. float-cast-overflow is not part of undefined.
SANITIZER_FLAGS = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]
SANITIZER_FLAGS += ["-fno-omit-frame-pointer", "-g1", "-O1"]

ISA_FLAGS = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    ISA_FLAGS["avx2"] = ["-mavx2", "-mbmi2", "-mfma"]
    ISA_FLAGS["avx512"] = [*ISA_FLAGS["avx2"], "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]

# Seconds on one core with one architecture, of what takes longer than its neighbours. Only the order matters:
# what takes longest begins first, so that no core waits for it at the end.
SECONDS = {
    "cuda/quantize/grouped_stochastic.cu": 35,
    "cuda/quantize/grouped.cu": 30,
    "cuda/quantize/stochastic.cu": 25,
    "cuda/quantize/quantize.cu": 22,
    "all_bindings.cpp": 16,
    "all_layers.cpp": 18,
    "all_products.cpp": 15,
    "all_small.cu": 15,
    "cuda/optim/compact.cu": 12,
    "cuda/quantize/stack.cu": 10,
    "cuda/dequantize/dequantize.cu": 9,
    "cuda/cast/cast.cu": 6,
    "cuda/mxfp8/quantize.cu": 6,
    "cuda/quantize/four_over_six.cu": 6,
    "cpu/quantize/quantize.cpp": 3,
}

# Compiled as one: for each by itself nvcc would read the headers longer, once more for every architecture.
TOGETHER = {
    "cuda/cast/amax.cu",
    "cuda/cast/scale.cu",
    "cuda/cast/transpose.cu",
    "cuda/comm/barrier.cu",
    "cuda/comm/gather.cu",
    "cuda/device/current.cu",
    "cuda/gemm/cublaslt.cu",
    "cuda/gemm/product.cu",
    "cuda/mxfp8/dequantize.cu",
    "cuda/optim/adamw.cu",
    "cuda/optim/average.cu",
    "cuda/optim/nonfinite.cu",
    "cuda/optim/squares.cu",
    "cuda/optim/widen.cu",
    "cuda/quantize/amax.cu",
    "cuda/quantize/scale_layout.cu",
}


@dataclass(frozen=True)
class Job:
    """One object: a source, relative to the repository, and the command for it without input and output."""

    source: Path
    compiler: compilers.Compiler
    flags: tuple[str, ...]
    isa: str = ""

    @property
    def name(self):
        return str(self.source.relative_to(CSRC if CSRC in self.source.parents else OBJECTS))

    @property
    def label(self):
        return f"{self.name} ({self.isa})" if self.isa else self.name

    @property
    def key(self):
        """Equal for equal command lines of equal compilers, and for no others."""
        words = [self.compiler.identity, *self.compiler.command, *self.flags, str(self.source)]
        return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]

    @property
    def object(self):
        return OBJECTS / Path(self.name).with_suffix(f".{self.key}.o")

    @property
    def seconds(self):
        return SECONDS.get(self.name, 4 if self.source.suffix == ".cu" else 1)

    def command(self, output, dependencies):
        files = ["-MMD", "-MF", str(dependencies), "-c", str(self.source), "-o", str(output)]
        return [*self.compiler.command, *self.flags, *files]


def sources(folder, pattern):
    return sorted(path.relative_to(ROOT) for path in (ROOT / CSRC / folder).rglob(pattern))


def all_jobs(cxx, nvcc, archs):
    """Every object of the extension. nvcc is None for a build without CUDA."""
    last = sanitizer_flags(nvcc)
    jobs = [Job(source, cxx, (*flags, *last), isa) for source, flags, isa in host_sources(nvcc, archs)]
    if nvcc:
        flags = (*NVCC_FLAGS, *optimization(nvcc), *compression(nvcc), *architectures.nvcc_flags(archs))
        jobs += [Job(source, nvcc, flags) for source in cuda_sources()]
    return jobs


def switch(name, default):
    """Is this environment variable 1?"""
    given = os.environ.get(name, default)
    if given not in ("0", "1"):
        raise BuildError(f"{name}={given!r}: it is 0 or 1")
    return given == "1"


def sanitizer_flags(nvcc):
    """Of a build with ZEROFP4_SANITIZE=1, which is one of the CPU side: nvcc's objects know no sanitizer."""
    sanitized = switch("ZEROFP4_SANITIZE", "0")
    if sanitized and nvcc:
        raise BuildError("ZEROFP4_SANITIZE=1 is for the CPU side only: add ZEROFP4_CUDA=0")
    return SANITIZER_FLAGS if sanitized else []


def optimization(nvcc):
    """-O3 is for the host's code; GPU code is optimized unless nvcc is told not to, and can be told."""
    optimized = switch("ZEROFP4_CUDA_OPTIMIZE", "1")
    if optimized or nvcc.version < compilers.OLDEST_NVCC_WITH_FAST_COMPILE:
        return []
    return ["--Ofast-compile=max"]


def compression(nvcc):
    """A fifth of the size."""
    return ["--compress-mode=size"] if nvcc.version >= compilers.OLDEST_NVCC_WITH_COMPRESS_MODE else []


def host_sources(nvcc, archs):
    """(source, flags, instruction set or "") of what the C++ compiler gets."""
    import pybind11

    build = [f'-DZEROFP4_ISAS="{" ".join(ISA_FLAGS)}"']
    if nvcc:
        build += [
            f'-DZEROFP4_CUDA_VERSION="{nvcc.version[0]}.{nvcc.version[1]}"',
            f'-DZEROFP4_CUDA_ARCHITECTURES="{" ".join(architectures.names(archs))}"',
        ]
    python = [f"-I{pybind11.get_include()}", f"-I{get_path('include')}"]
    yield all_bindings(), [*HOST_FLAGS, *build, *python], ""
    # What does not know of Python is shared by the builds for all of them.
    for source in sources("dispatch", "*.cpp") + sources("cuda", "*.cpp"):
        yield source, [*HOST_FLAGS, *build], ""
    for source in sources("cpu", "*.cpp"):
        if source.name == "select.cpp":
            yield source, HOST_FLAGS, ""
            continue
        for isa, flags in ISA_FLAGS.items():
            yield source, [*HOST_FLAGS, *flags, f"-DZEROFP4_ISA={isa}"], isa


def cuda_sources():
    """What nvcc gets."""
    found = sources("cuda", "*.cu")
    small = [path for path in found if str(path.relative_to(CSRC)) in TOGETHER]
    return [together("all_small.cu", small), *(path for path in found if path not in small)]


def all_bindings():
    """Reading pybind11's headers takes longer than any of them."""
    return together("all_bindings.cpp", sources("bindings", "*.cpp"))


def together(name, paths):
    """One source, which includes the others."""
    text = "".join(f'#include "{path.relative_to(CSRC)}"\n' for path in paths)
    path = OBJECTS / name
    written = ROOT / path
    if not written.exists() or written.read_text() != text:
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(text)
    return path


def link(cxx, nvcc):
    """The command that makes a library of objects; CUDA's runtime in it, so that it loads without one."""
    if nvcc:
        return [*nvcc.command, "-shared", "-cudart=static", "-Xcompiler=-fopenmp", "-Xlinker=-s"]
    # A report without symbols names no line.
    return [*cxx.command, "-shared", "-fopenmp", *(sanitizer_flags(nvcc) or ["-s"])]
