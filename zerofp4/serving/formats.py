"""The two serving formats: names and values of a weight's fields, and what configuration files say."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from zerofp4.format import BLOCK, E2M1_MAX
from zerofp4.version import VERSION


@dataclasses.dataclass(frozen=True)
class Format:
    """codes, global_scale, input_scale: what fields of a linear module are called; its block scales are
    `weight_scale` in both formats.

    divides: whether dequantization divides by the global scales, or multiplies with them.
    scalar_shape: of a global scale.
    """

    codes: str
    global_scale: str
    input_scale: str
    divides: bool
    scalar_shape: tuple[int, ...]

    def global_of(self, amax: float, e4m3_max: int) -> torch.Tensor:
        """The global scale that belongs to an amax, float32. 1 where the amax is 0: then all codes are 0."""
        if amax == 0:
            return torch.ones(self.scalar_shape, dtype=torch.float32, device="cpu")
        own = torch.full(self.scalar_shape, amax, dtype=torch.float32, device="cpu")
        most = E2M1_MAX * e4m3_max
        return most / own if self.divides else own / most

    def config(self, ignore: Sequence[str], has_inputs: bool) -> dict[str, Any]:
        """quantization_config of config.json. ignore: names of linear modules that are not quantized."""
        return (_compressed_tensors if self.divides else _modelopt)(ignore, has_inputs)

    def extra_files(self, ignore: Sequence[str], has_inputs: bool) -> dict[str, dict[str, Any]]:
        """Contents of other configuration files by their names."""
        if self.divides:
            return {}
        quantization = {
            "quant_algo": _ALGORITHM[has_inputs],
            "kv_cache_quant_algo": None,
            "group_size": BLOCK,
            "exclude_modules": list(ignore),
        }
        return {"hf_quant_config.json": {"producer": _PRODUCER, "quantization": quantization}}


FORMATS = {
    "compressed-tensors": Format("weight_packed", "weight_global_scale", "input_global_scale", True, (1,)),
    "modelopt": Format("weight", "weight_scale_2", "input_scale", False, ()),
}
"""By the name that save_pretrained takes."""

_PRODUCER = {"name": "zerofp4", "version": VERSION}
_ALGORITHM = {False: "W4A16_NVFP4", True: "NVFP4"}


def _compressed_tensors(ignore: Sequence[str], has_inputs: bool) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group",
        "group_size": BLOCK,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    group = {
        "targets": ["Linear"],
        "format": "nvfp4-pack-quantized",
        "weights": weights,
        "input_activations": {**weights, "dynamic": "local"} if has_inputs else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "ignore": list(ignore),
    }


def _modelopt(ignore: Sequence[str], has_inputs: bool) -> dict[str, Any]:
    bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
    inputs = {"input_activations": bits} if has_inputs else {}
    return {
        "quant_method": "modelopt",
        "quant_algo": _ALGORITHM[has_inputs],
        "config_groups": {"group_0": {**inputs, "weights": bits, "targets": ["Linear"]}},
        "ignore": list(ignore),
        "producer": _PRODUCER,
    }
