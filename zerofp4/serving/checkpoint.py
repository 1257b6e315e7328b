"""A folder with a published NVFP4 checkpoint: its format, and its tensors, one at a time."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from zerofp4.format import BLOCK, E2M1_MAX
from zerofp4.serving.files import INDEX
from zerofp4.serving.plan import FORMATS, Format

_FP8 = torch.float8_e4m3fn

_MODELOPT = ("NVFP4", "W4A16_NVFP4", "FP8", "MIXED_PRECISION")
_COMPRESSED_TENSORS = ("nvfp4-pack-quantized", "float-quantized", "mixed-precision", "dense")
"""Algorithms, or formats, of readable layers."""

_REASONS = {
    "awq": "AWQ's pre_quant_scale multiplies the inputs of layers",
    "svd": "SVDQuant adds products of two more matrices",
}
"""By a part of a tensor's or algorithm's name, why a layer is more than its weight."""

_REFUSED = {
    r"\.(pre_quant_scale|_pre_quant_scale)$": _REASONS["awq"],
    r"svd": _REASONS["svd"],
    r"swizzle|interleaved": "scales must be in the order of rows, and these are swizzled",
    r"\.weight_scale_inv$": "FP8 weights with a scale for each block are not read",
}
"""By a pattern of tensor names, why a checkpoint with such a tensor is not read."""

_KV_CACHE = re.compile(r"\.(k_scale|v_scale|q_scale|k_zero_point|v_zero_point|output_scale)$")


class Checkpoint:
    """A folder with a configuration and safetensors, one file or several. One is open at a time.

    format_name: "compressed-tensors" or "modelopt".
    has_inputs: whether activations are quantized. If not, scales of activations have no meaning.
    unread: names of the tensors that were not read yet.
    kv_scales: names of scales of an 8-bit KV cache, which no layer needs.

    Raises FileNotFoundError without such files, ValueError for other formats, AWQ and SVDQuant.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self.format_name, self.has_inputs = _find_format(folder)
        self.format: Format = FORMATS[self.format_name]
        self._open: tuple[str, Any] | None = None
        self._files = self._find_files()
        for pattern, reason in _REFUSED.items():
            name = next((name for name in self._files if re.search(pattern, name)), None)
            if name is not None:
                raise ValueError(f"{folder} has {name}: {reason}")
        self.kv_scales = [name for name in self._files if _KV_CACHE.search(name)]
        self.unread = dict.fromkeys(name for name in self._files if name not in self.kv_scales)

    def _find_files(self) -> dict[str, str]:
        if (self._folder / INDEX).exists():
            return json.loads((self._folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        name = "model.safetensors"
        if not (self._folder / name).exists():
            raise FileNotFoundError(f"{self._folder} has no {INDEX} and no {name}")
        return dict.fromkeys(self._opened(name).keys(), name)

    def _opened(self, file: str) -> Any:
        if self._open is None or self._open[0] != file:
            from safetensors import safe_open

            self._open = file, safe_open(self._folder / file, "pt")
        return self._open[1]

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> torch.Tensor:
        self.unread.pop(name, None)
        return self._opened(self._files[name]).get_tensor(name)

    def shape_and_type(self, name: str) -> tuple[tuple[int, ...], str]:
        """From the header of the file."""
        found = self._opened(self._files[name]).get_slice(name)
        return tuple(found.get_shape()), found.get_dtype()

    def is_packed(self, module: str) -> bool:
        """Whether the file has a linear module's weight in NVFP4."""
        codes = f"{module}.{self.format.codes}"
        return codes in self and self.shape_and_type(codes)[1] == "U8"

    def check_packed(self, module: str, shape: tuple[int, int]) -> None:
        """Raise ValueError unless the file has a whole NVFP4 matrix [N, K]."""
        rows, columns = shape
        if columns % BLOCK:
            raise ValueError(f"{module} has {columns} columns, which blocks of {BLOCK} do not divide")
        expected = {
            self.format.codes: ((rows, columns // 2), "U8"),
            "weight_scale": ((rows, columns // BLOCK), "F8_E4M3"),
            self.format.global_scale: (None, "F32"),
        }
        for field, (wanted, type_) in expected.items():
            name = f"{module}.{field}"
            if name not in self:
                raise ValueError(f"{self._folder} lacks {name}, without which {module} has no values")
            found = self.shape_and_type(name)
            if found[1] != type_ or (wanted is not None and found[0] != wanted):
                raise ValueError(
                    f"{name} must be {type_} {list(wanted or [1])}, got {found[1]} {list(found[0])}"
                )

    def read_plain(self, name: str) -> torch.Tensor:
        """A tensor that is not in NVFP4; the values of FP8 in float32."""
        tensor = self.read(name)
        if tensor.dtype != _FP8:
            return tensor
        module = name.removesuffix(".weight")
        for unused in ("input_scale", "input_global_scale"):
            self.unread.pop(f"{module}.{unused}", None)
        return tensor.float() * self.read(f"{module}.weight_scale").float()

    def check_plain(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the tensor is in FP8. Raises ValueError for another shape, or FP8 without usable scales."""
        found, type_ = self.shape_and_type(name)
        if found != shape:
            raise ValueError(f"{name} has the shape {list(found)}, and the model's {list(shape)}")
        if type_ != "F8_E4M3":
            return False
        scale = name.removesuffix(".weight") + ".weight_scale"
        if not name.endswith(".weight") or scale not in self:
            raise ValueError(f"{name} is in FP8 and has no scale {scale}")
        scales, _ = self.shape_and_type(scale)
        if scales not in ((), (1,), (1, 1), (shape[0], 1)):
            raise ValueError(f"{scale} must be one scale, or one for each row, got {list(scales)}")
        return True


# The configuration


def _find_format(folder: Path) -> tuple[str, bool]:
    """The format of a folder, and whether activations are quantized. Raises ValueError for other formats."""
    found = _read_json(folder / "config.json").get("quantization_config")
    if found is None:
        found = _read_json(folder / "hf_quant_config.json").get("quantization")
        found = found and {"quant_method": "modelopt", **found}
    if found is None:
        raise ValueError(
            f"{folder} has no quantization_config in config.json and no hf_quant_config.json: it is no "
            "quantized checkpoint"
        )
    method = str(found.get("quant_method"))
    checks: dict[str, Callable[[dict], Iterator[str]]] = {
        "compressed-tensors": _faults_of_compressed_tensors,
        "modelopt": _faults_of_modelopt,
    }
    name = next((name for name in checks if method in (name, f"{name}_fp4")), None)
    if name is None:
        raise ValueError(f"{folder} has quant_method {method!r}, and can be read if it is one of {[*checks]}")
    for fault in checks[name](found):
        raise ValueError(f"{folder} cannot be read: {fault}")
    if name == "modelopt":
        return name, any(part.get("quant_algo") == "NVFP4" for part in _parts_of_modelopt(found))
    return name, any(group.get("input_activations") for group in _groups_of_compressed_tensors(found))


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _parts_of_modelopt(config: dict) -> list[dict]:
    """The configurations of the model, and of layers with their own algorithm."""
    config = config.get("quantization", config)
    return [config, *(config.get("quantized_layers") or {}).values()]


def _faults_of_modelopt(config: dict) -> Iterator[str]:
    for part in _parts_of_modelopt(config):
        algorithm = str(part.get("quant_algo"))
        reason = next((why for word, why in _REASONS.items() if word in algorithm.lower()), None)
        if algorithm not in _MODELOPT:
            yield f"its quant_algo is {algorithm}" + (
                f", and {reason}" if reason else f", not of {_MODELOPT}"
            )
        if "NVFP4" in algorithm and part.get("group_size") not in (None, BLOCK):
            yield f"its group_size is {part['group_size']}, and blocks of NVFP4 have {BLOCK} elements"


def _groups_of_compressed_tensors(config: dict) -> list[dict]:
    return [*(config.get("config_groups") or {}).values()]


def _faults_of_compressed_tensors(config: dict) -> Iterator[str]:
    groups = _groups_of_compressed_tensors(config)
    for format in (config.get("format"), *(group.get("format") for group in groups)):
        if format is not None and format not in _COMPRESSED_TENSORS:
            yield f"its format is {format}, not of {_COMPRESSED_TENSORS}"
    if config.get("transform_config"):
        yield "its transform_config rotates the inputs of layers"
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        yield "its sparsity_config leaves out elements"


# Which options the weights were quantized with


def are_tiles(scales: torch.Tensor) -> bool:
    """Whether scales E4M3 [N, K/16] are those of 16x16 tiles, each repeated on 16 rows."""
    codes = scales.view(torch.uint8)
    return torch.equal(codes, codes[::BLOCK].repeat_interleave(BLOCK, dim=0)[: codes.shape[0]])


def amax_of(format: Format, global_scale: torch.Tensor, e4m3_max: int) -> tuple[float, bool]:
    """The amax of a global scale, and whether an export of it gives this global scale to the bit.

    An amax is the magnitude of a weight, so it has few bits: of the float32 numbers with this global scale,
    take the one with the shortest mantissa. If there is none, since other programs divide in other ways, take
    the nearest. Raises ValueError for a global scale that is not positive and finite.
    """
    given, most = float(global_scale), E2M1_MAX * e4m3_max
    if not 0 < given < float("inf"):
        raise ValueError(f"a global scale must be positive and finite, got {given}")
    nearest = torch.tensor(most / given if format.divides else given * most, dtype=torch.float32)
    around = (nearest.view(torch.int32) + torch.arange(-3, 4, dtype=torch.int32)).view(torch.float32)
    exact = [amax for amax in around.tolist() if float(format.global_of(amax, e4m3_max)) == given]
    return min(exact, key=_bits_of, default=nearest.item()), bool(exact)


def _bits_of(amax: float) -> int:
    """The bits that the mantissa of a float32 number needs."""
    mantissa = int(torch.tensor(amax, dtype=torch.float32).view(torch.int32)) & 0x7FFFFF
    return 23 - ((mantissa | 0x800000) & -(mantissa | 0x800000)).bit_length()
