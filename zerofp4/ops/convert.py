"""zerofp4::convert: the conversions of the kernels, element by element."""

import torch

import zerofp4._C as _C
from zerofp4.format import SCALE_DTYPE
from zerofp4.ops.device import target_of
from zerofp4.ops.operator import backend

_FORMATS = {
    "e2m1": torch.uint8,
    "e4m3": SCALE_DTYPE,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
torch.library.define("zerofp4::convert", "(Tensor x, str format, float factor=1.0) -> Tensor")


def _new_converted(x, format, factor=1.0) -> torch.Tensor:
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"x must be contiguous float32, got {x.dtype} with strides {x.stride()}")
    if format not in _FORMATS:
        raise ValueError(f"format must be one of {tuple(_FORMATS)}, got {format!r}")
    return torch.empty_like(x, dtype=_FORMATS[format])


@backend("convert")
def _convert(x, format, factor=1.0) -> torch.Tensor:
    """x * factor with the conversions of the kernels; an E2M1 code is the low nibble of a byte of its own."""
    out = _new_converted(x, format, factor)
    if out.numel():
        arguments = (factor, x.numel(), list(_FORMATS).index(format), out.data_ptr())
        _C.convert(target_of(x.device), x.data_ptr(), *arguments)
    return out


torch.library.register_fake("zerofp4::convert", _new_converted)
