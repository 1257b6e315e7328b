"""zerofp4::pad_scale and zerofp4::unpad_scale: between compact scales and the padded layouts."""

import torch

from zerofp4 import _C
from zerofp4.format import SCALE_LAYOUTS
from zerofp4.layout import scale_shape
from zerofp4.ops.device import target_of
from zerofp4.ops.operator import backend, check_block_rows, check_scale

_LAYOUT_SCHEMA = "(Tensor scale, int rows, int cols, int block_rows, str layout) -> Tensor"
torch.library.define("zerofp4::pad_scale", _LAYOUT_SCHEMA)
torch.library.define("zerofp4::unpad_scale", _LAYOUT_SCHEMA)


def _new_scale(scale, rows, cols, block_rows, layout, *, source: str, result: str) -> torch.Tensor:
    check_block_rows(block_rows)
    if layout not in SCALE_LAYOUTS[1:]:
        raise ValueError(f"layout must be one of {SCALE_LAYOUTS[1:]}, got {layout!r}")
    check_scale("scale", scale, scale_shape(rows, cols, block_rows, source), scale.device)
    return scale.new_empty(scale_shape(rows, cols, block_rows, result))


def _new_padded(scale, rows, cols, block_rows, layout) -> torch.Tensor:
    return _new_scale(scale, rows, cols, block_rows, layout, source="compact", result=layout)


def _new_compact(scale, rows, cols, block_rows, layout) -> torch.Tensor:
    return _new_scale(scale, rows, cols, block_rows, layout, source=layout, result="compact")


@backend("pad_scale")
def _pad_scale(scale, rows, cols, block_rows, layout) -> torch.Tensor:
    out = _new_padded(scale, rows, cols, block_rows, layout)
    if out.numel():
        arguments = (rows, cols, block_rows, SCALE_LAYOUTS.index(layout))
        _C.pad_scale(target_of(scale.device), scale.data_ptr(), out.data_ptr(), *arguments)
    return out


@backend("unpad_scale")
def _unpad_scale(scale, rows, cols, block_rows, layout) -> torch.Tensor:
    out = _new_compact(scale, rows, cols, block_rows, layout)
    if out.numel():
        arguments = (rows, cols, block_rows, SCALE_LAYOUTS.index(layout))
        _C.unpad_scale(target_of(scale.device), scale.data_ptr(), out.data_ptr(), *arguments)
    return out


torch.library.register_fake("zerofp4::pad_scale", _new_padded)
torch.library.register_fake("zerofp4::unpad_scale", _new_compact)
