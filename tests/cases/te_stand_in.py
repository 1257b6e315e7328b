"""What TransformerEngine 2.17 to 2.20 has of NVFP4 weights, for a cast: attributes, layouts, signatures.

TransformerEngine itself needs a GPU and its libraries to be imported. Its tensor does nothing here: whatever
torch asks of one, but for detach, raises.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from collections.abc import Callable

import torch

POISON = 0xA5


class DType(enum.IntEnum):
    kFloat4E2M1 = 10


@dataclasses.dataclass
class NVFP4Quantizer:
    """The settings of one that makes weights."""

    dtype: DType = DType.kFloat4E2M1
    rowwise_usage: bool = True
    columnwise_usage: bool = True
    internal: bool = False
    optimize_for_gemm: bool = False
    with_rht: bool = False
    with_post_rht_amax: bool = False
    with_amax_reduction: bool = False
    with_2d_quantization: bool = True
    stochastic_rounding: bool = False
    row_scaled_nvfp4: bool = False
    nvfp4_use_4over6: bool = False
    nvfp4_e4m3_max: int = 448
    nvfp4_4over6_err_mode: str = "MAE"

    def get_scale_shape(self, shape, columnwise: bool) -> tuple[int, int]:
        rows, cols = reversed(shape) if columnwise else shape
        return -(-rows // 128) * 128, -(-cols // 64) * 4


class NVFP4Tensor(torch.Tensor):
    """Of two dimensions. Its buffers are not initialized there; here they are poisoned."""

    @staticmethod
    def __new__(cls, buffers: dict, shape, dtype: torch.dtype, device, quantizer: NVFP4Quantizer):
        tensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        vars(tensor).update(buffers)
        tensor._fp4_dtype = DType.kFloat4E2M1
        tensor._quantizer = quantizer
        tensor._with_gemm_swizzled_scales = quantizer.optimize_for_gemm
        tensor._row_scaled_nvfp4 = quantizer.row_scaled_nvfp4
        tensor._nvfp4_use_4over6 = quantizer.nvfp4_use_4over6
        tensor._nvfp4_e4m3_max = quantizer.nvfp4_e4m3_max
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            (tensor,) = args
            buffers = {name: getattr(tensor, name) for name in BUFFERS}
            return cls(buffers, tensor.shape, tensor.dtype, tensor.device, tensor._quantizer)
        raise NotImplementedError(f"{func} of a stand-in")

    def __repr__(self) -> str:
        return f"NVFP4Tensor of TransformerEngine's, {tuple(self.shape)}"

    def update_usage(self, rowwise_usage: bool, columnwise_usage: bool) -> None:
        assert rowwise_usage
        if not columnwise_usage:
            self._columnwise_data = self._columnwise_scale_inv = self._amax_columnwise = None


ROWWISE = ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise")
COLUMNWISE = ("_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise")
BUFFERS = (*ROWWISE, *COLUMNWISE)


def make(
    shape=(48, 288), dtype=torch.bfloat16, device="cpu", *, columnwise: bool = True, **settings
) -> NVFP4Tensor:
    """A poisoned weight, as a quantizer with these settings makes it."""
    quantizer = NVFP4Quantizer(columnwise_usage=columnwise, **settings)
    rows, cols = shape
    shapes = {
        "_rowwise_data": (rows, cols // 2),
        "_rowwise_scale_inv": quantizer.get_scale_shape(shape, False),
        "_columnwise_data": (cols, rows // 2),
        "_columnwise_scale_inv": quantizer.get_scale_shape(shape, True),
    }
    buffers = {
        name: torch.full(size, POISON, dtype=torch.uint8, device=device) for name, size in shapes.items()
    }
    for name in ("_amax_rowwise", "_amax_columnwise"):
        buffers[name] = torch.full((1,), torch.nan, device=device)
    tensor = NVFP4Tensor(buffers, shape, dtype, device, quantizer)
    if not columnwise:
        tensor.update_usage(True, False)
    return tensor


def buffers_of(tensor: NVFP4Tensor) -> dict[str, torch.Tensor]:
    """Those that it has."""
    return {name: buffer for name in BUFFERS if (buffer := getattr(tensor, name)) is not None}


# The package


def package(version: str, cast: Callable, post: Callable) -> dict[str, types.ModuleType]:
    """Modules for sys.modules, with functions of these signatures that hand their arguments on."""

    def quantize_master_weights(
        model_weights,
        master_weights,
        start_offsets,
        group,
        fsdp_shard_model_weights=None,
        manual_post_all_gather_processing=False,
    ):
        cast(
            model_weights,
            master_weights,
            start_offsets,
            group,
            fsdp_shard_model_weights,
            manual_post_all_gather_processing,
        )

    def post_all_gather_processing(model_weights):
        post(model_weights)

    names = [
        "transformer_engine",
        "transformer_engine.pytorch",
        "transformer_engine.pytorch.tensor",
        "transformer_engine.pytorch.tensor.utils",
    ]
    modules = {name: types.ModuleType(name) for name in names}
    for name in names[1:]:
        parent, _, own = name.rpartition(".")
        setattr(modules[parent], own, modules[name])
        modules[parent].__path__ = []
    modules["transformer_engine"].__version__ = version
    utils = modules[names[-1]]
    utils.quantize_master_weights = quantize_master_weights
    utils.post_all_gather_processing = post_all_gather_processing
    return modules


def importer(name: str) -> types.ModuleType:
    """A module that has imported both functions by name, one of them under another, as Megatron-Core does."""
    module = types.ModuleType(name)
    source = (
        "from transformer_engine.pytorch.tensor.utils import quantize_master_weights\n"
        "from transformer_engine.pytorch.tensor.utils import post_all_gather_processing as te_post\n"
    )
    exec(source, vars(module))
    sys.modules[name] = module
    return module
