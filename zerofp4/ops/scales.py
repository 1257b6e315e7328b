"""Layouts of a record's buffers: compact scales to padded ones and back, transposed codes, derived sides."""

import collections
import functools
from collections.abc import Iterator, Sequence

import torch

import zerofp4._C as _C
from zerofp4.format import BLOCK, MXFP8_BLOCK, MXFP8_SCALE_DTYPE, SCALE_DTYPE, SCALE_LAYOUTS
from zerofp4.layout import ceil_div
from zerofp4.ops.device import run_list, target_of
from zerofp4.ops.schemas import backend, is_plain_call, new_scale, new_transpose, scale_shapes
from zerofp4.ops.tensor_lists import addresses_of
from zerofp4.storage import SIDES, MXFP8Storage, NVFP4Storage, Side, address_of, check_memory

VECTOR_BYTES = 16
_FIELDS = 6  # integers of an item of the native list

_known_shapes = functools.lru_cache(maxsize=1024)(scale_shapes)
"""Not for traces, whose sizes may be symbols."""


def padded_scale(record: NVFP4Storage | MXFP8Storage, side: str, layout: str) -> torch.Tensor:
    """The "expanded" (NVFP4 only) or "swizzled" scales of a side (layout.scale_shape, mxfp8_scale_shape): the
    persistent buffer, or made from the compact scales. ValueError without that side, RuntimeError if freed.
    """
    copy: Side | None = getattr(record, side)
    if copy is None:
        raise ValueError(f"this tensor has no {side} copy, so it has no {side} scales")
    if layout in copy.scales:
        return copy.scales[layout]
    compact = copy.scales["compact"]
    check_memory(f"{side}_scale", compact)
    if isinstance(record, NVFP4Storage):
        return torch.ops.zerofp4.pad_scale(compact, *record.side_matrix(side), record.block[0], layout)
    raw = compact.view(torch.uint8)
    raw = raw.t().contiguous() if side == "columnwise" else raw
    # Like NVFP4 scales with as many blocks per row.
    rows, columns = raw.shape
    return torch.ops.zerofp4.pad_scale(raw, rows, columns * BLOCK, 1, layout).view(MXFP8_SCALE_DTYPE)


def compact_scale(record: NVFP4Storage | MXFP8Storage, side: str) -> torch.Tensor:
    """The compact scales of a side: the buffer, or made from the swizzled ones."""
    copy: Side = getattr(record, side)
    if "compact" in copy.scales:
        return copy.scales["compact"]
    swizzled = copy.scales["swizzled"]
    if isinstance(record, NVFP4Storage):
        return torch.ops.zerofp4.unpad_scale(swizzled, *record.side_matrix(side), record.block[0], "swizzled")
    rows, cols = record.matrix if side == "rowwise" else record.matrix[::-1]
    blocks = ceil_div(cols, MXFP8_BLOCK) * BLOCK  # as scales of NVFP4
    raw = torch.ops.zerofp4.unpad_scale(swizzled.view(torch.uint8), rows, blocks, 1, "swizzled")
    return (raw.t().contiguous() if side == "columnwise" else raw).view(MXFP8_SCALE_DTYPE)


def change_scales(scales, rows, cols, block_rows, layout, pad: bool) -> list[torch.Tensor]:
    """pad_scale or unpad_scale for a list, in one launch. Results of one shape share a storage."""
    matrices = list(zip(rows, cols, block_rows, strict=True))
    if not all(map(is_plain_call, scales[:1])):
        change = torch.ops.zerofp4.pad_scale if pad else torch.ops.zerofp4.unpad_scale
        return [change(scale, *matrix, layout) for scale, matrix in zip(scales, matrices, strict=True)]
    shapes = [_known_shapes(*matrix, layout, pad) for matrix in matrices]
    given, made = map(list, zip(*shapes, strict=True)) if shapes else ([], [])
    if scales and _are_as_usual(scales, given):
        out = _allocate(scales[0], made)
    else:  # raises, or takes scales as bytes
        out = [
            new_scale(scale, *matrix, layout, pad=pad, name=f"scales[{i}]", device=scales[0].device)
            for i, (scale, matrix) in enumerate(zip(scales, matrices, strict=True))
        ]
    _change_layouts(scales, out, matrices, layout, pad)
    return out


def _are_as_usual(scales: Sequence[torch.Tensor], shapes: Sequence[tuple[int, int]]) -> bool:
    """Whether all are contiguous E4M3 scales of these shapes on one device."""
    return (
        [scale.shape for scale in scales] == shapes
        and all(scale.dtype == SCALE_DTYPE for scale in scales)
        and all(map(torch.Tensor.is_contiguous, scales))
        and len({scale.device for scale in scales}) == 1
    )


def _allocate(like: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Uninitialized tensors. Those of a shape share a storage, for speed, if vector reads stay aligned."""
    made: dict[tuple[int, int], Iterator[torch.Tensor]] = {}
    for shape, count in collections.Counter(shapes).items():
        if shape[0] * shape[1] * like.itemsize % VECTOR_BYTES == 0:
            made[shape] = iter(like.new_empty((count, *shape)).unbind())
        else:
            made[shape] = iter([like.new_empty(shape) for _ in range(count)])
    return [next(made[shape]) for shape in shapes]


def _change_scale(scale, rows, cols, block_rows, layout, *, pad: bool) -> torch.Tensor:
    out = new_scale(scale, rows, cols, block_rows, layout, pad=pad)
    _change_layouts([scale], [out], [(rows, cols, block_rows)], layout, pad)
    return out


backend("pad_scale")(functools.partial(_change_scale, pad=True))
backend("unpad_scale")(functools.partial(_change_scale, pad=False))


def _change_layouts(sources, targets, matrices, layout: str, pad: bool) -> None:
    """Compact scales to `layout` (`pad`), or back. matrices: (rows, cols, block_rows) of the codes."""
    words = _words(sources, targets, matrices, layout)
    if words:
        on_cpu = sources[0].is_cpu
        run_list(lambda part: _C.ScaleLayoutList(on_cpu, part, pad), words, _FIELDS, sources[0].device)


def _words(sources, targets, matrices, layout: str) -> list[int]:
    """Items of the native list, one for each matrix of a stack."""
    code, words = SCALE_LAYOUTS.index(layout), []
    places = zip(addresses_of("scales", sources), addresses_of("out", targets), strict=True)
    for source, target, (first, out), matrix in zip(sources, targets, places, matrices, strict=True):
        if target.numel():
            rows, cols, block_rows = matrix
            options = rows, ceil_div(cols, BLOCK), block_rows, code
            words += first, out, *options
            for e in range(1, len(target) if target.dim() == 3 else 1):  # scales are bytes
                words += first + e * source.stride(0), out + e * target.stride(0), *options
    return words


def padded_scale_list(
    scales: Sequence[tuple[torch.Tensor, torch.Tensor, tuple[int, int, int], str]], device: torch.device
) -> tuple[_C.ScaleLayoutList, int] | None:
    """The native list that fills padded scales, and its number of items, or None, from (compact, padded,
    (rows, cols, block_rows), layout).
    """
    words = [word for c, p, matrix, layout in scales for word in _words([c], [p], [matrix], layout)]
    return (_C.ScaleLayoutList(device.type == "cpu", words, True), len(words) // _FIELDS) if words else None


# Codes


def transpose_descriptor(rowwise: torch.Tensor, columnwise: torch.Tensor) -> _C.TransposeDescriptor:
    """For packed codes [M, K/2], transposed into [K, M/2]."""
    return _C.TransposeDescriptor(
        input=address_of("rowwise_data", rowwise),
        output=address_of("columnwise_data", columnwise),
        rows=rowwise.shape[0],
        cols=2 * rowwise.shape[1],
    )


def derived_side(record: NVFP4Storage | MXFP8Storage, side: str) -> Side:
    """A side with compact scales, transposed from the other side if the record lacks it."""
    copy: Side | None = getattr(record, side)
    if copy is not None:
        return copy
    if record.block[0] != BLOCK:
        raise ValueError(
            f"the source has no {side} copy, and block {record.block} does not let it follow from the other: "
            f"quantize the original values with {side}=True"
        )
    other: Side = getattr(record, SIDES[1 - SIDES.index(side)])
    scale = other.scales["compact"].view(torch.uint8).mT.contiguous().view(SCALE_DTYPE)
    return Side(torch.ops.zerofp4.transpose_packed(other.data), {"compact": scale}, other.amax)


@backend("transpose_packed")
def _transpose_packed(data) -> torch.Tensor:
    """Packed codes [M, K/2] to [K, M/2], also of a stack."""
    out = new_transpose(data)
    # One launch each: a table for all would be copied to the GPU, and waited for.
    for pair in [(data, out)] if data.dim() == 2 else zip(data, out, strict=True):
        if data.numel():
            descriptors = [transpose_descriptor(*pair)]
            _C.TransposePlan(data.is_cpu, descriptors).run(target_of(data.device))
    return out
