"""Libraries for tests, built when first asked for, from the headers that the extension is made of."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
CSRC = FOLDER.parents[1] / "csrc"
# As setup.py compiles: no contraction into fused multiply-adds.
GXX = ["-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
NVCC = ["-std=c++17", "-O3", "-fmad=false", "-Xcompiler=-fPIC"]
FORMATS = {
    "e2m1": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def architecture(device: torch.device) -> str:
    """The option of nvcc; from Blackwell on, of the GPU's family, which has the instructions for E2M1."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"-arch=sm_{major}0f" if major >= 10 else f"-arch=sm_{major}{minor}"


def build(name: str, device: torch.device, folder: Path) -> ctypes.CDLL:
    """The library of tests/native/name.cpp or, for a GPU, name.cu, compiled into `folder`.

    Skips the test where there is no compiler.
    """
    on_gpu = device.type == "cuda"
    command = os.environ.get("CUDACXX", "nvcc") if on_gpu else os.environ.get("CXX", "g++")
    compiler = shutil.which(command)
    if compiler is None:
        pytest.skip(f"no {command} on the PATH")
    library = folder / f"{name}_{device.type}.so"
    source = FOLDER / f"{name}.{'cu' if on_gpu else 'cpp'}"
    options = [*NVCC, architecture(device)] if on_gpu else GXX
    options = [*options, f"-I{CSRC}", f"-I{FOLDER}", "-shared"]
    subprocess.run([compiler, *options, source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


class Conversions:
    """The conversions of the kernels on one kind of device, compiled into `folder`."""

    def __init__(self, device: torch.device, folder: Path):
        self._convert = build("conversions", device, folder).convert
        self._convert.argtypes = [
            ctypes.c_void_p,
            ctypes.c_float,
            ctypes.c_int64,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]

    def __call__(self, x: torch.Tensor, format: str, factor: float = 1.0) -> torch.Tensor:
        """x * factor, of a contiguous float32 tensor; an E2M1 code is the low nibble of a byte of its own."""
        assert x.dtype == torch.float32 and x.is_contiguous()
        out = torch.empty_like(x, dtype=FORMATS[format])
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else None
        index = list(FORMATS).index(format)
        error = self._convert(x.data_ptr(), factor, x.numel(), index, out.data_ptr(), stream)
        assert error == 0, f"CUDA error {error}"
        return out
