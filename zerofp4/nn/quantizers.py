"""A recipe's quantizers, the cache of a layer's quantized weight, and weights that are NVFP4 themselves."""

import functools
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from zerofp4 import ops
from zerofp4.format import BLOCK, MXFP8_SCALE_LAYOUTS, FourOverSix
from zerofp4.gemm import chosen_backend
from zerofp4.layout import as_matrix, check_matrix
from zerofp4.nn.recipe import NVFP4Recipe, Recipe, recipe_of_key
from zerofp4.storage import MXFP8Storage, NVFP4Storage, Side, Storage
from zerofp4.tensors import (
    INIT_VAL,
    MXFP8Tensor,
    NVFP4Tensor,
    QuantizedTensor,
    Quantizer,
    quantize,
    quantize_mxfp8,
    reads_columns,
)


class Quantizers:
    """The quantizers of a recipe, for the roles "input", "weight" and "gradient".

    layout: of the scales that products read.
    weight_columns: whether a weight is quantized with a columnwise copy, for x's gradient.
    has_tiles: whether weights have blocks of 16x16, so that a stack takes one call.
    scheme: for the products in C++; None if Python multiplies.
    """

    def __init__(self, recipe: Recipe, device: torch.device):
        self.recipe, self.device = recipe, device
        backend = chosen_backend(device, recipe.backend)
        # Dequantization reads compact scales.
        native = backend == "native" and recipe.backward == "quantized"
        self.layout = MXFP8_SCALE_LAYOUTS[int(native)]
        self.is_nvfp4 = isinstance(recipe, NVFP4Recipe)
        self.quantized_backward = recipe.backward == "quantized"
        self._is_exact = backend == "exact"
        self.has_tiles = self.is_nvfp4 and recipe.weight_block == (BLOCK, BLOCK)
        self.weight_columns = self.quantized_backward and not (self._is_exact and self.has_tiles)
        multiplies = self.is_nvfp4 and self._is_exact and self.quantized_backward
        self.scheme = ops.layer_scheme(device, recipe) if multiplies else None
        self._made: dict[tuple, Quantizer] = {}

    def __call__(self, role: str, x: torch.Tensor, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        record = self.record(role, x, rowwise=rowwise, columnwise=columnwise)
        return NVFP4Tensor(record) if isinstance(record, NVFP4Storage) else MXFP8Tensor(record)

    def reads_rows(self, weight: Storage) -> bool:
        """Whether the gradient of x reads a weight's rows instead of its columns."""
        return not self.quantized_backward or (self._is_exact and self.is_nvfp4 and rows_are_enough(weight))

    def rows(self, weight: NVFP4Storage) -> tuple | None:
        """(data, scale, amax, block_rows, e4m3_max) of the rows for C++; None if it needs columns, too."""
        if weight.block != self.recipe.weight_block or not self.reads_rows(weight):
            return None
        copy = weight.rowwise
        return copy.data, copy.scales.get("compact"), copy.amax, weight.block[0], weight.e4m3_max

    def record(self, role: str, x: torch.Tensor, *, rowwise: bool, columnwise: bool) -> Storage:
        if not self.is_nvfp4:
            layouts = (self.layout,)
            return quantize_mxfp8(x, rowwise=rowwise, columnwise=columnwise, scale_layouts=layouts).record
        quantizer = self._nvfp4(role, rowwise, columnwise)
        if columnwise and role != "weight" and not self.recipe.hadamard and as_matrix(x.shape)[0] % 2:
            return _with_even_columns(quantizer, x)
        return quantizer.record(x)

    def weights(self, weight: torch.Tensor, x_needs: bool) -> list[Storage]:
        """A weight quantized for one call. ValueError if x's gradient is needed and its sizes forbid it."""
        if self.is_nvfp4:
            check_matrix(*weight.shape[-2:], columnwise=x_needs and self.quantized_backward)
        columnwise = x_needs and self.weight_columns
        return [
            self.record("weight", each, rowwise=True, columnwise=columnwise) for each in self.parts(weight)
        ]

    def parts(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What takes one call to quantize: the whole weight, or each matrix of a stack without tiles."""
        return (weight,) if self.has_tiles or weight.dim() == 2 else weight.unbind()

    def input(self, x: QuantizedTensor, *, columnwise: bool) -> Storage:
        """The record of x. Raises ValueError unless it is quantized as by the recipe, with these copies."""
        expected = self.blank("input", x.record.shape, x.record.dtype, columnwise=columnwise)
        found = x.record
        if not columnwise and isinstance(found, NVFP4Storage):
            expected.hadamard, expected.random_signs = found.hadamard, found.random_signs
        if type(found) is not type(expected) or found.context() != expected.context():
            raise ValueError(
                f"x is quantized, but not as the recipe does it: make it with quantize_input, got {x}"
            )
        for side in ("rowwise", "columnwise")[: 1 + columnwise]:
            copy = getattr(found, side)
            if copy is None or self.layout not in copy.scales:
                raise ValueError(f"x must have a {side} copy with {self.layout} scales, got {x}")
        return found

    def blank(self, role: str, shape: torch.Size, dtype: torch.dtype, *, columnwise: bool) -> Storage:
        """A record for a role, without buffers."""
        if not self.is_nvfp4:
            return MXFP8Storage(shape, dtype)
        options = nvfp4_options(self.recipe, role, columnwise)
        options.pop("stochastic_rounding", None)
        return NVFP4Storage(shape, dtype, **options)

    def update_(self, role: str, out: QuantizedTensor, x: torch.Tensor, *, columnwise: bool) -> None:
        """Quantize x into the buffers of `out`, which has a rowwise copy."""
        if self.is_nvfp4:
            self._nvfp4(role, True, columnwise).update_(out, x)
        else:
            quantize_mxfp8(x, columnwise=columnwise, scale_layouts=(self.layout,), out=out)

    def _nvfp4(self, role: str, rowwise: bool, columnwise: bool) -> Quantizer:
        key = (role, rowwise, columnwise)
        made = self._made.get(key)
        if made is None:
            options = nvfp4_options(self.recipe, role, columnwise)
            copies = {"rowwise": rowwise, "columnwise": columnwise, "scale_layouts": (self.layout,)}
            made = self._made[key] = Quantizer(**copies, **options)
        return made


def _with_even_columns(quantizer: Quantizer, x: torch.Tensor) -> NVFP4Storage:
    """For an odd number of rows: the columnwise copy is padded with zeros, which change no product."""
    rows, cols = as_matrix(x.shape)
    record = quantizer.record(F.pad(x.reshape(rows, cols), (0, 0, 0, 1)))
    record.shape = x.shape
    if record.rowwise is not None:
        data, scales, amax = record.rowwise.data, record.rowwise.scales, record.rowwise.amax
        record.rowwise = Side(data[:rows], scales | {"compact": scales["compact"][:rows]}, amax)
    return record


def nvfp4_options(recipe: NVFP4Recipe, role: str, columnwise: bool) -> dict[str, Any]:
    if role == "weight":
        return {"block": recipe.weight_block, "four_over_six": recipe.four_over_six}
    chosen = recipe.four_over_six if role == "input" else None
    return {"block": (1, BLOCK), "four_over_six": chosen} | token_options(recipe, role, columnwise)


def token_options(recipe: NVFP4Recipe, role: str, columnwise: bool) -> dict[str, Any]:
    """Options of inputs and gradients that quantize and quantize_grouped have in common."""
    options: dict[str, Any] = {}
    if columnwise and recipe.hadamard:
        options |= {"hadamard": True, "random_signs": recipe.random_signs}
    if role == "gradient":
        options["stochastic_rounding"] = recipe.stochastic_rounding
    return options


@functools.cache
def quantizers_of(key: str, device: torch.device) -> Quantizers:
    """The Quantizers of a recipe's key on a device, cached in C, without a Python frame."""
    return Quantizers(recipe_of_key(key), device)


def check_primary(weight: NVFP4Tensor, recipe: Recipe) -> None:
    """Raises ValueError unless the recipe's products can take this NVFP4 weight."""
    if not isinstance(recipe, NVFP4Recipe):
        raise ValueError(f"weight is an NVFP4Tensor, which {type(recipe).__name__} cannot multiply")
    if recipe.weight_block != weight.record.block:
        raise ValueError(
            f"weight is an NVFP4Tensor with block {weight.record.block}, and weight_block of the recipe is "
            f"{recipe.weight_block}: use NVFP4Recipe(weight_block={weight.record.block})"
        )
    is_exact = chosen_backend(weight.device, recipe.backend) == "exact"
    if weight.record.block[0] == 1 and recipe.backward == "quantized" and not is_exact:
        raise ValueError(
            f"weight is an NVFP4Tensor with block {weight.record.block}, which has no columns for a "
            "quantized backward pass on FP4 tensor cores: use NVFP4Recipe(backward='dequantized'), or "
            "backend='exact'"
        )


def rows_are_enough(record: NVFP4Storage) -> bool:
    """Whether exact products of columns may read rows, with the same values, or the only ones."""
    return record.rowwise is not None and (record.block == (BLOCK, BLOCK) or record.columnwise is None)


def with_columns(record: Storage) -> Storage:
    """The record, with its columnwise copy derived if it has rows of 16x16 blocks only."""
    if record.columnwise is not None or not isinstance(record, NVFP4Storage):
        return record
    derived = NVFP4Storage.from_context(record.shape, record.context())
    derived.columnwise = ops.derived_side(record, "columnwise")
    return derived


class WeightCache:
    """The quantized weight of a layer for the micro-batches of a step. Its buffers stay in place while the
    weight's shape, dtype and device do, for captured CUDA graphs. Copies of a cache begin empty.

    handle: a number in a tensor, by which operators find the cache, so that equal layers share a graph.
    """

    _caches: ClassVar[weakref.WeakValueDictionary[int, "WeightCache"]] = weakref.WeakValueDictionary()
    _of_programs: ClassVar[dict[int, "WeightCache"]] = {}
    """Of exported programs, whose layers are in another process."""

    def __init__(self, number: int | None = None) -> None:
        number = int.from_bytes(os.urandom(7)) if number is None else number  # unknown to other processes
        self.handle = torch.tensor(number, dtype=torch.int64, device="cpu")
        self._caches[number] = self
        self._tensors: list[QuantizedTensor] | None = None
        self._quantizers: Quantizers | None = None
        self._of_inference = False
        self._source: Callable[[], torch.Tensor | None] = lambda: None
        self.state: tuple | None = None
        """Which weight it was made from, and when."""

    @classmethod
    def of_handle(cls, handle: torch.Tensor) -> "WeightCache":
        number = int(handle)
        found = cls._caches.get(number)
        if found is None:
            found = cls._of_programs[number] = cls(number)
        return found

    def get(self, weight: torch.Tensor, quantizers: Quantizers, is_first_microbatch: bool) -> list[Storage]:
        """Records as of Quantizers.weights, quantized anew if needed. RuntimeError without a first call."""
        if self._tensors is None and not is_first_microbatch:
            raise RuntimeError(
                "is_first_microbatch=False takes the cached weight, but there is none: "
                "call the layer with is_first_microbatch=True first"
            )
        if self._of_inference > torch.is_inference_mode_enabled():
            self._tensors = []  # inference tensors cannot be written to or saved outside
        if (
            not self._tensors
            or is_first_microbatch
            or quantizers is not self._quantizers
            or not self._is_made_from(weight)
        ):
            self._fill(weight, quantizers)
            self._source, self.state = weakref.ref(weight), weight_state(weight)
        return [tensor.record for tensor in self._tensors]

    def unchanged(self) -> Callable[[], bool]:
        """A function that says whether the cache still holds the present weight."""
        state = self.state
        return lambda: self.state == state

    def follow(self, weight: torch.Tensor) -> None:
        """Drop buffers that the weight, which may have moved, can no longer be written to."""
        if self._tensors and not self._fits(weight):
            self._tensors = []

    def _is_made_from(self, weight: torch.Tensor) -> bool:
        """Whether the cache holds the weight's present version. A compiled operator may pass an alias, which
        counts if it has the same address and the original is still alive.
        """
        source = self._source()
        if source is None or weight_state(source) != self.state:
            return False
        return weight is source or weight_state(weight) == self.state

    def _fill(self, weight: torch.Tensor, quantizers: Quantizers) -> None:
        columnwise, parts = quantizers.weight_columns, quantizers.parts(weight.detach())
        if self._tensors and quantizers is self._quantizers and self._fits(weight):
            for kept, part in zip(self._tensors, parts, strict=True):
                quantizers.update_("weight", kept, part, columnwise=columnwise)
            return
        self._tensors = [quantizers("weight", part, rowwise=True, columnwise=columnwise) for part in parts]
        self._quantizers, self._of_inference = quantizers, torch.is_inference_mode_enabled()

    def _fits(self, weight: torch.Tensor) -> bool:
        parts = [tensor.record for tensor in self._tensors]
        shape = parts[0].shape if weight.dim() == len(parts[0].shape) else (len(parts), *parts[0].shape)
        kept = (torch.Size(shape), parts[0].dtype, parts[0].device)
        return kept == (weight.shape, weight.dtype, weight.device)

    def __reduce__(self) -> tuple[Callable, tuple]:
        return WeightCache, ()


def weight_state(weight: torch.Tensor) -> tuple:
    """Changes when a weight is replaced or written to. torch counts no writes through `.data`."""
    if isinstance(weight, QuantizedTensor):
        with torch._C.DisableTorchFunctionSubclass():
            return id(weight), None if weight.is_inference() else weight._version
    return weight.data_ptr(), None if weight.is_inference() else weight._version


# Weights that are NVFP4 themselves


def primary_parameter(
    weight: nn.Parameter,
    name: str,
    columnwise: bool | None = None,
    *,
    block: tuple[int, int] = (BLOCK, BLOCK),
    four_over_six: FourOverSix | None = None,
    amax: torch.Tensor | None = None,
) -> nn.Parameter:
    """The NVFP4 parameter that replaces `weight`, with the old value as its initial one. columnwise: None if
    a layer of zerofp4.nn reads that copy. amax: shared with other weights; None for its own.
    """
    if columnwise is None:
        columnwise = reads_columns(block, weight.device)
    # Native products read swizzled scales. Casts write them into this buffer, so that nothing swizzles.
    layouts = ("compact", "swizzled") if ops.has_fp4_tensor_cores(weight.device) else ("compact",)
    options = {"columnwise": columnwise, "scale_layouts": layouts, "stacked": weight.dim() == 3}
    tensor = quantize(weight, block=block, four_over_six=four_over_six, amax=amax, **options)
    tensor.record.name = name or None
    if not weight.is_meta:
        tensor.record.attachments[INIT_VAL] = weight.detach().to("cpu", copy=True)
    converted = nn.Parameter(tensor, weight.requires_grad)
    vars(converted).update({k: v for k, v in vars(weight).items() if k != "_is_param"})
    converted.grad = weight.grad
    return converted


def make_primary(layer: nn.Module) -> None:
    """Make the weight of a new layer NVFP4. Raises RuntimeError on the meta device."""
    if layer.weight.is_meta:
        raise RuntimeError("primary_weights=True quantizes the weight, which is on the meta device")
    layer.weight = primary_parameter(layer.weight, "")
    show_weights()
    watch_assignments(layer)


def shown(module: nn.Module, others: str) -> str:
    """For extra_repr: others, and weights in NVFP4, `weight=NVFP4(16x16)`, or gathered so by FSDP2."""
    weights = []
    for name, parameter in module._parameters.items():
        local = getattr(parameter, "_local_tensor", parameter)  # of a DTensor
        gathered = getattr(local, "gathered_block", None)
        if gathered is not None:
            weights.append("{}=FP32, gathered as NVFP4({}x{})".format(name, *gathered))
        elif isinstance(local, NVFP4Tensor):
            weights.append("{}=NVFP4({}x{})".format(name, *local.block))
    return ", ".join([*([others] if others else []), *weights])


def show_weights() -> None:
    """Have print(model) show the NVFP4 weights of every nn.Linear.

    Changes the class: a method on a module would be a reference cycle, and keep its memory longer.
    """
    original = nn.Linear.extra_repr
    if hasattr(original, "shows_weights"):
        return

    @functools.wraps(original)
    def extra_repr(self: nn.Linear) -> str:
        return shown(self, original(self))

    extra_repr.shows_weights = True
    nn.Linear.extra_repr = extra_repr


def watch_assignments(module: nn.Module) -> None:
    """Have load_state_dict(assign=True) warn if it replaces quantized weights by ordinary parameters."""
    hooks = module._load_state_dict_pre_hooks.values()
    if all(getattr(hook, "hook", None) is not _warn_of_assignments for hook in hooks):
        module.register_load_state_dict_pre_hook(_warn_of_assignments)


def _warn_of_assignments(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    if not local_metadata.get("assign_to_params_buffers"):
        return
    keys = [prefix + name for name, p in module.named_parameters() if isinstance(p, QuantizedTensor)]
    lost = [key for key in keys if key in state_dict and not isinstance(state_dict[key], QuantizedTensor)]
    if lost:
        warnings.warn(
            "load_state_dict(assign=True) replaces quantized weights by ordinary parameters: "
            f"{', '.join(lost)}. Without assign=True it quantizes the values",
            stacklevel=2,
        )
