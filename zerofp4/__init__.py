"""NVFP4 model weights over sharded FP32 master weights."""

import importlib

from zerofp4 import launch, nn, optim, serving
from zerofp4.cast import CastPlan, all_gather_nvfp4, cast_master_weights_to_nvfp4, post_all_gather_processing
from zerofp4.format import FourOverSix
from zerofp4.gemm import Operand, gemm
from zerofp4.inspect import quantization_error
from zerofp4.nn import convert_model, register_plain_state_dict
from zerofp4.ops import build_info
from zerofp4.optim import ZeroFP4Optimizer, master_state_dict, unconvert_model
from zerofp4.serving import save_safetensors
from zerofp4.tensors import (
    GroupedNVFP4,
    MXFP8Tensor,
    NVFP4Tensor,
    Quantizer,
    dequantize_many,
    empty,
    quantize,
    quantize_dequantize,
    quantize_grouped,
    quantize_mxfp8,
    swizzle_scales,
    unswizzle_scales,
)
from zerofp4.version import VERSION as __version__

__all__ = [
    "CastPlan",
    "FourOverSix",
    "GroupedNVFP4",
    "MXFP8Tensor",
    "NVFP4Tensor",
    "Operand",
    "Quantizer",
    "ZeroFP4Optimizer",
    "__version__",
    "all_gather_nvfp4",
    "build_info",
    "cast_master_weights_to_nvfp4",
    "convert_model",
    "dequantize_many",
    "empty",
    "gemm",
    "launch",
    "master_state_dict",
    "nn",
    "optim",
    "post_all_gather_processing",
    "quantization_error",
    "quantize",
    "quantize_dequantize",
    "quantize_grouped",
    "quantize_mxfp8",
    "register_plain_state_dict",
    "save_safetensors",
    "serving",
    "swizzle_scales",
    "unconvert_model",
    "unswizzle_scales",
]


def __dir__() -> list[str]:
    """The public names. What else is an attribute, like a room of the package, is left out."""
    return sorted([*__all__, "integrations", "testing"])


def __getattr__(name: str):
    """zerofp4.integrations and zerofp4.testing are imported when somebody asks for them."""
    if name in ("integrations", "testing"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
