"""Every header compiles by itself: it includes what it uses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pybind11 = pytest.importorskip("pybind11")

CSRC = Path(__file__).parents[2] / "csrc"
CXX = os.environ.get("CXX", "g++")
ON_CPU = ("common", "cpu", "dispatch", "bindings")
TORCH = Path(torch.__file__).parent / "include"


def headers(*folders: str, pattern: str = "*.h") -> list[Path]:
    return sorted(path for folder in folders for path in (CSRC / folder).rglob(pattern))


def failures(command: list[str], paths: list[Path]) -> dict[str, str]:
    """What the compiler said of each header that it refused."""

    def compile_one(path: Path) -> str | None:
        done = subprocess.run([*command, str(path)], capture_output=True, text=True)
        return done.stderr if done.returncode else None

    assert paths
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        said = pool.map(compile_one, paths)
        return {str(path.relative_to(CSRC)): text for path, text in zip(paths, said, strict=True) if text}


def cxx(standard: int, *folders: object) -> list[str]:
    if shutil.which(CXX) is None:
        pytest.skip(f"there is no {CXX}")
    systems = [f"-isystem{folder}" for folder in (*folders, sysconfig.get_path("include"))]
    options = [f"-std=c++{standard}", f"-I{CSRC}", "-DZEROFP4_ISA=baseline", *systems]
    return [CXX, "-fsyntax-only", "-x", "c++", "-w", *options]


@pytest.mark.heavy
def test_headers_of_the_cpu():
    assert failures(cxx(17, pybind11.get_include()), headers(*ON_CPU)) == {}


@pytest.mark.nightly
def test_headers_of_the_extension_that_is_built_against_torch():
    """Each takes as long as torch's own."""
    torchs = TORCH, TORCH / "torch" / "csrc" / "api" / "include"
    assert failures(cxx(20, *torchs), headers("autograd")) == {}


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_headers_of_cuda(tmp_path):
    nvcc = ["nvcc", "-std=c++17", "-x", "cu", "-ptx", "-arch=compute_90", f"-I{CSRC}", "-o", "/dev/null"]
    paths = headers("cuda") + headers("cuda", pattern="*.cuh") + headers("common", "dispatch")
    assert failures(nvcc, paths) == {}
