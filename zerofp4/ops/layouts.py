"""zerofp4::pad_scale and zerofp4::unpad_scale: between compact scales and the padded layouts; and their
multi-tensor forms.
"""

import collections
import functools
from collections.abc import Iterator, Sequence

import torch

import zerofp4._C as _C
from zerofp4.format import BLOCK, SCALE_DTYPE, SCALE_LAYOUTS
from zerofp4.layout import ceil_div, scale_shape
from zerofp4.ops.lists import run_list, run_stack, zip_lists
from zerofp4.ops.operator import backend, check_block_rows, check_scale, fake, is_plain_call
from zerofp4.ops.tensor_lists import addresses_of
from zerofp4.storage import check_memory

FIELDS = 6
"""Integers of an item of the native list."""

VECTOR_BYTES = 16

_ONE = "(Tensor scale, int rows, int cols, int block_rows, str layout) -> Tensor"
_MANY = "(Tensor[] scales, int[] rows, int[] cols, int[] block_rows, str layout) -> Tensor[]"
torch.library.define("zerofp4::pad_scale", _ONE)
torch.library.define("zerofp4::unpad_scale", _ONE)
torch.library.define("zerofp4::pad_scales", _MANY)
torch.library.define("zerofp4::unpad_scales", _MANY)


def _change_layouts(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    matrices: Sequence[tuple[int, int, int]],
    layout: str,
    pad: bool,
) -> None:
    """Fill targets from sources, which are not checked: compact scales to `layout` (`pad`), or back.

    matrices: (rows, cols, block_rows) of the quantized matrices.
    """
    words = _words(sources, targets, matrices, layout)
    if not words:
        return
    device, count = sources[0].device, len(words) // FIELDS
    if len(sources) == 1:
        run_stack(lambda part: _native(part, pad, device), words, count, device)
    else:
        run_list(_native(words, pad, device), count, device)


def _words(sources, targets, matrices, layout: str) -> list[int]:
    """Of the native list."""
    code, words = SCALE_LAYOUTS.index(layout), []
    inputs, outputs = addresses_of("scales", sources), addresses_of("out", targets)
    if 3 in set(map(torch.Tensor.dim, targets)):
        inputs, outputs, matrices = _unstacked(sources, targets, matrices)
    for source, target, (rows, cols, block_rows) in zip(inputs, outputs, matrices, strict=True):
        if rows and cols:
            words += source, target, rows, ceil_div(cols, BLOCK), block_rows, code
    return words


def _native(words: Sequence[int], pad: bool, device: torch.device) -> _C.ScaleLayoutList:
    return _C.ScaleLayoutList(device.type == "cpu", words, pad)


def _unstacked(sources, targets, matrices) -> tuple[list[int], list[int], list[tuple[int, int, int]]]:
    """Addresses and matrices, where scales of stacks of matrices are among them: matrix by matrix."""
    inputs, outputs, flat = [], [], []
    for source, target, matrix in zip(sources, targets, matrices, strict=True):
        stacked = target.dim() == 3
        inputs += addresses_of("scales", source.unbind() if stacked else [source])
        outputs += addresses_of("out", target.unbind() if stacked else [target])
        flat += [matrix] * (len(target) if stacked else 1)
    return inputs, outputs, flat


def _shapes(rows: int, cols: int, block_rows: int, layout: str, pad: bool) -> tuple[tuple, tuple]:
    """Of the scales that are given and of those that are made. Raises ValueError for an unknown option."""
    check_block_rows(block_rows)
    if layout not in SCALE_LAYOUTS[1:]:
        raise ValueError(f"layout must be one of {SCALE_LAYOUTS[1:]}, got {layout!r}")
    source, result = ("compact", layout) if pad else (layout, "compact")
    return scale_shape(rows, cols, block_rows, source), scale_shape(rows, cols, block_rows, result)


_known_shapes = functools.lru_cache(maxsize=1024)(_shapes)
"""Not for tracing, whose sizes may be symbols. A model has few shapes, and many weights of each."""


def _new_scale(name, scale, device, matrix, layout, pad: bool) -> torch.Tensor:
    """matrix: (rows, cols, block_rows). Of a stack of matrices the scales have three dimensions."""
    given, made = _shapes(*matrix, layout, pad)
    if scale.dim() == 3:
        given, made = (scale.shape[0], *given), (scale.shape[0], *made)
    check_scale(name, scale, given, device)
    return scale.new_empty(made)


def _new_scales(scales, rows, cols, block_rows, layout, pad: bool) -> list[torch.Tensor]:
    items = zip_lists(scales=scales, rows=rows, cols=cols, block_rows=block_rows)
    device = scales[0].device if scales else None
    return [
        _new_scale(f"scales[{i}]", scale, device, matrix, layout, pad)
        for i, (scale, *matrix) in enumerate(items)
    ]


def change_scales(scales, rows, cols, block_rows, layout, pad: bool) -> list[torch.Tensor]:
    """The multi-tensor operators, called past the dispatcher where nobody else would see the call. What this
    returns lies in one storage for each shape: to allocate a list one by one takes the host longer than all
    the rest. (An operator may not return tensors that share one.)
    """
    if not all(map(is_plain_call, scales[:1])):
        operator = torch.ops.zerofp4.pad_scales if pad else torch.ops.zerofp4.unpad_scales
        return operator(scales, rows, cols, block_rows, layout)
    matrices = list(zip(rows, cols, block_rows, strict=True))
    shapes = [_known_shapes(*matrix, layout, pad) for matrix in matrices]
    given, made = map(list, zip(*shapes, strict=True)) if shapes else ([], [])
    if scales and _are_as_usual(scales, given):
        out = _allocate(scales[0], made)
    else:  # which says what is wrong, and takes bytes too
        out = _new_scales(scales, rows, cols, block_rows, layout, pad)
    _change_layouts(scales, out, matrices, layout, pad)
    return out


def padded_scale_list(
    scales: Sequence[tuple[torch.Tensor, torch.Tensor, tuple[int, int, int], str]], device: torch.device
) -> tuple[_C.ScaleLayoutList, int] | None:
    """The native list that fills padded scales from compact ones, and its number of items; None of none.

    scales: (compact, padded, matrix as in _change_layouts, layout).
    """
    words = [word for c, p, matrix, layout in scales for word in _words([c], [p], [matrix], layout)]
    return (_native(words, True, device), len(words) // FIELDS) if words else None


def _are_as_usual(scales: Sequence[torch.Tensor], shapes: Sequence[tuple[int, int]]) -> bool:
    """Whether all are contiguous E4M3 scales of these shapes on one device."""
    return (
        [scale.shape for scale in scales] == shapes
        and all(scale.dtype == SCALE_DTYPE for scale in scales)
        and all(map(torch.Tensor.is_contiguous, scales))
        and len({scale.device for scale in scales}) == 1
    )


def _allocate(like: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Uninitialized tensors of the dtype and on the device of `like`. Those of a shape share a storage,
    where each then begins at an address that kernels read whole vectors from.
    """
    made: dict[tuple[int, int], Iterator[torch.Tensor]] = {}
    for shape, count in collections.Counter(shapes).items():
        if shape[0] * shape[1] * like.itemsize % VECTOR_BYTES == 0:
            made[shape] = iter(like.new_empty((count, *shape)).unbind())
        else:
            made[shape] = iter([like.new_empty(shape) for _ in range(count)])
    return [next(made[shape]) for shape in shapes]


def _register(name: str, pad: bool) -> None:
    def new_one(scale, rows, cols, block_rows, layout) -> torch.Tensor:
        return _new_scale("scale", scale, scale.device, (rows, cols, block_rows), layout, pad)

    def new_many(scales, rows, cols, block_rows, layout) -> list[torch.Tensor]:
        return _new_scales(scales, rows, cols, block_rows, layout, pad)

    def run_one(scale, rows, cols, block_rows, layout) -> torch.Tensor:
        check_memory("scale", scale)
        out = new_one(scale, rows, cols, block_rows, layout)
        _change_layouts([scale], [out], [(rows, cols, block_rows)], layout, pad)
        return out

    def run_many(scales, rows, cols, block_rows, layout) -> list[torch.Tensor]:
        out = new_many(scales, rows, cols, block_rows, layout)
        _change_layouts(scales, out, list(zip(rows, cols, block_rows, strict=True)), layout, pad)
        return out

    backend(name)(run_one)
    backend(f"{name}s")(run_many)
    fake(name)(new_one)
    fake(f"{name}s")(new_many)


_register("pad_scale", pad=True)
_register("unpad_scale", pad=False)
