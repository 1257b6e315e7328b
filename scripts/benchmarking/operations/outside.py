"""Packages of others that do what we do, where they are installed. This is written for torchao 0.18,
gemlite 0.6.0 and fouroversix 1.0.5.

Each function gives the call that is timed, or raises what its package does, ImportError where there is none.
Their bytes are not ours: they round otherwise, or clamp.
"""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarking.operations.peers import Part, attempt, compiled
from benchmarking.session import Session
from zerofp4.format import BLOCK, E2M1_MAX, E4M3_MAX, MXFP8_BLOCK, MXFP8_DATA_DTYPE

Call = Callable[[], object]

FIRST_WITH_E2M1 = 10  # major compute capability that converts to E2M1 in one instruction


def measure(session: Session, ours: dict, **peers: Callable[[], Call]) -> None:
    """Time what packages, by name, do in place of our row; one that cannot run is said to be left out."""
    for package, make in peers.items():
        row = attempt(session, f"{package}_{ours['name']}", ours, make)
        if row is not None:
            row["package"] = f"{package} {version_of(package)}"


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a source tree on PYTHONPATH
        return "of unknown version"


def torchao_nvfp4(x: torch.Tensor, amax: torch.Tensor) -> Call:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    return compiled(Part(nvfp4_quantize, (x, BLOCK, amax / (E4M3_MAX * E2M1_MAX))))


def gemlite_nvfp4(x: torch.Tensor, amax: torch.Tensor) -> Call:
    """Its Triton kernel of version 5, the one for a scale that is given."""
    import gemlite
    from gemlite.quant_utils import scale_activations_nvfp4

    if torch.cuda.get_device_capability(x.device)[0] < FIRST_WITH_E2M1:
        gemlite.set_ptx_fp4_pack(False)  # it asks only the assembler whether there is such an instruction
    scale = E4M3_MAX * E2M1_MAX / amax
    return lambda: scale_activations_nvfp4(x, scale)


def fouroversix_nvfp4(
    x: torch.Tensor, amax: torch.Tensor, block_rows: int, scale_rule: str = "static_6"
) -> Call:
    """Its Triton kernel, which writes swizzled scales and on Hopper converts to E2M1 by comparisons. Were it
    not given the amax, it would find it with PyTorch's operators first.
    """
    from fouroversix import QuantizationConfig, quantize_to_fp4

    config = QuantizationConfig(
        backend="triton", block_scale_2d=block_rows > 1, scale_rule=scale_rule, kwargs={"x_amax": amax}
    )
    return lambda: quantize_to_fp4(x, config)


def torchao_swizzle(scale: torch.Tensor) -> Call:
    from torchao.prototype.mx_formats.utils import to_blocked

    return compiled(Part(to_blocked, (scale,)))


def torchao_quantize_mxfp8(x: torch.Tensor) -> Call:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    arguments = (x, MXFP8_DATA_DTYPE, MXFP8_BLOCK, ScaleCalculationMode.RCEIL)
    return compiled(Part(to_mx, arguments))


def torchao_dequantize_mxfp8(data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Call:
    """It takes the scales as bytes too, and torch.compile knows no E8M0 on some devices."""
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    arguments = (data, scale.view(torch.uint8), MXFP8_DATA_DTYPE, MXFP8_BLOCK, dtype)
    return compiled(Part(to_dtype, arguments))
