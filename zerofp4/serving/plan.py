"""The plan of an export: every tensor under the name that engines know, checked before one is written."""

import collections
import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from zerofp4.format import BLOCK, E2M1_MAX, E4M3_MAX, FLOAT32_MAX, SCALE_DTYPE
from zerofp4.layout import ceil_div
from zerofp4.serving.fused import experts_of, fused_groups
from zerofp4.serving.report import Comparison, compare
from zerofp4.serving.sources import Source
from zerofp4.storage import NVFP4Storage
from zerofp4.tensors import QuantizedTensor
from zerofp4.version import VERSION

# The two formats

_PRODUCER = {"name": "zerofp4", "version": VERSION}

Files = dict[str, dict[str, Any]]
"""Contents of configuration files by name."""


def _compressed_tensors(ignore: list[str], has_inputs: bool) -> tuple[dict[str, Any], Files]:
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
    config = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "ignore": ignore,
    }
    return config, {}


def _modelopt(ignore: list[str], has_inputs: bool) -> tuple[dict[str, Any], Files]:
    algorithm = "NVFP4" if has_inputs else "W4A16_NVFP4"
    bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
    inputs = {"input_activations": bits} if has_inputs else {}
    config = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "config_groups": {"group_0": {**inputs, "weights": bits, "targets": ["Linear"]}},
        "ignore": ignore,
        "producer": _PRODUCER,
    }
    quantization = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        "group_size": BLOCK,
        "exclude_modules": ignore,
    }
    return config, {"hf_quant_config.json": {"producer": _PRODUCER, "quantization": quantization}}


@dataclasses.dataclass(frozen=True)
class Format:
    """codes, global_scale, input_scale: fields of a linear module, beside `weight_scale`.
    divides: whether dequantization divides by the global scales.
    scalar_shape: of a global scale.
    configuration: (names of unquantized linear modules, whether inputs are quantized) -> quantization_config
        of config.json, and other files.
    """

    codes: str
    global_scale: str
    input_scale: str
    divides: bool
    scalar_shape: tuple[int, ...]
    configuration: Callable[[list[str], bool], tuple[dict[str, Any], Files]]

    def global_of(self, amax: float, e4m3_max: int) -> torch.Tensor:
        """The global scale of an amax, float32; 1 for an amax of 0, where all codes are 0."""
        if amax == 0:
            return torch.ones(self.scalar_shape, dtype=torch.float32, device="cpu")
        own = torch.full(self.scalar_shape, amax, dtype=torch.float32, device="cpu")
        most = torch.full_like(own, E2M1_MAX * e4m3_max)  # number / own would multiply by a rounded 1 / own
        return most / own if self.divides else own / most


FORMATS = {
    "compressed-tensors": Format(
        "weight_packed", "weight_global_scale", "input_global_scale", True, (1,), _compressed_tensors
    ),
    "modelopt": Format("weight", "weight_scale_2", "input_scale", False, (), _modelopt),
}
"""By the name that save_pretrained takes."""


# Parts of an export


class Served(NamedTuple):
    """A tensor of an export."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Part(NamedTuple):
    """A rank's part of a tensor: rows from `first` on (0 for a scalar). shape: of the whole."""

    shape: tuple[int, ...]
    first: int


Piece = tuple[str, torch.Tensor, Part]
"""A tensor's name, a rank's rows of it, and which those are."""


class Rows(NamedTuple):
    """Rows of a parameter, flattened to two dimensions, that are a matrix of that name in a checkpoint."""

    name: str
    first: int
    count: int

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


class Matrix:
    """A quantized matrix of an export. input_amax: of its inputs; None for weights only."""

    def __init__(self, rows: Rows, record: NVFP4Storage, amax: float, format: Format):
        self.rows, self.record, self.amax, self.format, self.input_amax = rows, record, amax, format, None
        self.module = rows.module

    def served(self) -> list[Served]:
        (count, columns), format = (self.rows.count, self.record.shape[-1]), self.format
        found = [
            Served(f"{self.module}.{format.codes}", torch.uint8, (count, columns // 2)),
            Served(f"{self.module}.weight_scale", SCALE_DTYPE, (count, columns // BLOCK)),
            Served(f"{self.module}.{format.global_scale}", torch.float32, format.scalar_shape),
        ]
        if self.input_scale() is not None:
            found.append(Served(f"{self.module}.{format.input_scale}", torch.float32, format.scalar_shape))
        return found

    def input_scale(self) -> torch.Tensor | None:
        """The global scale of inputs, None for weights only. Experts have 1 then: vLLM allocates a scale for
        them anyway, and leaves it uninitialized if the file has none.
        """
        if self.input_amax is None and experts_of(self.module) is None:
            return None
        return self.format.global_of(self.input_amax or 0, int(E4M3_MAX))

    def compare(self, tensors: Mapping[str, torch.Tensor]) -> Comparison:
        """Count the values that engines compute differently. tensors: whole ones of the export, by name."""
        codes, scales, global_scale = (tensors[served.name] for served in self.served()[:3])
        if self.format.divides:
            global_scale = 1 / global_scale
        most, dtype = E2M1_MAX * self.record.e4m3_max, self.record.dtype
        return compare(codes, scales, self.amax, most, global_scale, dtype)

    def scales(self, compact: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """E4M3 [count, K/16], a scale per row: from row `first` of the weight flattened to two dimensions."""
        flat, block_rows = compact.view(torch.uint8).flatten(0, -2), self.record.block[0]
        if block_rows == 1:
            return flat[first : first + count].view(SCALE_DTYPE)
        matrix, row = divmod(first, self.record.matrix[0])
        rows = torch.arange(row, row + count, dtype=torch.int64, device=flat.device)
        return flat[rows // block_rows + matrix * compact.shape[-2]].view(SCALE_DTYPE)

    def pieces(self, codes: torch.Tensor, start: int, scales: torch.Tensor) -> Iterator[Piece]:
        """The matrix's part of `codes`, the weight's rows from `start` on. scales: compact, of all rows."""
        first = max(start, self.rows.first)
        end = min(start + codes.shape[0], self.rows.first + self.rows.count)
        if first >= end:
            return
        tensors = [codes[first - start : end - start], self.scales(scales, first, end - first)]
        tensors.append(self.format.global_of(self.amax, self.record.e4m3_max))
        if self.input_scale() is not None:
            tensors.append(self.input_scale())
        for served, tensor in zip(self.served(), tensors, strict=True):
            at = first - self.rows.first if tensor.dim() == 2 else 0
            yield served.name, tensor, Part(served.shape, at)


class QuantizedWeight:
    """An NVFP4 weight of the model, and its matrices in an export."""

    def __init__(self, key: str, source: Source, rows: list[Rows], format: Format):
        self.key, self.source, self.is_collective = key, source, source.is_collective
        record, amaxes = source.record, source.amax.tolist()
        _check_weight(key, source, rows, amaxes)
        per_amax = record.matrix[0] if len(amaxes) > 1 else math.prod(record.shape[:-1])
        self.matrices = [Matrix(each, record, amaxes[each.first // per_amax], format) for each in rows]

    def served(self) -> list[Served]:
        return [served for matrix in self.matrices for served in matrix.served()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        whole = self.source.whole()
        codes, scales = whole.rowwise.data.flatten(0, -2), whole.rowwise.scales["compact"]
        for matrix in self.matrices:
            yield from ((name, tensor) for name, tensor, _ in matrix.pieces(codes, 0, scales))

    def pieces(self) -> Iterator[Piece]:
        (codes, start), scales = self.source.local(), self.source.record.rowwise_scale
        for matrix in self.matrices:
            yield from matrix.pieces(codes, start, scales)


class PlainTensor:
    """An unquantized parameter or buffer. name: as of checkpoint_names()."""

    def __init__(
        self, model: nn.Module, key: str, value: torch.Tensor, name: str | None, dtype: torch.dtype | None
    ):
        self.key, self._model, self._value, self._name = key, model, value.detach(), name
        self._dtype = dtype or value.dtype
        self.is_collective = hasattr(value, "full_tensor")
        stand_in = torch.empty(value.shape, dtype=self._dtype, device="meta")
        self._served = [Served(n, v.dtype, tuple(v.shape)) for n, v in self._named(stand_in).items()]

    def _named(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
        return as_saved(self._model, {self.key: value}) if self._name is None else {self._name: value}

    def served(self) -> list[Served]:
        return self._served

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        value = self._value.full_tensor() if self.is_collective else self._value
        yield from self._named(value.to(self._dtype)).items()

    def pieces(self) -> Iterator[Piece]:
        """This rank's rows of a DTensor that is sharded by rows only; any other tensor whole."""
        cut = [i for i, p in enumerate(getattr(self._value, "placements", ())) if not p.is_replicate()]
        if self._name is None or len(cut) != 1 or not self._value.placements[cut[0]].is_shard(0):
            for name, tensor in self.tensors():
                yield name, tensor, Part(tuple(tensor.shape), 0)
            return
        mesh, shape = self._value.device_mesh, tuple(self._value.shape)
        first = min(ceil_div(shape[0], mesh.size(cut[0])) * mesh.get_coordinate()[cut[0]], shape[0])
        piece = self._value.to_local().to(self._dtype)
        if piece.numel() or not first:
            yield self._name, piece, Part(shape, first)


class Plan:
    """All tensors of an export, in the order of the model's state dict: `parts` makes them, one for each key.

    matrices: of quantized weights, by module. ignored: modules with an unquantized matrix.
    Raises ValueError for a model that serving engines would not load, or would load wrongly.
    """

    def __init__(
        self,
        model: nn.Module,
        sources: dict[str, Source],
        format: str,
        dtype: torch.dtype | None = None,
        input_amaxes: Mapping[str, float] | None = None,
    ):
        if format not in FORMATS:
            raise ValueError(f"format must be one of {tuple(FORMATS)}, got {format!r}")
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating one, got {dtype}")
        self.format, self._model, self._dtype = FORMATS[format], check_model(model), dtype
        tensors = _tensors(model)
        names = checkpoint_names(model, tensors)
        self.parts: list[QuantizedWeight | PlainTensor] = [
            self._part(key, value, names[key], sources.get(key)) for key, value in tensors.items()
        ]
        quantized = [part for part in self.parts if isinstance(part, QuantizedWeight)]
        if not quantized:
            raise ValueError("model has no NVFP4 weight: call convert_model and train it first")
        self._check_names()
        self.matrices = {matrix.module: matrix for weight in quantized for matrix in weight.matrices}
        self.ignored = self._find_ignored({weight.key for weight in quantized})
        _check_fused(self.matrices, self.ignored)
        _check_experts(self.matrices, self.ignored)
        has_inputs = input_amaxes is not None
        if has_inputs:
            _give_inputs(self.matrices, input_amaxes)
        self.configuration = self.format.configuration(self.ignored, has_inputs)
        self.served = [served for part in self.parts for served in part.served()]
        self.dtype = quantized[0].source.record.dtype
        """In which the model computes."""

    def _part(
        self, key: str, value: torch.Tensor, name: str | None, source: Source | None
    ) -> QuantizedWeight | PlainTensor:
        if source is not None:
            _check_layer(self._model, key)
            shape = source.record.shape
            rows = [Rows(name, 0, shape[:-1].numel())] if name else rows_as_saved(self._model, key, shape)
            return QuantizedWeight(key, source, rows, self.format)
        if isinstance(value, QuantizedTensor):
            raise ValueError(f"{key} is an {type(value).__name__}, which no serving format here can hold")
        is_cast = isinstance(value, nn.Parameter) and value.is_floating_point()
        return PlainTensor(self._model, key, value, name, self._dtype if is_cast else None)

    def _find_ignored(self, quantized: set[str]) -> list[str]:
        """Modules with an unquantized matrix, also tied, by model and checkpoint names; no embeddings."""
        saved = {part.key: [s.name for s in part.served()] for part in self.parts}
        found: dict[str, None] = {}
        for prefix, module in self._model.named_modules():
            for name, parameter in module._parameters.items():
                key = f"{prefix}.{name}" if prefix else name
                is_matrix = parameter is not None and parameter.dim() > 1
                if not is_matrix or key in quantized or isinstance(module, nn.Embedding):
                    continue
                found |= dict.fromkeys([prefix, *(n.removesuffix(".weight") for n in saved.get(key, ()))])
        return list(found)

    def _check_names(self) -> None:
        keys = collections.defaultdict(list)
        for part in self.parts:
            for served in part.served():
                keys[served.name].append(part.key)
        for name, makers in keys.items():
            if len(makers) > 1:
                raise ValueError(f"{name} would be written twice, for {' and '.join(makers)}")

    def signature(self) -> str:
        """Equal on ranks with the same plan."""
        amaxes = [matrix.amax for matrix in self.matrices.values()]
        content = [[*served[:1], *map(str, served[1:])] for served in self.served], amaxes
        return hashlib.sha256(repr(content).encode()).hexdigest()


def all_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by key of the state dict, tied ones under each name."""
    values = model.state_dict(keep_vars=True)  # first: FSDP2 shards its parameters for it
    values |= {k: p for k, p in model.named_parameters(remove_duplicate=False) if k in values}
    return {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers to save, by key, tied ones once, under the first name."""
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for key, tensor in all_values(model).items():
        if key not in left_out:
            found.setdefault(id(tensor), (key, tensor))
    return dict(found.values())


def _check_layer(model: nn.Module, key: str) -> None:
    kinds = [kind.__name__ for kind in type(model.get_submodule(key.rpartition(".")[0])).__mro__]
    if "Conv1D" in kinds:
        raise ValueError(
            f"{key} is the weight [in, out] of a Conv1D, whose blocks of 16 lie along the outputs, not along "
            "the inputs: leave it out of convert_model with filter_fn"
        )


def _check_weight(key: str, source: Source, rows: list[Rows], amaxes: list[float]) -> None:
    record = source.record
    try:
        source.check()
    except ValueError as error:
        raise ValueError(f"{key} cannot be served: {error}") from error
    if record.shape[-1] % BLOCK:
        raise ValueError(
            f"{key} has {record.shape[-1]} columns, and engines need a multiple of {BLOCK}: leave it out of "
            "convert_model with filter_fn"
        )
    for each in rows:
        if not each.name.endswith(".weight"):
            raise ValueError(f"{key} would be served as {each.name}, which is not the weight of a module")
        first, last = ((row // record.matrix[0]) for row in (each.first, each.first + each.count - 1))
        if len(amaxes) > 1 and first != last:
            raise ValueError(f"{each.name} has rows of several experts of {key}, each with its own amax")
    smallest = record.e4m3_max * E2M1_MAX / FLOAT32_MAX
    bad = next((a for a in amaxes if not (a == 0 or smallest < a < math.inf)), None)
    if bad is not None:
        raise ValueError(f"{key} has an amax of {bad}, whose global scale is no finite float32")


def _check_fused(matrices: dict[str, Matrix], ignored: list[str]) -> None:
    """Raise ValueError for matrices that engines fuse, and cannot."""
    amaxes = dict.fromkeys(ignored) | {name: matrix.amax for name, matrix in matrices.items()}
    for first, *others in fused_groups(amaxes):
        other = next((name for name in others if amaxes[name] != amaxes[first]), None)
        if other is None:
            continue
        quantized, plain = (first, other) if first in matrices else (other, first)
        if plain not in matrices:
            raise ValueError(
                f"{quantized} is quantized and {plain} is not, and engines fuse the two: give convert_model "
                "a filter_fn that is the same for both"
            )
        raise ValueError(
            f"{first} has an amax of {amaxes[first]:.9g} and {other} of {amaxes[other]:.9g}, and "
            "engines fuse the two with one global scale: build the optimizer with "
            "amax_groups=zerofp4.serving.amax_groups(model), after training with masters_from=the old one too"
            "; with FSDP2 give them to prepare"
        )


def _check_experts(matrices: dict[str, Matrix], ignored: list[str]) -> None:
    """Raise ValueError for experts with only some matrices quantized."""
    quantized = {experts_of(name): name for name in reversed(matrices)}
    for plain in ignored:
        experts = experts_of(plain)
        if experts is not None and experts in quantized:
            raise ValueError(
                f"{quantized[experts]} is quantized and {plain} is not, and engines have one scheme for the "
                "experts of a layer: give convert_model a filter_fn that is the same for all their weights"
            )


def _give_inputs(matrices: dict[str, Matrix], input_amaxes: Mapping[str, float]) -> None:
    """Fused modules have one input, with the largest amax seen of it."""
    missing = [name for name in matrices if name not in input_amaxes]
    if missing:
        raise ValueError(f"input_amaxes lacks {missing[0]} and {len(missing) - 1} other quantized modules")
    for name, matrix in matrices.items():
        matrix.input_amax = float(input_amaxes[name])
        if not 0 < matrix.input_amax < math.inf:
            raise ValueError(f"input_amaxes[{name!r}] must be positive and finite, got {matrix.input_amax}")
    for group in fused_groups(matrices):
        largest = max(matrices[name].input_amax for name in group)
        for name in group:
            matrices[name].input_amax = largest


# The names that a checkpoint of transformers has


def check_model(model: nn.Module) -> Any:
    """Raise TypeError unless the model is of transformers, ImportError without transformers 5."""
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion  # noqa: F401
    except ImportError as error:
        raise ImportError("zerofp4.serving needs transformers 5: pip install transformers") from error
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a PreTrainedModel of transformers, got {type(model).__name__}: give the model "
            "inside of a wrapper"
        )
    return model


def checkpoint_names(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, str | None]:
    """Names in a checkpoint by keys of the state dict; None if transformers cuts or transforms the tensor."""
    stand_ins = {
        key: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for key, tensor in tensors.items()
    }
    names = {id(tensor): name for name, tensor in as_saved(model, stand_ins).items()}
    return {key: names.get(id(tensor)) for key, tensor in stand_ins.items()}


def as_saved(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What transformers' save_pretrained would write for these entries of the model's state dict."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def rows_as_saved(model: nn.Module, key: str, shape: torch.Size) -> list[Rows]:
    """The matrices that transformers saves a parameter as. ValueError unless these are its rows, in order."""
    numbers = torch.arange(shape[:-1].numel(), dtype=torch.int64, device="cpu")
    numbers = numbers.view(*shape[:-1], 1).repeat_interleave(2, dim=-1)
    found = []
    for name, part in as_saved(model, {key: numbers}).items():
        first, count = int(part.flatten()[0]), part.shape[:-1].numel()
        if not torch.equal(part.reshape(-1, 2), numbers.view(-1, 2)[first : first + count]):
            raise ValueError(
                f"{key} is quantized, and transformers saves {name} as a transformed tensor: leave it out of "
                "convert_model with filter_fn"
            )
        found.append(Rows(name, first, count))
    return found
