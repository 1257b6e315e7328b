"""Packages of others that do what we do, where they are installed: torchao, gemlite, fouroversix.

Each function gives the call that is timed, or raises ImportError. Their bytes are not ours: they round
otherwise, or clamp.
"""

from collections.abc import Callable

import torch

from benchmarking.operations.peers import Part, attempt, compiled
from benchmarking.session import Session
from zerofp4.format import BLOCK, E2M1_MAX, E4M3_MAX, MXFP8_BLOCK, MXFP8_DATA_DTYPE

Call = Callable[[], object]


def measure(session: Session, ours: dict, **peers: Callable[[], Call]) -> None:
    """Time what packages, by name, do in place of our row; one that cannot run is said to be left out."""
    for package, make in peers.items():
        attempt(session, f"{package}_{ours['name']}", ours, make)


def torchao_nvfp4(x: torch.Tensor, amax: torch.Tensor) -> Call:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    return compiled(Part(nvfp4_quantize, (x, BLOCK, amax / (E4M3_MAX * E2M1_MAX))))


def gemlite_nvfp4(x: torch.Tensor, amax: torch.Tensor) -> Call:
    from gemlite.quant_utils import scale_activations_nvfp4

    scale = E4M3_MAX * E2M1_MAX / amax
    return lambda: scale_activations_nvfp4(x, scale)


def fouroversix_nvfp4(x: torch.Tensor, block_rows: int) -> Call:
    """Takes the amax of x itself."""
    from fouroversix import QuantizationConfig, quantize

    config = QuantizationConfig(backend="triton", scale_rule="static_6", block_scale_2d=block_rows > 1)
    return lambda: quantize(x, config)


def torchao_swizzle(scale: torch.Tensor) -> Call:
    from torchao.prototype.mx_formats.utils import to_blocked

    return compiled(Part(to_blocked, (scale,)))


def torchao_quantize_mxfp8(x: torch.Tensor) -> Call:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    arguments = (x, MXFP8_DATA_DTYPE, MXFP8_BLOCK, ScaleCalculationMode.RCEIL)
    return compiled(Part(to_mx, arguments))


def torchao_dequantize_mxfp8(data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Call:
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    return compiled(Part(to_dtype, (data, scale, MXFP8_DATA_DTYPE, MXFP8_BLOCK, dtype)))
