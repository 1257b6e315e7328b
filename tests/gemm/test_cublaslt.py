"""What is asked of cuBLASLt, and the numbers by which it is asked, without a GPU."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from native import CSRC, FOLDER, build

BFLOAT16, NVFP4, MXFP8 = 1, 3, 4  # Inputs
SUCCESS, INVALID_VALUE, NOT_SUPPORTED = 0, 7, 15
# Attributes of a product's descriptor
EPILOGUE, BIAS, STRIDE, SCALE_A, SCALE_B, BIAS_TYPE, MODE_A, MODE_B = 7, 8, 14, 17, 18, 26, 31, 32


def folders_of_headers() -> list[Path]:
    """Of a toolkit, and of NVIDIA's wheels."""
    compiler = shutil.which(os.environ.get("CUDACXX", "nvcc"))
    toolkit = os.environ.get("CUDA_HOME") or (compiler and Path(compiler).resolve().parents[1])
    found = [] if toolkit is None else [Path(toolkit) / "include"]
    if compiler is not None:  # which may be a script
        said = subprocess.run([compiler, "--dryrun", "-c", "x.cu"], capture_output=True, text=True).stderr
        tops = [line.partition("TOP=")[2] for line in said.splitlines() if "TOP=" in line]
        found += [Path(top) / "include" for top in tops]
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia"
    return [*found, *sorted(wheels.glob("*/include"))]


def test_the_numbers_are_those_of_nvidias_headers():
    folders = [folder for folder in folders_of_headers() if folder.is_dir()]
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    for header in ("cublasLt.h", "library_types.h"):
        if compiler is None or not any((folder / header).exists() for folder in folders):
            pytest.skip(f"no C++ compiler, or no {header} in {[str(folder) for folder in folders]}")
    options = ["-std=c++17", "-fsyntax-only", f"-I{CSRC}", *(f"-isystem{folder}" for folder in folders)]
    source = FOLDER / "cublaslt_enumerants.cpp"
    done = subprocess.run([compiler, *options, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """What LtProduct does with a cuBLASLt that takes everything, a line each, before and in its run."""
    product = build("lt_product", torch.device("cpu"), tmp_path_factory.mktemp("native")).product
    product.restype = ctypes.c_char_p
    kinds = ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_bool, ctypes.c_uint32, ctypes.c_int
    product.argtypes = kinds

    def call(inputs, output=BFLOAT16, accumulate=False, bias=0, version=130000, heuristic=SUCCESS):
        lines = product(version, inputs, output, accumulate, bias, heuristic).decode().splitlines()
        at = lines.index("heuristic")
        return lines[:at], lines[at + 1 :]

    return call


def values_of(lines: list[str]) -> dict[int, int]:
    """By attribute."""
    words = [line.split() for line in lines if line.startswith("set ")]
    assert len({word[1] for word in words}) == len(words)
    return {int(attribute): int(value) for _, attribute, value, _ in words}


@pytest.mark.parametrize(("inputs", "type", "mode"), [(NVFP4, 33, 1), (MXFP8, 28, 2)])
def test_scales_have_an_address_before_an_algorithm_is_asked_for(ask, inputs, type, mode):
    """cuBLASLt refuses block scales whose pointer is null."""
    before, after = ask(inputs)
    found = values_of(before)
    assert (found[MODE_A], found[MODE_B]) == (mode, mode)
    assert found[SCALE_A] and found[SCALE_A] % 16 == 0 and found[SCALE_B] == found[SCALE_A]
    assert [line for line in before if line.startswith("layout")][:2] == [
        f"layout {type} 96 64 96",
        f"layout {type} 96 48 96",
    ]
    assert after[0] == "run" and after[-1] == "matmul 0x500 0x200 0x100 0x800 0x700"
    # b is cuBLASLt's first matrix.
    assert values_of(after) == {SCALE_A: 0x400, SCALE_B: 0x300}


def test_plain_operands_have_no_scales(ask):
    before, after = ask(BFLOAT16, bias=16)
    assert not {MODE_A, MODE_B, SCALE_A, SCALE_B, STRIDE, BIAS_TYPE} & values_of(before).keys()
    assert values_of(after) == {BIAS: 0x600}


def test_a_bias_has_the_outputs_dtype(ask):
    """cuBLASLt's own choice, where operands have scales, is bfloat16 for a float32 output."""
    before, after = ask(NVFP4, output=0, bias=32)
    found = values_of(before)
    assert (found[EPILOGUE], found[BIAS_TYPE], found[BIAS]) == (4, 0, 32)
    assert values_of(after)[BIAS] == 0x600


def test_accumulation_reads_a_one(ask):
    assert ask(NVFP4, output=0, accumulate=True)[1][-1] == "matmul 0x500 0x200 0x100 0x804 0x700"


@pytest.mark.parametrize(("version", "tells_apart"), [(120803, True), (120804, False), (130000, False)])
def test_old_versions_are_helped_to_tell_products_apart(ask, version, tells_apart):
    assert (values_of(ask(NVFP4, version=version)[0]).get(STRIDE) == 1) == tells_apart
    assert STRIDE not in values_of(ask(BFLOAT16, version=version)[0])


@pytest.mark.parametrize("inputs", [BFLOAT16, NVFP4])
def test_a_refusal_is_no_error(ask, inputs):
    assert ask(inputs, heuristic=NOT_SUPPORTED)[1] == []
    said = ask(inputs, heuristic=INVALID_VALUE)[1]
    assert said == ([] if inputs == NVFP4 else ["cublasLtMatmulAlgoGetHeuristic: CUBLAS_STATUS"])
