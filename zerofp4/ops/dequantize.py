"""Codes and their scales to values: NVFP4, MXFP8 and groups of rows, one tensor or a list of them."""

from collections.abc import Sequence

import torch

import zerofp4._autograd as _autograd
import zerofp4._C as _C
from zerofp4.format import E2M1_MAX, E4M3_MAX, SCALE_LAYOUTS
from zerofp4.ops.device import DTYPE_CODES, Filled, is_capturing, run_list, target_of
from zerofp4.ops.schemas import backend, grouped_rows, is_plain_call, values_shape, without_backend
from zerofp4.storage import Side, address_of

Copy = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, bool]
"""A copy of [M, K]: data uint8 [M, K/2], columnwise [K, M/2]; scale, E4M3 or its bytes; amax float32 [1];
block_rows; e4m3_max; whether it is columnwise. Tensors of a stack have a leading E.
"""

_COMPACT = SCALE_LAYOUTS.index("compact")
_FIELDS, _MXFP8_FIELDS = 10, 7  # integers of an item of the native lists

_neutral_amaxes: dict[torch.device, tuple[torch.Tensor, Filled]] = {}


def neutral_amax(device: torch.device) -> torch.Tensor:
    """float32 [1], 2688, cached per device: with this amax, the global scale is 1."""
    kept = _neutral_amaxes.get(device)
    if kept is not None:
        made, filled = kept
        filled.wait()
        return made
    made = torch.full((1,), E2M1_MAX * E4M3_MAX, dtype=torch.float32, device=device)
    if not is_capturing(device):  # inside a CUDA graph it is filled only when the graph runs
        filled = Filled(device)
        filled.note()
        _neutral_amaxes[device] = made, filled
    return made


# NVFP4


def values_of(
    data, scale, amax, block_rows, e4m3_max, columnwise, dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[M, K] or [E, M, K] values of a Copy with compact scales.

    out: contiguous, written past autograd and tracing: FSDP2's all-gather buffer, which FSDP2 resizes itself.
    """
    if out is None:
        if not is_plain_call(data):
            options = {"e4m3_max": e4m3_max, "columnwise": columnwise}
            return torch.ops.zerofp4.dequantize(data, scale, amax, block_rows, dtype, **options)
        out = data.new_empty(values_shape(data, columnwise), dtype=dtype)  # the fastest way
    if out.dim() == 3:
        _write([(data, scale, amax, block_rows, e4m3_max, columnwise)], [out], _COMPACT)
        return out
    rows, cols = out.shape
    if rows and cols:
        options = columnwise, block_rows, _COMPACT, e4m3_max, DTYPE_CODES[dtype]
        _C.dequantize(target_of(out.device), *_addresses(data, scale, amax, out), rows, cols, *options)
    return out


def values_of_many(
    copies: Sequence[Copy], dtype: torch.dtype, outputs: Sequence[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """values_of() each copy, in one launch. outputs: one `out` for each."""
    if outputs is None:
        if copies and not is_plain_call(copies[0][0]):
            return [values_of(*copy, dtype) for copy in copies]
        outputs = [data.new_empty(values_shape(data, copy[-1]), dtype=dtype) for data, *copy in copies]
    _write(copies, outputs, _COMPACT)
    return list(outputs)


def _write(copies: Sequence[Copy], outputs: Sequence[torch.Tensor], layout: int) -> None:
    words: list[int] = []
    for copy, out in zip(copies, outputs, strict=True):
        if out.numel():
            words += _words(*copy, out, layout)
    if words:
        on_cpu, dtype = outputs[0].is_cpu, DTYPE_CODES[outputs[0].dtype]
        run_list(lambda part: _C.DequantizeList(on_cpu, part, dtype), words, _FIELDS, outputs[0].device)


def _words(data, scale, amax, block_rows, e4m3_max, columnwise, out, layout: int) -> Sequence[int]:
    """A copy as an item of the native list, or a stack as one item per matrix."""
    addresses = _addresses(data, scale, amax, out)
    options = (*out.shape[-2:], columnwise, block_rows, layout, e4m3_max)
    if out.dim() == 2:
        return (*addresses, *options)
    steps = [tensor.stride(0) * tensor.itemsize for tensor in (data, scale, amax, out)]
    words: list[int] = []
    for e in range(out.shape[0]):
        words += [first + e * step for first, step in zip(addresses, steps, strict=True)]
        words += options
    return words


def _addresses(data, scale, amax, out) -> tuple[int, ...]:
    return tuple(map(address_of, ("data", "scale", "amax", "out"), (data, scale, amax, out)))


@backend("dequantize")
def _dequantize(
    data, scale, amax, block_rows, dtype, layout="compact", e4m3_max=448, columnwise=False
) -> torch.Tensor:
    out = data.new_empty(values_shape(data, columnwise), dtype=dtype)
    _write([(data, scale, amax, block_rows, e4m3_max, columnwise)], [out], SCALE_LAYOUTS.index(layout))
    return out


# C++ dispatches the operator, and calls this implementation for arguments that are not plain.
_autograd.implement(without_backend("dequantize"))


# MXFP8


Mxfp8Copies = Sequence[tuple[torch.Tensor, torch.Tensor, bool]]
"""By item data, scale, and whether they are columnwise."""


def mxfp8_values_of_many(copies: Mxfp8Copies, dtype: torch.dtype) -> list[torch.Tensor]:
    """[M, K] values of copies with compact scales, in one launch."""
    if copies and not is_plain_call(copies[0][0]):
        return [torch.ops.zerofp4.dequantize_mxfp8(*copy, "compact", dtype) for copy in copies]
    return _mxfp8_values(copies, dtype, "compact")


def _mxfp8_values(copies: Mxfp8Copies, dtype: torch.dtype, layout: str) -> list[torch.Tensor]:
    outputs, words = [data.new_empty(data.shape, dtype=dtype) for data, *_ in copies], []
    for (data, scale, columnwise), out in zip(copies, outputs, strict=True):
        if out.numel():
            words += address_of("data", data), address_of("scale", scale), out.data_ptr()
            words += *data.shape, columnwise, SCALE_LAYOUTS.index(layout)
    if words:
        on_cpu, device, code = outputs[0].is_cpu, outputs[0].device, DTYPE_CODES[dtype]
        run_list(lambda part: _C.Mxfp8DequantizeList(on_cpu, part, code), words, _MXFP8_FIELDS, device)
    return outputs


@backend("dequantize_mxfp8")
def _dequantize_mxfp8(data, scale, columnwise, layout, dtype) -> torch.Tensor:
    return _mxfp8_values([(data, scale, columnwise)], dtype, layout)[0]


# Groups of rows


def grouped_values(
    side: Side, offsets, data_offsets, error, shape, columnwise, other_amax=None, other_e4m3_max=int(E4M3_MAX)
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, ends) of one side of a grouped storage [tokens, K], K a multiple of 8.

    values: bfloat16 [tokens, K], the rows of all groups without padding; columnwise [K, R] with R padded
        rows, each group's columns from data_offsets[g] on, zeros after the last.
    ends: int32 [groups], of the groups.
    other_amax: float32 [groups], the amax of each group's other operand, whose global scale is other_amax *
        (1 / (6 * other_e4m3_max)). Then values are `element * ((scale * (other * amax)) * (1/2688))`,
        rounded; without it exactly element times scale.

    If the splits are invalid (error is 1), all values are NaN, and ends such that products are.
    """
    count, (tokens, cols), data = offsets.shape[0] - 1, shape, side.data
    padded = grouped_rows(tokens, count)[0]
    values = data.new_empty((cols, padded) if columnwise else shape, dtype=torch.bfloat16)
    ends = data.new_empty(count, dtype=torch.int32)
    amax = None if other_amax is None else side.amax
    arguments = _C.GroupedValuesArgs(
        data=address_of("data", data),
        scale=address_of("scale", side.scales["compact"]),
        amax=address_of("amax", amax),
        other_amax=address_of("other_amax", other_amax),
        other_e4m3_max=other_e4m3_max,
        offsets=address_of("offsets", offsets),
        data_offsets=address_of("data_offsets", data_offsets),
        error=address_of("error", error),
        output=values.data_ptr(),
        ends=ends.data_ptr(),
        tokens=tokens,
        cols=cols,
        data_rows=padded,
        count=count,
        columnwise=columnwise,
    )
    _C.grouped_values(target_of(data.device), arguments)
    return values, ends
