"""Records of TransformerEngine's NVFP4 tensors, made of their attributes."""

import dataclasses
from typing import Any

import torch

from zerofp4.format import BLOCK, SCALE_DTYPE
from zerofp4.ops import pointers
from zerofp4.storage import NVFP4Storage, Side, check_buffer, check_plain, dispatches, note_rebinding

OLDEST, NEWEST = (2, 14), (2, 20)
"""Known versions. 2.14 is the first with both functions."""
KNOWN = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))

_MARK = "_fp4_dtype"  # only NVFP4Tensor has it
_RECORD = "_zerofp4_record"
_BUFFERS = {
    "rowwise": ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise"),
    "columnwise": ("_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise"),
}
_SWIZZLED = "_with_gemm_swizzled_scales"
_LATER = ("_row_scaled_nvfp4", "_nvfp4_use_4over6")  # since 2.16 and 2.17
_ATTRIBUTES = (*_BUFFERS["rowwise"], *_BUFFERS["columnwise"], _SWIZZLED, *_LATER, "_quantizer")
_MISSING = object()

_REFUSED = {
    _SWIZZLED: "scales that are swizzled already: the cast writes one byte a row, as TransformerEngine's own "
    "does; set optimize_for_gemm=False on the quantizer",
    "_row_scaled_nvfp4": "an amax for each row: the cast has one for the weight",
    "_nvfp4_use_4over6": "four over six, which a cast from shards cannot do: it sees a part of a tile, and "
    "the choice needs the error of all of it",
}


@dataclasses.dataclass(eq=False)
class TensorRecord(NVFP4Storage):
    """An NVFP4Tensor of TransformerEngine: scales in the expanded layout only, an amax for each copy."""

    problem: tuple[type[Exception], str] | None = None
    """The error of check(): why nothing can be cast into the tensor now."""
    seen: tuple[tuple, list[torch.Tensor], bytes | list[int]] = (), [], b""
    """The tensor's attributes at the last look(), the buffers among them, and their addresses."""

    def __reduce_ex__(self, protocol):
        return type(None), ()  # a copy of the tensor gets its own

    def check(self) -> None:
        if self.problem is not None:
            kind, message = self.problem
            raise kind(message)
        super().check()

    def look(self, tensor: torch.Tensor) -> None:
        """Take the tensor's buffers if they have changed. Called for every weight in a step."""
        attributes = tuple(getattr(tensor, name, _MISSING) for name in _ATTRIBUTES)
        before, buffers, addresses = self.seen
        if list(map(id, attributes)) == list(map(id, before)) and pointers(buffers) == addresses:
            return
        note_rebinding()
        buffers = list(filter(_has_address, attributes))
        self.seen = attributes, buffers, pointers(buffers)
        self.rowwise = self.columnwise = self.problem = None
        try:
            self.rowwise, self.columnwise = _sides_of(tensor, self)
        except (TypeError, ValueError, RuntimeError) as error:
            self.problem = type(error), str(error)


def _has_address(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type in ("cpu", "cuda") and not dispatches(value)


def record_of_tensor(tensor: torch.Tensor) -> TensorRecord | None:
    """The up-to-date record of TransformerEngine's NVFP4Tensor, which keeps it; None for another tensor."""
    record = getattr(tensor, _RECORD, None)
    if record is None:
        if not hasattr(tensor, _MARK):
            return None
        record = TensorRecord(tensor.shape, tensor.dtype, (BLOCK, BLOCK))
        setattr(tensor, _RECORD, record)
    record.look(tensor)
    return record


def _sides_of(tensor: torch.Tensor, record: TensorRecord) -> tuple[Side, Side | None]:
    """Raises TypeError or ValueError, naming the attribute, for a tensor that cannot be cast into."""
    if tensor.shape != record.shape or tensor.dtype != record.dtype:
        raise ValueError(
            f"shape and dtype were {tuple(record.shape)} and {record.dtype}, and are now "
            f"{tuple(tensor.shape)} and {tensor.dtype}: a plan is of the first"
        )
    if len(tensor.shape) != 2 or any(size % BLOCK for size in tensor.shape):
        raise ValueError(f"shape must be two multiples of {BLOCK}, got {tuple(tensor.shape)}")
    record.check_context()
    _check_options(tensor)
    rowwise, columnwise = (_side_of(tensor, record, side) for side in _BUFFERS)
    if rowwise is None:
        raise ValueError("_rowwise_data is None: there is nothing to cast into")
    return rowwise, columnwise


def _check_options(tensor: torch.Tensor) -> None:
    quantizer = _attribute(tensor, "_quantizer")
    if quantizer is None:
        raise ValueError("_quantizer is None: it says whether blocks are 16x16")
    if not _attribute(quantizer, "with_2d_quantization", "_quantizer."):
        raise ValueError("_quantizer.with_2d_quantization must be True: the cast is of blocks of 16x16")
    asked = {_SWIZZLED: _attribute(tensor, _SWIZZLED)} | {
        name: getattr(tensor, name, False) for name in _LATER
    }
    for name, value in asked.items():
        if value:
            raise ValueError(f"{name} asks for {_REFUSED[name]}")


def _attribute(owner: Any, name: str, place: str = "") -> Any:
    value = getattr(owner, name, _MISSING)
    if value is _MISSING:
        raise TypeError(
            f"{type(owner).__name__} has no attribute {place}{name}, as TransformerEngine's from {KNOWN} have"
        )
    return value


def _side_of(tensor: torch.Tensor, record: TensorRecord, side: str) -> Side | None:
    """A side over the tensor's memory; None if it has neither codes nor scales."""
    names = _BUFFERS[side]
    data, scale, amax = buffers = [_attribute(tensor, name) for name in names]
    if data is None and scale is None:
        return None
    shapes = record.data_shape(side), record.scale_shape(side, "expanded"), record.amax_shape
    dtypes = torch.uint8, torch.uint8, torch.float32
    for name, buffer, shape, dtype in zip(names, buffers, shapes, dtypes, strict=True):
        if buffer is None:
            raise ValueError(f"{name} is None, but {names[data is None]} is not")
        check_buffer(name, buffer, shape, dtype, tensor.device)
        check_plain(name, buffer)
    return Side(data, {"expanded": scale.view(SCALE_DTYPE)}, amax)
