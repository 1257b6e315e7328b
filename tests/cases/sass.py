"""What nvcc makes of the kernels: their resources, and their machine code.

`python -m cases.sass`, in tests/, writes the table that tests/build/test_sass.py compares with.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CSRC = TESTS.parent / "csrc"
TABLE = TESTS / "data" / "kernel_resources.json"
HOT = (
    "cast/cast",
    "cast/transpose",
    "dequantize/dequantize",
    "mxfp8/quantize",
    "optim/adamw",
    "optim/compact",
    "quantize/quantize",
    "quantize/stochastic",
)
ARCHITECTURES = ("sm_80", "sm_90", "sm_100f", "sm_120f")
FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-diag-suppress=1675")  # as CMakeLists.txt has them


@dataclass(frozen=True)
class Multiprocessor:
    shared: int  # bytes
    warps: int
    blocks: int


RESOURCES = (
    "registers",
    "bytes of spill stores",
    "bytes of spill loads",
    "bytes of shared memory",
    "fused multiply-adds",
    "blocks",
)
MULTIPROCESSORS = {
    "sm_80": Multiprocessor(164 << 10, 64, 32),
    "sm_90": Multiprocessor(228 << 10, 64, 32),
    "sm_100f": Multiprocessor(228 << 10, 64, 32),
    "sm_120f": Multiprocessor(100 << 10, 48, 24),
}


@dataclass
class Instruction:
    predicate: str  # with its @, or ""
    name: str  # with its modifiers
    operands: list[str]
    label: str | None = None
    """Of a branch: where it goes."""


@dataclass
class Kernel:
    """threads: of a block at most. ptx: how often PTX has an instruction."""

    name: str
    threads: int = 256
    registers: int = 0
    spill_stores: int = 0  # bytes
    spill_loads: int = 0
    shared: int = 0  # static, bytes
    ptx: dict[str, int] = field(default_factory=dict)
    code: list[Instruction | str] = field(default_factory=list)
    """Labels are strings."""

    @property
    def instructions(self) -> list[Instruction]:
        return [each for each in self.code if isinstance(each, Instruction)]

    def blocks(self, architecture: str) -> int:
        """So many are resident on a multiprocessor."""
        of, warps = MULTIPROCESSORS[architecture], -(-self.threads // 32)
        by_registers = (1 << 16) // (-(-self.registers * 32 // 256) * 256) // 4 * 4 // warps
        by_shared = of.shared // (-(-(self.shared + 1024) // 128) * 128)  # 1 KB of a block is CUDA's
        return min(by_registers, by_shared, of.warps // warps, of.blocks)

    def count(self, pattern: str) -> int:
        """Of instructions whose names begin so."""
        return sum(bool(re.match(pattern, each.name)) for each in self.instructions)

    def resources(self, architecture: str) -> list[int]:
        """As RESOURCES says."""
        spills = self.spill_stores, self.spill_loads
        return [self.registers, *spills, self.shared, self.count("FFMA"), self.blocks(architecture)]


def nvcc() -> str:
    found = shutil.which(os.environ.get("CUDACXX", "nvcc"))
    if found is None:
        pytest.skip("there is no nvcc")
    return found


def nvcc_version() -> str:
    said = subprocess.run([nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"V(\d+\.\d+\.\d+)", said)[1]


def nvdisasm() -> str:
    """Of a toolkit, or of the wheel nvidia-cuda-nvdisasm."""
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia"
    path = os.pathsep.join([os.environ["PATH"], *map(str, wheels.glob("*/bin"))])
    found = shutil.which("nvdisasm", path=path)
    if found is None:
        pytest.skip("there is no nvdisasm: pip install nvidia-cuda-nvdisasm")
    return found


def compiled(source: Path, architecture: str, folder: Path) -> dict[str, Kernel]:
    """The kernels of a source by their names, as C++ has them."""
    folder = folder / f"{source.parent.name}.{source.stem}.{architecture}"
    folder.mkdir()
    binary = folder / "made.cubin"
    kept = ["-cubin", "-Xptxas=-v", "--keep", f"--keep-dir={folder}", f"-I{CSRC}"]
    command = [nvcc(), *FLAGS, *kept, f"-arch={architecture}", source, "-o", binary]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listing = subprocess.run([nvdisasm(), "-c", binary], capture_output=True, text=True, check=True).stdout
    (ptx,) = folder.glob("*.ptx")
    return kernels_of(done.stderr, ptx.read_text(), listing)


def kernels_of(log: str, ptx: str, listing: str) -> dict[str, Kernel]:
    """From what ptxas said, from PTX, and from a disassembly."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        mangled = part.partition("'")[0]
        found[mangled] = kernel = Kernel(mangled)
        sizes = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        kernel.spill_stores, kernel.spill_loads = map(int, sizes.groups())
        kernel.registers = int(re.search(r"Used (\d+) registers", part)[1])
        shared = re.search(r"(\d+) bytes smem", part)
        kernel.shared = int(shared[1]) if shared else 0
    for part in re.split(r"\.entry ", ptx)[1:]:
        kernel = found[re.match(r"\w+", part)[0]]
        threads = re.search(r"\.maxntid (\d+)", part)
        kernel.threads = int(threads[1]) if threads else 1024
        for name in re.findall(r"^\s*(?:@\S+ )?(\w+(?:\.\w+)+)\s", part, re.MULTILINE):
            kernel.ptx[name] = kernel.ptx.get(name, 0) + 1
    for part in re.split(r"^\.text\.", listing, flags=re.MULTILINE)[1:]:
        name, _, code = part.partition(":")
        if name in found:
            found[name].code = [each for line in code.splitlines() if (each := _line(line)) is not None]
    text = "\n".join(found)
    names = subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True).stdout
    for name, kernel in zip(names.splitlines(), found.values(), strict=True):
        kernel.name = _short(name)
    return {kernel.name: kernel for kernel in found.values()}


def _short(name: str) -> str:
    """Without namespaces, what it returns, and parameters."""
    name = name.replace("(anonymous namespace)", "").removeprefix("void ")
    name = re.sub(r"\(\w+\)(?=\d)", "", re.sub(r"\w*::", "", name))
    return re.sub(r"\(.*", "", name).replace(", ", ",")


def _line(line: str) -> Instruction | str | None:
    label = re.match(r"(\.L\w+|\$\S+):$", line)
    if label:
        return label[1]
    found = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(@\S+)?\s*([A-Z][\w.]*)\s*([^;]*);", line)
    if found is None:
        return None
    target = re.search(r"`\((\S+)\)", found[3])
    operands = [each.strip() for each in found[3].split(",") if each.strip()]
    return Instruction(found[1] or "", found[2], operands, target[1] if target else None)


def all_kernels(folder: Path, workers: int) -> dict[str, dict[str, dict[str, Kernel]]]:
    """By source, kernel and architecture."""
    jobs = [(source, architecture) for source in HOT for architecture in ARCHITECTURES]
    with ThreadPoolExecutor(workers) as pool:
        made = pool.map(lambda job: compiled(CSRC / "cuda" / f"{job[0]}.cu", job[1], folder), jobs)
        found: dict = {source: {} for source in HOT}
        for (source, architecture), kernels in zip(jobs, made, strict=True):
            for name, kernel in kernels.items():
                found[source].setdefault(name, {})[architecture] = kernel
    return found


def as_text(found: dict[str, dict[str, dict[str, Kernel]]]) -> str:
    """The table: a line for each kernel."""
    lines = [f'{{"nvcc": "{nvcc_version()}"']
    for source, kernels in found.items():
        rows = [
            f"  {json.dumps(name)}: "
            + json.dumps({arch: each.resources(arch) for arch, each in sorted(of.items())})
            for name, of in sorted(kernels.items())
        ]
        lines.append(f'"{source}": {{\n' + ",\n".join(rows) + "\n}")
    return ",\n".join(lines) + "}\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        TABLE.write_text(as_text(all_kernels(Path(folder), int((sys.argv[1:] or [os.cpu_count()])[0]))))
