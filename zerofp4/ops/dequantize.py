"""zerofp4::dequantize and its multi-tensor form: packed codes and their scales to values."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

import zerofp4._autograd as _autograd
import zerofp4._C as _C
from zerofp4.format import BLOCK, E2M1_MAX, E4M3_MAX, SCALE_LAYOUTS, WEIGHT_DTYPES
from zerofp4.layout import scale_shape
from zerofp4.ops.device import DTYPE_CODES, Filled, is_capturing, target_of
from zerofp4.ops.lists import run_list, run_stack, zip_lists
from zerofp4.ops.operator import (
    backend,
    check_block_rows,
    check_scale,
    fake,
    is_plain_call,
    without_backend,
)
from zerofp4.ops.tensor_lists import addresses_of
from zerofp4.storage import address_of, check_buffer

E4M3_MAXIMA = (448, 256)
_COMPACT = SCALE_LAYOUTS.index("compact")

FIELDS = 10
"""Integers of an item of the native list."""

torch.library.define(
    "zerofp4::dequantize",
    "(Tensor data, Tensor scale, Tensor amax, int block_rows, ScalarType dtype, str layout='compact', "
    "int e4m3_max=448, bool columnwise=False) -> Tensor",
)
torch.library.define(
    "zerofp4::dequantize_many",
    "(Tensor[] data, Tensor[] scale, Tensor[] amax, int[] block_rows, ScalarType dtype, str layout, "
    "int[] e4m3_max, bool[] columnwise) -> Tensor[]",
)


_neutral_amaxes: dict[torch.device, tuple[torch.Tensor, Filled]] = {}


def neutral_amax(device: torch.device) -> torch.Tensor:
    """float32 [1], 2688: with it dequantization's `(scale * amax) * (1/2688)` is the scale itself, for each
    scale. Kept, one for each device.
    """
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


class DequantizeItem(NamedTuple):
    """A copy of a quantized matrix. data uint8 [M, K/2], columnwise [K, M/2]; scale E4M3 or its bytes, of the
    matrix as it is stored; amax float32 [1]. Or of a stack of E matrices in blocks of 16x16: each of them has
    E as its first dimension.
    """

    data: torch.Tensor
    scale: torch.Tensor
    amax: torch.Tensor
    block_rows: int
    e4m3_max: int
    columnwise: bool

    @property
    def matrix(self) -> tuple[int, int]:
        """(M, K), of each of a stack."""
        rows, half = self.data.shape[-2:]
        return (2 * half, rows) if self.columnwise else (rows, 2 * half)

    @property
    def shape(self) -> tuple[int, ...]:
        """(M, K) or (E, M, K)"""
        return (*self.data.shape[:-2], *self.matrix)


def check_items(
    items: Sequence[DequantizeItem], dtype: torch.dtype, layout: str, names: Sequence[str]
) -> None:
    """`names` are what messages append to the names of arguments, by item."""
    if dtype not in WEIGHT_DTYPES:
        raise ValueError(f"dtype must be one of {WEIGHT_DTYPES}, got {dtype}")
    if layout not in SCALE_LAYOUTS:
        raise ValueError(f"layout must be one of {SCALE_LAYOUTS}, got {layout!r}")
    for item, name in zip(items, names, strict=True):
        check_block_rows(item.block_rows)
        if item.e4m3_max not in E4M3_MAXIMA:
            raise ValueError(f"e4m3_max must be one of {E4M3_MAXIMA}, got {item.e4m3_max}")
        if item.data.dim() != 2 and (item.data.dim() != 3 or item.block_rows != BLOCK):
            raise ValueError(f"data{name} must be a matrix, got shape {tuple(item.data.shape)}")
        *stack, rows, half = item.data.shape
        device = items[0].data.device
        scale = (*stack, *scale_shape(rows, 2 * half, item.block_rows, layout))
        check_buffer(f"data{name}", item.data, item.data.shape, torch.uint8, device)
        check_scale(f"scale{name}", item.scale, scale, device)
        check_buffer(f"amax{name}", item.amax, tuple(stack) or (1,), torch.float32, device)


def _words(item: DequantizeItem, out: torch.Tensor, layout: int) -> tuple[int, ...]:
    """The item as one of the native list, or a stack as one after the other."""
    data, scale, amax, block_rows, e4m3_max, columnwise = item
    addresses = _addresses(data, scale, amax, out)
    options = (*out.shape[-2:], columnwise, block_rows, layout, e4m3_max)
    if out.dim() == 2:
        return (*addresses, *options)
    steps = [tensor.stride(0) * tensor.itemsize for tensor in (data, scale, amax, out)]
    words: list[int] = []
    for e in range(out.shape[0]):
        words += [first + e * step for first, step in zip(addresses, steps, strict=True)]
        words += options
    return tuple(words)


def _addresses(data, scale, amax, out) -> tuple[int, ...]:
    return tuple(map(address_of, ("data", "scale", "amax", "out"), (data, scale, amax, out)))


def _run(items: Sequence[DequantizeItem], dtype: torch.dtype, layout: str) -> list[torch.Tensor]:
    outputs = [torch.empty(item.shape, dtype=dtype, device=item.data.device) for item in items]
    _write(items, outputs, SCALE_LAYOUTS.index(layout))
    return outputs


def _write(items: Sequence[DequantizeItem], outputs: Sequence[torch.Tensor], layout: int) -> None:
    words = [_words(item, out, layout) for item, out in zip(items, outputs, strict=True) if out.numel()]
    if words:
        dtype, device = outputs[0].dtype, outputs[0].device
        flat = list(itertools.chain.from_iterable(words))
        count = len(flat) // FIELDS
        if len(words) == 1:
            run_stack(lambda part: _native(part, dtype, device), flat, count, device)
        else:
            run_list(_native(flat, dtype, device), count, device)


def _native(words: Sequence[int], dtype: torch.dtype, device: torch.device) -> _C.DequantizeList:
    return _C.DequantizeList(device.type == "cpu", words, DTYPE_CODES[dtype])


def _one(
    data, scale, amax, block_rows, dtype, layout="compact", e4m3_max=448, columnwise=False
) -> DequantizeItem:
    item = DequantizeItem(data, scale, amax, block_rows, e4m3_max, columnwise)
    check_items([item], dtype, layout, [""])
    return item


def _many(data, scale, amax, block_rows, dtype, layout, e4m3_max, columnwise) -> list[DequantizeItem]:
    lists = {"data": data, "scale": scale, "amax": amax, "block_rows": block_rows}
    items = [
        DequantizeItem(*fields) for fields in zip_lists(**lists, e4m3_max=e4m3_max, columnwise=columnwise)
    ]
    check_items(items, dtype, layout, [f"[{i}]" for i in range(len(items))])
    return items


def values_of(data, scale, amax, block_rows, e4m3_max, columnwise, dtype) -> torch.Tensor:
    """[M, K] or [E, M, K] values of a copy in a record, with compact scales. The record has checked its
    buffers.
    """
    if not is_plain_call(data):
        options = {"e4m3_max": e4m3_max, "columnwise": columnwise}
        return torch.ops.zerofp4.dequantize(data, scale, amax, block_rows, dtype, **options)
    *stack, rows, half = data.shape
    matrix = (2 * half, rows) if columnwise else (rows, 2 * half)
    out = data.new_empty((*stack, *matrix), dtype=dtype)  # what costs the host least
    write_values(data, scale, amax, block_rows, e4m3_max, columnwise, out)
    return out


def write_values(data, scale, amax, block_rows, e4m3_max, columnwise, out) -> None:
    """The same, to where out lies: contiguous, of that shape and of one of WEIGHT_DTYPES. By the native call
    alone: a write to memory that FSDP2 gives and frees, of which autograd and tracing must not hear.
    """
    if out.dim() == 3:
        _write([DequantizeItem(data, scale, amax, block_rows, e4m3_max, columnwise)], [out], _COMPACT)
        return
    rows, cols = out.shape
    if rows and cols:
        addresses = _addresses(data, scale, amax, out)
        options = columnwise, block_rows, _COMPACT, e4m3_max, DTYPE_CODES[out.dtype]
        _C.dequantize(target_of(out.device), *addresses, rows, cols, *options)


def values_of_many(copies: Sequence[tuple], dtype: torch.dtype) -> list[torch.Tensor]:
    """The same of a list of copies, in one launch."""
    items = [DequantizeItem(*copy) for copy in copies]
    if all(is_plain_call(item.data) for item in items[:1]):
        return _run(items, dtype, "compact")
    columns = list(map(list, zip(*items, strict=True)))
    return torch.ops.zerofp4.dequantize_many(*columns[:4], dtype, "compact", *columns[4:])


def stacked_values_of(
    data: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], block_rows: int, dtype: torch.dtype
) -> torch.Tensor:
    """[E, M, K] values, without their global scales, of E matrices as they are stored in records: uint8 data
    [M, K/2] of one shape each, compact scales. In one launch, while a CUDA graph is captured one for every 32
    that do not lie one behind the other.
    """
    count, (rows, half), device = len(data), data[0].shape, data[0].device
    out = torch.empty((count, rows, 2 * half), dtype=dtype, device=device)
    if not out.numel():
        return out
    places = addresses_of("data", data), addresses_of("scale", scales)
    neutral = neutral_amax(device)  # held: made while a graph is captured, it is nobody else's
    options = (neutral.data_ptr(), rows, 2 * half, block_rows, DTYPE_CODES[dtype])
    step = _C.ARGUMENT_ITEMS if is_capturing(device) else count
    for first in range(0, count, step):
        part = [addresses[first : first + step] for addresses in places]
        native = _C.stacked_values(device.type == "cpu", *part, out[first].data_ptr(), *options)
        run_list(native, native.count, device)
    return out


@backend("dequantize")
def _dequantize(data, scale, amax, block_rows, dtype, layout="compact", *options) -> torch.Tensor:
    return _run([_one(data, scale, amax, block_rows, dtype, layout, *options)], dtype, layout)[0]


# The operator itself is dispatched in C++. Arguments that are not plain go on to this implementation.
_autograd.implement(without_backend("dequantize"), _C.dequantize_function)


@fake("dequantize")
def _(data, scale, amax, block_rows, dtype, layout="compact", *options) -> torch.Tensor:
    item = _one(data, scale, amax, block_rows, dtype, layout, *options)
    return data.new_empty(item.shape, dtype=dtype)


@backend("dequantize_many")
def _dequantize_many(data, scale, amax, block_rows, dtype, layout, *options) -> list[torch.Tensor]:
    return _run(_many(data, scale, amax, block_rows, dtype, layout, *options), dtype, layout)


@fake("dequantize_many")
def _(data, scale, amax, block_rows, dtype, layout, *options) -> list[torch.Tensor]:
    items = _many(data, scale, amax, block_rows, dtype, layout, *options)
    return [item.data.new_empty(item.shape, dtype=dtype) for item in items]
